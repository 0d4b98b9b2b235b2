"""Check every host in small, random models, and print the README's table of them.

    python examples/bench_hosts.py                     # prints the table
    python examples/bench_hosts.py --write README.md   # and puts it there, between its two marks

The cases are those of the tests: of every toolkit in tests/host_cases.py that is installed, and of
those in tests/test_host_TOOLKIT.py, where tests/standins stands in for a toolkit that is not. An
error is the largest absolute difference, in float32 on the CPU.
"""

import argparse
import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
# Last: an installed toolkit comes before what stands in for it.
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "standins"))

from host_cases import TOOLKITS, HostCase, calls, leaked

import ldsa_nn

TESTS = Path(__file__).resolve().parents[1] / "tests"
LEFT, RIGHT = 7, 2
STOOD_IN = ("espnet2", "icefall", "nemo", "wenet")
MARKS = "<!-- examples/bench_hosts.py -->\n", "<!-- end -->\n"


def present() -> list[str]:
    """The toolkits that have cases here."""
    return sorted([*filter(importlib.util.find_spec, TOOLKITS), *STOOD_IN])


def cases() -> Iterator[tuple[str, HostCase]]:
    """Every case, with its toolkit."""
    for toolkit in present():
        found = TOOLKITS[toolkit]() if toolkit in TOOLKITS else []
        if toolkit in STOOD_IN or toolkit == "speechbrain":
            battery = importlib.import_module("host_battery")
            rows = importlib.import_module(f"test_host_{toolkit}").ROWS
            found = [*found, *battery.host_cases(rows)]
        yield from ((toolkit, case) for case in found)


def is_stand_in(model: nn.Module) -> bool:
    """Whether any class of the model is of tests/standins."""
    files = {inspect.getfile(type(module)) for module in model.modules()}
    return any(Path(file).is_relative_to(TESTS / "standins") for file in files)


def layer_calls(case: HostCase, model: nn.Module, path: str) -> tuple[Tensor, Tensor | None] | None:
    """What the host gives to the new layer, x [B,T,D] and the mask [B,T]; None if it calls none."""
    seen = calls(case, model, model.get_submodule(path).layer)
    if not seen:
        return None
    (query, *_), kwargs, _ = seen[0]
    return query, kwargs["mask"]


def padding_error(layer: nn.Module, x: Tensor, mask: Tensor | None) -> float | None:
    """Of the last utterance: padded, less alone."""
    if mask is None:
        return None
    count = int(mask[-1].sum())
    return (layer(x, mask=mask)[-1, :count] - layer(x[-1:, :count])[0]).abs().max().item()


def streaming_error(layer: nn.Module, x: Tensor) -> float:
    """Chunks of 1, 2, 3, ... frames one after another, less the whole utterance at once."""
    state = layer.init_state(len(x), dtype=x.dtype)
    parts, start, size = [], 0, 1
    while start < x.shape[1]:
        part, state = layer.step(x[:, start : start + size], state)
        parts.append(part)
        start, size = start + size, size + 1
    streamed = torch.cat([*parts, layer.flush(state)], 1)[:, layer.delay :]
    return (streamed - layer(x)).abs().max().item()


def shown(error: float | None) -> str:
    """An error in the table."""
    return "-" if error is None else f"{error:.0e}" if error else "0"


def largest(errors: list[float | None]) -> str:
    """The largest error in the table; "-" where there is none or one is missing."""
    return shown(None if None in errors or not errors else max(errors))


@torch.no_grad()
def row(toolkit: str, case: HostCase) -> list[str]:
    """A host's line in the table."""
    model = case.build()
    stand_in = is_stand_in(model)
    report = ldsa_nn.replace_attention(model, host=toolkit, left=LEFT, right=RIGHT, use_bias=True)
    padding, streaming = [], []
    for path in report.replaced:
        layer = model.get_submodule(path).layer
        if given := layer_calls(case, model, path):
            padding.append(padding_error(layer, *given))
            streaming.append(streaming_error(layer, given[0][:1]))
    masked = case.exact is not None
    host_stream = None
    if case.streamed:
        streamed, whole = case.streamed()
        host_stream = (streamed - whole).abs().max().item()
    return [
        toolkit,
        case.name,
        "stand-in" if stand_in else "own",
        f"`{report.replaced[0].replace('.0.', '[i].')}`",
        largest(padding),
        shown(leaked(case, model) if masked else None),
        shown(leaked(case, case.build()) if masked else None),
        largest(streaming),
        shown(host_stream),
    ]


def table() -> str:
    """The whole table in Markdown, and the releases that it is of."""
    lines = [
        "| toolkit | host | code | replaced | padded - alone: attention | model | original model | "
        "streamed - offline: layer | model |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    own = set()
    for toolkit, case in tqdm([*cases()], "hosts", disable=None):
        if case.shown:
            cells = row(toolkit, case)
            lines.append(f"| {' | '.join(cells)} |")
            own |= {toolkit} if cells[2] == "own" else set()
    packages = importlib.metadata.packages_distributions()
    releases = [
        f"{toolkit} {importlib.metadata.version(packages[toolkit][0]).partition('+')[0]}"
        for toolkit in sorted(own & packages.keys())
    ]
    return "\n".join([*lines, "", f"Measured with {', '.join(releases)}.", ""])


def around(path: Path) -> tuple[str, str]:
    """What a file holds before and after its table, the marks included."""
    before, first, rest = path.read_text(encoding="utf-8").partition(MARKS[0])
    _, last, after = rest.partition(MARKS[1])
    if not (first and last):
        raise ValueError(f"{path} lacks the lines {' and '.join(map(str.strip, MARKS))}")
    return before + first, last + after


def main(arguments: list[str] | None = None) -> None:
    """Print the table; write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the table into FILE")
    args = parser.parse_args(arguments)
    if args.write:
        try:
            around(args.write)
        except (OSError, ValueError) as error:
            parser.error(f"argument --write: {error}")
    text = table()
    print(text)
    if args.write:
        before, after = around(args.write)  # as it is by now
        args.write.write_text(f"{before}{text}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
