"""Check every host in small, random models, and print the README's table of them.

    python examples/bench_hosts.py                     # prints the table
    python examples/bench_hosts.py --write README.md   # and puts it there, between its two marks

The cases are those of tests/host_cases.py, of every toolkit there that is installed. An error is
the largest absolute difference, in float32 on the CPU.
"""

import argparse
import importlib.metadata
import importlib.util
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from host_cases import TOOLKITS, HostCase, calls, leaked

import ldsa_nn

LEFT, RIGHT = 7, 2
MARKS = "<!-- examples/bench_hosts.py -->\n", "<!-- end -->\n"


def layer_inputs(case: HostCase, model: nn.Module, path: str) -> tuple[Tensor, Tensor | None]:
    """What the host gives to the new layer: x [B,T,D] and the mask [B,T]."""
    layer = model.get_submodule(path).layer
    (query, *_), kwargs, _ = calls(case, model, layer)[0]
    return query, kwargs["mask"]


def padding_error(layer: nn.Module, x: Tensor, mask: Tensor | None) -> float | None:
    """Of the last utterance: padded, less alone."""
    if mask is None:
        return None
    count = int(mask[-1].sum())
    return (layer(x, mask=mask)[-1, :count] - layer(x[-1:, :count])[0]).abs().max().item()


def streaming_error(layer: nn.Module, x: Tensor) -> float | None:
    """Chunks of 1, 2, 3, ... frames one after another, less the whole utterance at once."""
    if not hasattr(layer, "step"):
        return None
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


@torch.no_grad()
def row(toolkit: str, case: HostCase) -> list[str]:
    """A host's line in the table."""
    model = case.build()
    report = ldsa_nn.replace_attention(model, host=toolkit, left=LEFT, right=RIGHT, use_bias=True)
    where = report.replaced[0].replace(".0.", "[i].")
    padding, streaming = [], []
    for path in report.replaced:
        layer = model.get_submodule(path).layer
        x, mask = layer_inputs(case, model, path)
        padding.append(padding_error(layer, x, mask))
        streaming.append(streaming_error(layer, x[:1]))
    masked = case.exact is not None
    return [
        case.name,
        f"`{where}`",
        shown(max(padding) if masked else None),
        shown(leaked(case, model) if masked else None),
        shown(leaked(case, case.build()) if masked else None),
        shown(None if None in streaming else max(streaming)),
    ]


def table() -> str:
    """The whole table in Markdown, and the releases that it is of."""
    lines = [
        "| toolkit | host | replaced | padded - alone: attention | model | original model | "
        "streamed - offline |",
        "|---|---|---|---|---|---|---|",
    ]
    releases = []
    present = [toolkit for toolkit in TOOLKITS if importlib.util.find_spec(toolkit)]
    for toolkit in tqdm(present, "hosts", disable=None):
        releases.append(f"{toolkit} {importlib.metadata.version(toolkit).partition('+')[0]}")
        for case in TOOLKITS[toolkit]():
            if case.shown:
                lines.append(f"| {' | '.join([toolkit, *row(toolkit, case)])} |")
    return "\n".join([*lines, "", f"Measured with {', '.join(releases)}.", ""])


def main() -> None:
    """Print the table; write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the table into FILE")
    args = parser.parse_args()
    text = table()
    print(text)
    if args.write:
        old = args.write.read_text(encoding="utf-8")
        before, first, rest = old.partition(MARKS[0])
        _, last, after = rest.partition(MARKS[1])
        if not (first and last):
            raise SystemExit(f"{args.write} lacks the lines {' and '.join(map(str.strip, MARKS))}")
        args.write.write_text(f"{before}{first}{text}{last}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
