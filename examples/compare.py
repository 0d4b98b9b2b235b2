"""Train the same recogniser with every attention and several seeds, and compare them in a table.

    python examples/compare.py --out DIR --jobs 4 -- --data DATA --steps 3000 --ema 0.999
    python examples/compare.py --out DIR --list -- --data DATA --steps 3000 --ema 0.999

What follows the -- is train_ctc.py's and the same for all runs; the model is `ConformerEncoder`.
Its --ffn is that of "mhsa", and the others' is chosen so that all have as many parameters. DIR gets
a folder a run with its log, table.md and context.png. The same command goes on where it was
stopped; processes of it that share a DIR, each with an --only of its own, share the work.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import train_ctc
from matplotlib.figure import Figure
from recogniser import build
from tqdm import tqdm

# Before and after each frame, 40 ms each; "sla" and "bisla" have no window, mhsa's is not used.
GRID = {
    "mhsa": ("mhsa", 7, 7),
    "ldsa-7-7": ("ldsa", 7, 7),
    "ldsa-14-0": ("ldsa", 14, 0),
    "hybrid-7-7": ("hybrid", 7, 7),
    "mixed-14-0": ("mixed", 14, 0),
    "sla": ("sla", 0, 0),
    "bisla": ("bisla", 0, 0),
    "ldsa-1-1": ("ldsa", 1, 1),
    "ldsa-3-3": ("ldsa", 3, 3),
    "ldsa-15-15": ("ldsa", 15, 15),
    "ldsa-31-31": ("ldsa", 31, 31),
}
NAMES = {
    "mhsa": "self-attention",
    "ldsa": "LDSA",
    "hybrid": "LDSA, then self-attention",
    "mixed": "LDSA and SLA, three to one",
    "sla": "SLA",
    "bisla": "SLA both ways",
}
OWN = "--encoder --attention --left --right --seed --out --resume".split()
TRAIN = [sys.executable, str(Path(__file__).with_name("train_ctc.py"))]


class Run(NamedTuple):
    """A model of the grid, by its name there, with a seed; arguments are train_ctc.py's."""

    name: str
    seed: int
    parameters: int
    folder: Path
    arguments: list[str]

    @property
    def results(self) -> dict[str, Any] | None:
        """What train_ctc.py returned, once it is done.

        Raises:
            ValueError: the file is damaged.
        """
        path = self.folder / "results.json"
        if not path.exists():
            return None
        results = read_json(path, "and the run goes on")
        if not isinstance(results, dict) or "held_out" not in results:
            raise ValueError(f"{path} has no held_out: delete it, and the run goes on")
        return results

    @property
    def begun(self) -> bool:
        return (self.folder / "checkpoint.pt").exists()

    @property
    def state(self) -> str:
        return "done" if self.results else "interrupted" if self.begun else "to do"

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"


def read_json(path: Path, then: str) -> Any:
    """What a file of --out holds; then: what follows where it is damaged and gets deleted."""
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): delete it, {then}") from error


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A file to write that then takes path's place, though another process may write it too."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".") as folder:
        yield Path(folder, path.name)
        os.replace(Path(folder, path.name), path)


def size(arguments: Sequence[str]) -> int:
    """Parameters of the model of a command line, but for those of its vocabulary."""
    with torch.device("meta"):
        return sum(
            p.numel() for p in build(vars(train_ctc.parse(list(arguments))), "").parameters()
        )


def plan(recipe: list[str], out: Path, names: Sequence[str], seeds: int) -> list[Run]:
    """The runs of the grid, a seed after the other.

    Raises:
        ValueError: the sizes of two models differ by more than 5 %: they are too small for that.
    """

    def words(name: str) -> list[str]:
        attention, left, right = GRID[name]
        grid = f"--encoder streaming --attention {attention} --left {left} --right {right}"
        return [*recipe, *grid.split()]

    wanted = size(words("mhsa"))
    models = {}
    for name in names:
        given = words(name)
        ffn = train_ctc.parse(given).ffn
        if name != "mhsa":
            # Parameters grow linearly with this width.
            least = size([*given, "--ffn", "1"])
            ffn = 1 + (wanted - least) / (size([*given, "--ffn", "2"]) - least)
            # Tensor cores take widths in eights.
            ffn = max(1, round(ffn) if ffn < 256 else 8 * round(ffn / 8))
        given += ["--ffn", str(ffn)]
        models[name] = given, size(given)
        if abs(models[name][1] / wanted - 1) > 0.05:
            raise ValueError(
                f"expected --dim, --layers and --ffn with which all models can have as many "
                f"parameters, got {models[name][1]:,} of {name} and {wanted:,} of mhsa"
            )
    runs = []
    for seed in range(seeds):
        for name, (given, parameters) in models.items():
            folder = out / name / f"seed-{seed}"
            last = ["--seed", str(seed), "--out", str(folder)]
            runs.append(Run(name, seed, parameters, folder, [*given, *last]))
    return runs


def on_disk(out: Path) -> list[Run]:
    """The runs that have a folder in out, of any of the grid's models and seeds."""
    folders = [f for name in GRID for f in sorted(out.glob(f"{name}/seed-*"))]
    return [Run(f.parent.name, int(f.name[5:]), 0, f, []) for f in folders if f.name[5:].isdigit()]


def bind(out: Path, recipe: list[str], runs: list[Run], write: bool) -> None:
    """Make out the place of this recipe's runs; or, without write, only see whether it may be.

    Raises:
        ValueError: it has runs of another one.
    """
    path = out / "recipe.json"
    there = read_json(path, "if its runs are of this recipe") if path.exists() else None
    if there == recipe:
        return
    if there is not None and any(run.begun or run.results for run in runs):
        raise ValueError(
            f"--out {out} has runs of another recipe, {' '.join(map(str, there))}: repeat it after"
            " the --, or give another --out"
        )
    if write:
        out.mkdir(parents=True, exist_ok=True)
        with whole(path) as part:
            part.write_text(json.dumps(recipe) + "\n")


def train(runs: list[Run], jobs: int, command: Sequence[str]) -> list[Run]:
    """Train those that are not done, so many at the same time; return those that failed.

    After one that failed no more are begun until another has come to a checkpoint: if none does,
    what is wrong is the recipe's. KeyboardInterrupt goes on to the caller once all have stopped
    with a checkpoint.
    """
    # Those that were interrupted first: else there would be ever more half done.
    waiting = sorted((run for run in runs if not run.results), key=lambda run: not run.begun)
    running: dict[subprocess.Popen, Run] = {}
    failed: list[Run] = []
    with tqdm(total=len(runs), initial=len(runs) - len(waiting), desc="train", unit="run") as bar:
        try:
            while waiting or running:
                may_go_on = not failed or any(run.begun or run.results for run in runs)
                if not may_go_on and not running:
                    break
                while waiting and may_go_on and len(running) < jobs:
                    run = waiting.pop(0)
                    running[start(run, command)] = run
                    bar.set_postfix(running=len(running), failed=len(failed))
                for process in [p for p in running if p.poll() is not None]:
                    run = running.pop(process)
                    if process.returncode or not run.results:
                        failed.append(run)
                        last = run.log.read_text(errors="replace").strip().splitlines()[-1:]
                        why = ": ".join([f"{run.name}, seed {run.seed} failed", *last])
                        bar.write(why, file=sys.stderr)
                    bar.set_postfix(running=len(running), failed=len(failed))
                    bar.update()
                time.sleep(0.1)
        finally:
            try:
                for process in running:
                    process.terminate()  # as a Ctrl-C, at which train_ctc.py writes a checkpoint
                for process in running:
                    process.wait()
            finally:  # at a second Ctrl-C; the last checkpoint is whole all the same
                for process in running:
                    process.kill()
    return failed


def start(run: Run, command: Sequence[str]) -> subprocess.Popen:
    """A process that begins a run, or goes on with it."""
    run.folder.mkdir(parents=True, exist_ok=True)
    resume = ["--resume"] if run.begun else []
    with run.log.open("a") as log:
        # Apart from the terminal, whose Ctrl-C would be the first of two, and two stop at once.
        return subprocess.Popen(
            [*command, *run.arguments, *resume],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Mean and, of several values, sample standard deviation."""
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def by_name(runs: list[Run]) -> dict[str, list[dict[str, Any]]]:
    """The results that there are of each model."""
    found: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        if results := run.results:
            found.setdefault(run.name, []).append(results)
    return found


def table(runs: list[Run]) -> str:
    """The results so far in Markdown."""
    found = by_name(runs)
    if not found:
        return "No run is done.\n"
    first = next(iter(found.values()))[0]
    splits = sorted(first["held_out"])
    searched = [""] + ([f", {first['options']['beam']} beams"] if first["options"]["beam"] else [])
    rates = [
        (f"{split} {rate.upper()} %{beams}", split, rate, bool(beams))
        for split in splits
        for beams in searched
        for rate in ("wer", "cer")
    ]
    head = ["attention", "left, right", "seeds", *[rate[0] for rate in rates], "parameters"]
    head += ["delay, ms", "device", "training, s", "peak memory, MiB"]
    lines = [head, ["---"] * len(head)]
    for name, results in found.items():
        attention, left, right = GRID[name]
        window = f"{left}, {right}" if attention in ("ldsa", "hybrid", "mixed") else "all"
        line = [NAMES[attention], window, str(len(results))]
        for _, split, rate, beams in rates:
            held_out = [r["held_out"][split] for r in results]
            line.append(spread([h["beam"][rate] if beams else h[rate] for h in held_out]))
        delay, peak = results[0]["delay_ms"], [r["peak_memory_mib"] for r in results]
        line += [
            f"{results[0]['parameters']:,}",
            "offline" if delay is None else str(delay),
            ", ".join(sorted({r["device"] for r in results})),
            spread([60 * r["minutes"] for r in results], 0),
            "" if None in peak else spread(peak, 0),
        ]
        lines.append(line)
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return (
        f"{text}\nMean ± sample standard deviation over seeds; no language model, no lexicon;"
        " greedy decoding unless beams are told. Windows in frames of 40 ms. Delay: look-ahead of a"
        " stream. Training's time is of runs that may have shared the machine, and compares on one"
        " kind of device only; memory is the GPU's.\n"
    )


def draw(path: Path, runs: list[Run]) -> None:
    """Save an image, WER against the context of LDSA that sees as far ahead as back, if any is."""
    found = by_name(runs)
    points = {
        1 + left + right: found[name]
        for name, (attention, left, right) in GRID.items()
        if name in found and attention == "ldsa" and left == right
    }
    if not points:
        path.unlink(missing_ok=True)
        return
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for split in sorted({s for results in points.values() for r in results for s in r["held_out"]}):
        contexts = sorted(points)
        rates = {c: [r["held_out"][split]["wer"] for r in points[c]] for c in contexts}
        line = axes.errorbar(
            contexts,
            [statistics.mean(rates[c]) for c in contexts],
            [statistics.stdev(rates[c]) if len(rates[c]) > 1 else 0 for c in contexts],
            marker="o",
            capsize=3,
            label=f"LDSA, {split}",
        )
        if "mhsa" in found:
            mean = statistics.mean(r["held_out"][split]["wer"] for r in found["mhsa"])
            color = line.lines[0].get_color()
            axes.axhline(mean, color=color, linestyle="--", label=f"self-attention, {split}")
    axes.set(xscale="log", xlabel="context, frames of 40 ms", ylabel="WER, %")
    axes.set_xticks(sorted(points), [str(c) for c in sorted(points)])
    axes.minorticks_off()
    axes.legend()
    with whole(path) as part:
        figure.savefig(part, dpi=120)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    count = train_ctc.number(int, "a whole number of at least 1", lambda n: n >= 1)
    add("--out", type=Path, default=Path("runs/compare"), help="directory of the runs")
    add("--seeds", type=count, default=5, help="runs of each model")
    add("--jobs", type=count, default=1, help="runs at the same time, on one GPU or the CPU")
    add("--only", nargs="+", choices=GRID, default=list(GRID), metavar="MODEL", help=" ")
    add("--list", action="store_true", help="show the runs, and train none")
    add("recipe", nargs="*", metavar="-- OPTION", help="of train_ctc.py, for all runs")
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(f"expected the options of train_ctc.py after a --, got {' '.join(unknown)}")
    for word in args.recipe:
        option = word.partition("=")[0]
        if own := [name for name in OWN if len(option) > 2 and name.startswith(option)]:
            parser.error(f"{own[0]} is the grid's, not the recipe's: got {word} after the --")
    return args


def main(argv: list[str] | None = None, command: Sequence[str] = TRAIN) -> int:
    """Run the grid; the exit status: 1 where a run failed, 130 after Ctrl-C."""
    args = parse(argv)
    try:
        runs = plan(args.recipe, args.out, args.only, args.seeds)
        states = [run.state for run in runs]
        every = on_disk(args.out)
        _ = [run.state for run in every]  # a damaged file is told now, not when all are trained
        bind(args.out, args.recipe, every, write=not args.list)
    except OSError as error:
        raise SystemExit(f"cannot write to --out {args.out}: {error}") from error
    except ValueError as error:
        raise SystemExit(f"{error}") from error
    if args.list:
        print("model, seed, parameters without those of the vocabulary, state")
        for run, state in zip(runs, states, strict=True):
            print(f"{run.name:10}  seed {run.seed}  {run.parameters:11,}  {state}")
        return 0

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    # A lost terminal would leave the runs alone; nohup's has none to lose.
    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    signals = {getattr(signal, name): signal.getsignal(getattr(signal, name)) for name in names}
    signals = {number: before for number, before in signals.items() if before != signal.SIG_IGN}
    for number in signals:
        signal.signal(number, stop)
    failed: list[Run] = []
    status = 0
    try:
        failed = train(runs, args.jobs, command)
    except KeyboardInterrupt:
        print("stopped: the same command goes on", file=sys.stderr)
        status = 130
    except OSError as error:
        raise SystemExit(f"cannot write to --out {args.out}: {error}") from error
    finally:
        for number, before in signals.items():
            signal.signal(number, before)
    every = on_disk(args.out)  # also those of earlier or other calls that --only leaves out here
    text = table(every)
    print(text)
    with whole(args.out / "table.md") as part:
        part.write_text(text, encoding="utf-8")
    image = args.out / "context.png"
    draw(image, every)
    print(f"In {args.out}: table.md" + (", context.png" if image.exists() else ""))
    for run in failed:
        print(f"failed: {run.name}, seed {run.seed}: {run.log}", file=sys.stderr)
    if failed and not any(run.begun or run.results for run in runs):
        print("no run came to a checkpoint: the others were not tried", file=sys.stderr)
    return status or int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
