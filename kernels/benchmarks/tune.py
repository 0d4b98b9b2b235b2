"""Time every row that `_tiles`, the tile table of the fused kernels, could have, on a GPU.

    python kernels/benchmarks/tune.py [--cases TEXT] [--json FILE]

For each case and direction: microseconds of the kernel with the best rows and with the one that
`_tiles` in torch-ext/ldsa/ldsa.py chooses, timed as in benchmark.py, each compared with float64
before it is timed. A row is (BLOCK, STEPS, BLOCK_D, num_warps, maxnreg): frames of a block, blocks
of a program, channels of a tile, warps, and the limit of registers. What wins for all cases of a
kind goes into `_tiles` by hand. Each row is compiled anew, which takes an hour for all cases.
"""

import argparse
import importlib
import importlib.util
from itertools import product

import torch
from cases import BENCHMARKS
from measure import WrongError, checked, file, machine, operators, ours, replay_us, report

from ldsa_nn import _ldsa

kernel = importlib.import_module(f"{_ldsa.__name__}.ldsa")
CASES = list(dict.fromkeys(case for group in BENCHMARKS.values() for case in group))
SHOWN = 5


def present(case, backward):
    """The row that is chosen now."""
    time_last = case.layout == "time_last"
    return kernel._tiles(case.window, case.head_dim, case.dtype.itemsize, time_last, backward)


def rows(case, backward):
    """Rows worth a try, the present one first."""
    width = 16
    while width < case.head_dim:
        width *= 2
    blocks = [block for block in (16, 32, 64) if block >= min(case.window, 64) // 4]
    tried = product(
        blocks,
        (1, 2, 4, 8) if backward else (1,),
        [channels for channels in (width // 2, width) if channels >= 16],
        (1, 2, 4, 8),
        (None, 64, 80, 96, 128, 168),
    )
    # A warp multiplies 16 frames, and with more than 8 KB of values of its own it spills.
    fitting = [
        row
        for row in tried
        if row[3] <= row[0] // 16 * max(1, row[2] // 32)
        and row[0] * row[2] * case.dtype.itemsize <= 8192 * row[3]
    ]
    return list(dict.fromkeys([present(case, backward), *fitting]))


def timed(case, backward, row):
    """Microseconds of a direction with a row of the table, the other direction as it is."""
    table = kernel._tiles
    kernel._tiles = lambda *sizes: row if sizes[-1] == backward else table(*sizes)
    kernel._launches.clear()
    try:
        call = operators(case, *checked(case, ours))[backward]
        with torch.no_grad():
            return replay_us(call)
    finally:
        kernel._tiles = table
        kernel._launches.clear()


def tuned(case, backward):
    """A line of the report: the present row and the best."""
    from triton.errors import TritonError

    times = {}
    for row in rows(case, backward):
        try:
            times[row] = timed(case, backward, row)
        except (TritonError, WrongError) as error:
            if row == present(case, backward):  # any other may be no row for this GPU
                raise WrongError(f"{row}: {error}") from error
    now = present(case, backward)
    best = sorted(times, key=times.__getitem__)[:SHOWN]
    return {
        "case": f"{case}, {'backward' if backward else 'forward'}",
        "now": f"{now} {times[now]:.1f}",
        **{f"best {i + 1}": f"{row} {times[row]:.1f}" for i, row in enumerate(best)},
    }


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", metavar="TEXT", default="", help="those whose name holds TEXT")
    parser.add_argument("--json", type=file(), help="also write the lines to this file")
    args = parser.parse_args(arguments)
    cases = [case for case in CASES if args.cases in str(case)]
    if not cases:
        names = "\n  ".join(map(str, CASES))
        parser.error(f"argument --cases: no case holds {args.cases!r}; there are\n  {names}")
    if not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        raise SystemExit("this benchmark needs a GPU and Triton")
    report(machine(), {str(case): lines(case) for case in cases}, args.json)


def lines(case):
    """Calls that tune one direction each, for `report`."""
    return [lambda backward=backward: tuned(case, backward) for backward in (False, True)]


if __name__ == "__main__":
    main()
