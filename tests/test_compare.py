"""The comparison: its grid, its runs side by side, stopped and resumed, its table and plot."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from conftest import ROOT

for package in ("torchaudio", "soundfile", "jiwer", "matplotlib"):
    pytest.importorskip(package)
sys.path.insert(0, str(ROOT / "examples"))

import compare  # noqa: E402
import recogniser  # noqa: E402
import train_ctc  # noqa: E402

# Stands for train_ctc.py: its WER follows from window and seed; a SIGTERM while it waits leaves a
# checkpoint. What it is to do stands in files beside the runs' folders.
STUB = """
import json, pathlib, signal, sys, time
words = sys.argv[1:]
value = {a: b for a, b in zip(words, words[1:]) if a.startswith("--")}
out = pathlib.Path(value["--out"])
place = out.parent.parent
with (place / "calls").open("a") as calls:
    calls.write(json.dumps(words) + "\\n")
checkpoint = out / "checkpoint.pt"
assert ("--resume" in words) == checkpoint.exists(), words
def stop(*_):
    checkpoint.touch()
    sys.exit("stopped")
signal.signal(signal.SIGTERM, stop)
print("at work", flush=True)
if (place / "fail").exists() and value["--attention"] == "sla":
    sys.exit("no sla here")
(out / "begun").touch()
while (place / "wait").exists():
    time.sleep(0.02)
wer = 10 + int(value["--left"]) + int(value["--seed"])
score = {"wer": wer, "cer": wer / 2, "beam": {"wer": wer - 1, "cer": wer / 2}}
results = {"held_out": {"dev": score, "test": score}, "options": {"beam": 8},
           "parameters": 1234, "delay_ms": None if value["--attention"] == "mhsa" else 80,
           "peak_memory_mib": 100.5, "minutes": 0.5, "device": "cpu"}
checkpoint.touch()
(out / "results.json").write_text(json.dumps(results))
"""
RECIPE = "-- --dim 32 --layers 2 --heads 2 --ffn 64 --kernel 3 --steps 2 --device cpu".split()


@pytest.fixture
def out(tmp_path):
    (tmp_path / "grid").mkdir()
    return tmp_path / "grid"


@pytest.fixture
def stub(tmp_path):
    path = tmp_path / "stub.py"
    path.write_text(STUB)
    return [sys.executable, "-S", str(path)]


def calls(out: Path) -> list[list[str]]:
    return [json.loads(line) for line in (out / "calls").read_text().splitlines()]


def listed(out: Path, capsys, *options: str) -> list[str]:
    capsys.readouterr()
    assert compare.main(["--out", str(out), *options, "--list", *RECIPE]) == 0
    return capsys.readouterr().out.splitlines()[1:]


def test_the_grid_is_of_models_of_one_size(out, capsys):
    lines = listed(out, capsys)
    assert len(lines) == 5 * len(compare.GRID)
    assert not list(out.iterdir())
    runs = compare.plan(RECIPE[1:], out, list(compare.GRID), 1)
    parameters = []
    for run in runs:
        args = train_ctc.parse(run.arguments)
        assert (args.attention, args.left, args.right) == compare.GRID[run.name]
        assert (args.encoder, args.seed, args.out) == ("streaming", 0, run.folder)
        parameters.append(sum(p.numel() for p in recogniser.build(vars(args), "").parameters()))
    assert parameters == [run.parameters for run in runs]
    assert max(parameters) < 1.05 * min(parameters)
    assert {(kind, left + 1 + right) for kind, left, right in compare.GRID.values()} >= {
        *(("ldsa", context) for context in (3, 7, 15, 31, 63)),
        *((kind, 15) for kind in ("mhsa", "hybrid", "mixed")),
    }
    assert compare.GRID["ldsa-14-0"] == ("ldsa", 14, 0)
    with pytest.raises(
        SystemExit, match=r"expected --dim, --layers and --ffn .* of \S+ and .* of mhsa"
    ):
        compare.main(["--out", str(out), "--list", "--", "--dim", "8", "--ffn", "2"])


def test_a_grid_with_a_table_and_a_plot(out, stub, capsys):
    only = "--only mhsa ldsa-1-1 ldsa-7-7 sla --seeds 3 --jobs 3".split()
    assert compare.main(["--out", str(out), *only, *RECIPE], stub) == 0
    assert len(calls(out)) == 12
    text = (out / "table.md").read_text()
    assert text in capsys.readouterr().out
    head, _, *rows = (line for line in text.splitlines() if line.startswith("|"))
    cells = [cell.strip() for cell in head.strip("|").split("|")]
    assert cells[3:7] == ["dev WER %", "dev CER %", "dev WER %, 8 beams", "dev CER %, 8 beams"]
    found = {}
    for row in rows:
        row = dict(zip(cells, (cell.strip() for cell in row.strip("|").split("|")), strict=True))
        found[row["attention"], row["left, right"]] = row
    assert len(found) == 4
    row = found["LDSA", "7, 7"]
    assert row["test WER %"] == "18.00 ± 1.00"
    assert row["test CER %"] == "9.00 ± 0.50"
    assert row["test WER %, 8 beams"] == "17.00 ± 1.00"
    assert (row["seeds"], row["parameters"], row["delay, ms"]) == ("3", "1,234", "80")
    assert (row["training, s"], row["peak memory, MiB"]) == ("30 ± 0", "100 ± 0")
    assert row["device"] == "cpu"
    assert found["self-attention", "all"]["delay, ms"] == "offline"
    assert (out / "context.png").read_bytes().startswith(b"\x89PNG")
    assert "at work" in (out / "sla" / "seed-2" / "log.txt").read_text()

    assert compare.main(["--out", str(out), *only, *RECIPE], stub) == 0
    assert len(calls(out)) == 12  # what is done is not done again
    others = "--only bisla --seeds 1".split()
    assert compare.main(["--out", str(out), *others, *RECIPE], stub) == 0
    rows = [line for line in (out / "table.md").read_text().splitlines() if line.startswith("|")]
    assert [row.split(" | ")[2] for row in rows[2:]] == ["3", "3", "3", "1", "3"]  # nothing is lost
    with pytest.raises(SystemExit, match=r"runs of another recipe, --dim 32 .* give another --out"):
        compare.main(["--out", str(out), *only, *RECIPE, "--ema", "0.9"], stub)


def test_a_run_that_fails_is_named_and_the_others_go_on(out, stub, capsys):
    (out / "fail").touch()
    only = "--only sla mhsa --seeds 2 --jobs 2".split()
    assert compare.main(["--out", str(out), *only, *RECIPE], stub) == 1
    error = capsys.readouterr().err
    for seed in range(2):
        log = out / "sla" / f"seed-{seed}" / "log.txt"
        assert f"failed: sla, seed {seed}: {log}" in error
        assert "no sla here" in log.read_text()
    states = [line.split()[-2:] for line in listed(out, capsys, *only)]
    assert states == [["to", "do"], states[1], ["to", "do"], states[3]]
    assert states[1][1] == states[3][1] == "done"
    assert not (out / "context.png").exists()  # no LDSA, no context
    (out / "fail").unlink()
    assert compare.main(["--out", str(out), *only, *RECIPE], stub) == 0
    assert len(calls(out)) == 6


def test_processes_that_begin_at_once_share_a_place(out):
    with ThreadPoolExecutor(2) as pool:
        for _ in range(50):
            (out / "recipe.json").unlink(missing_ok=True)
            both = threading.Barrier(2)

            def begin(barrier=both):
                barrier.wait()
                compare.bind(out, ["--steps", "3"], [], write=True)

            for started in [pool.submit(begin), pool.submit(begin)]:
                started.result()
    assert json.loads((out / "recipe.json").read_text()) == ["--steps", "3"]
    assert [path.name for path in out.iterdir()] == ["recipe.json"]


def test_a_recipe_that_no_run_can_use_ends_at_once_and_binds_nothing(out, stub, capsys):
    (out / "fail").touch()
    only = "--only sla --seeds 5 --jobs 2".split()
    assert compare.main(["--out", str(out), *only, *RECIPE], stub) == 1
    error = capsys.readouterr().err
    assert "sla, seed 0 failed: no sla here" in error
    assert "no run came to a checkpoint: the others were not tried" in error
    assert len(calls(out)) == 2
    (out / "fail").unlink()
    other = [*RECIPE, "--lr", "1e-3"]  # the place is nobody's yet
    assert compare.main(["--out", str(out), *only, *other], stub) == 0
    for action in (["--list"], []):  # now it is
        with pytest.raises(SystemExit, match=r"has runs of another recipe, .*--lr 1e-3"):
            compare.main(["--out", str(out), *only, *action, *RECIPE], stub)


@pytest.mark.parametrize("text", ["", "{bad", '{"a": 1}', "[]"])
def test_damaged_files_are_named(out, stub, text):
    only = "--only sla --seeds 1".split()
    assert compare.main(["--out", str(out), *only, *RECIPE], stub) == 0
    path = out / "sla" / "seed-0" / "results.json"
    for damaged in (path, out / "recipe.json") if not text.startswith(("[", '{"')) else (path,):
        before = damaged.read_text()
        damaged.write_text(text)
        for action in (["--list"], []):
            with pytest.raises(SystemExit, match=f"^{damaged} .*: delete it"):
                compare.main(["--out", str(out), *only, *action, *RECIPE], stub)
        damaged.write_text(before)
    assert compare.main(["--out", str(out), *only, *RECIPE], stub) == 0


def test_a_place_that_cannot_be_written(out, stub):
    (out / "sla").touch()
    with pytest.raises(SystemExit, match=f"^cannot write to --out {out}: .*sla"):
        compare.main(["--out", str(out), "--only", "sla", *RECIPE], stub)
    with pytest.raises(SystemExit, match=r"^cannot write to --out "):
        compare.main(["--out", str(out / "sla"), "--only", "sla", *RECIPE], stub)


@pytest.mark.skipif(os.name != "posix", reason="signals between processes")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", None)])
def test_stopped_it_leaves_all_resumable(out, stub, capsys, number):
    """As a Ctrl-C in a terminal, which signals the whole group of processes."""
    (out / "wait").touch()
    only = "--only mhsa ldsa-7-7 sla --seeds 1 --jobs 2".split()
    arguments = ["--out", str(out), *only, *RECIPE]
    # A job in the background of a script inherits that Ctrl-C is ignored; a terminal's is not so.
    code = "import signal, sys, compare; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code += "; signal.signal(signal.SIGHUP, signal.SIG_DFL)"
    code += f"; sys.exit(compare.main({arguments!r}, {stub!r}))"
    path = os.pathsep.join([str(ROOT), str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while len(list(out.glob("*/*/begun"))) < 2 and process.poll() is None:
        time.sleep(0.05)
    os.killpg(process.pid, number)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    assert "stopped: the same command goes on" in error
    states = [line.split()[-1] for line in listed(out, capsys, *only)]
    assert states == ["interrupted", "interrupted", "do"]

    (out / "wait").unlink()
    # First those that had begun, though one that had not stands before them.
    arguments[arguments.index("--only") + 1 : arguments.index("--seeds")] = (
        "sla mhsa ldsa-7-7".split()
    )
    assert compare.main([*arguments[: arguments.index("--jobs")], *RECIPE], stub) == 0
    assert ["--resume" in words for words in calls(out)] == 2 * [False] + 2 * [True] + [False]
    assert (out / "table.md").read_text().count("offline") == 1


def test_what_is_the_grids_own_is_refused_in_the_recipe(capsys):
    for word in ("--seed", "--out=here", "--attention", "--att", "--resume", "--o"):
        with pytest.raises(SystemExit):
            compare.parse(["--", word, "1"])
        assert "is the grid's, not the recipe's" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        compare.main(["--", "--no-such-option"])
    with pytest.raises(SystemExit):
        compare.parse(["--jobs", "2", "--data", "x"])
    assert "options of train_ctc.py after a --, got --data" in capsys.readouterr().err


def test_a_real_grid_of_two_runs(tmp_path, data_dir, monkeypatch):
    """Two steps each, on three utterances a split of AN4, by the real train_ctc.py."""
    rows = [json.loads(line) for line in (data_dir / "an4" / "manifest.jsonl").open()]
    few = {split: [r for r in rows if r["split"] == split][:3] for split in ("train", "dev")}
    corpus = tmp_path / "data"
    corpus.mkdir()
    lines = [
        json.dumps({**row, "archive": str(data_dir / "an4" / row["archive"])}) + "\n"
        for row in few["train"] + few["dev"]
    ]
    (corpus / "manifest.jsonl").write_text("".join(lines))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    only = ["--only", "ldsa-1-1", "bisla", "--seeds", "1"]
    recipe = [*RECIPE, "--ema", "0.9", "--data", str(corpus)]
    out = tmp_path / "grid"
    assert compare.main(["--out", str(out), *only, *recipe]) == 0
    text = (out / "table.md").read_text()
    assert "| LDSA | 1, 1 | 1 |" in text
    assert "| SLA both ways | all | 1 |" in text
    assert "| 80 |" in text  # two layers that look 40 ms ahead
    results = json.loads((out / "bisla" / "seed-0" / "results.json").read_text())
    assert results["attention"] == "bisla"
    state = torch.load(out / "bisla" / "seed-0" / "checkpoint.pt", weights_only=True)
    assert state["step"] == 2
