"""The benchmark scripts: what they refuse, and their measuring of tiny cases without a clock."""

import json
import os
import re
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from cases import Case
from conftest import ROOT

sys.path.insert(0, str(ROOT / "examples"))
sys.path.insert(0, str(ROOT / "kernels" / "benchmarks"))

import bench_hosts
import bench_layer
import bench_stream
import measure
import measure_delta
import tune

CASE = Case("tiny", 2, 1, 30, 16, 7, 7, torch.float16)


@pytest.mark.parametrize(
    "script",
    [bench_hosts, bench_layer, bench_stream, measure_delta, measure, tune],
    ids=lambda script: script.__name__,
)
def test_help(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [script.__file__, "--help"])
    with pytest.raises(SystemExit) as raised:
        script.main()
    assert raised.value.code == 0
    assert "usage:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        (measure, "--json DIR/none/x.json", "argument --json: cannot write to"),
        (measure, "--json DIR", "argument --json: cannot write to"),
        (measure, "--plot DIR/none/x.png", "argument --plot: cannot write to"),
        (measure, "--plot DIR/x.jpeg2", "argument --plot: expected a name in .png"),
        (tune, "--json DIR", "argument --json: cannot write to"),
        (tune, "--cases W=15", "argument --cases: no case holds 'W=15'; there are"),
        (measure_delta, "--json DIR/none/x.json", "argument --json: cannot write to"),
        (measure_delta, "--plot DIR/x.jpeg2", "argument --plot: expected a name in .png"),
        (measure_delta, "--plot DIR/x.png --cpu", "argument --plot: needs the groups"),
        (measure_delta, "--plot DIR/x.png --groups iso", "argument --plot: needs the groups"),
        (measure_delta, "--groups", "argument --groups: expected at least one"),
        (measure_delta, "--groups iso kda", "argument --groups: invalid choice: 'kda'"),
        (bench_layer, "--frames 0", "argument --frames: .* at least 1, got 0"),
        (bench_layer, "--frames 16 -3", "argument --frames: .* at least 1, got -3"),
        (bench_layer, "--frames 1.5", "argument --frames: .* at least 1, got 1.5"),
        (bench_layer, "--device cuda", "argument --device: PyTorch finds no GPU"),
        (bench_layer, "--device tpu", "argument --device: .*'tpu'"),
        (bench_layer, "--json DIR/none/x.json", "argument --json: cannot write to"),
        (bench_layer, "--plot DIR/none/x.png", "argument --plot: cannot write to"),
        (bench_layer, "--plot DIR/x", "argument --plot: expected a name in .png"),
        (bench_hosts, "--write DIR/none/x.md", "argument --write: .*No such file"),
        (
            bench_hosts,
            f"--write {measure.HERE / 'measure.py'}",
            "argument --write: .* lacks the lines",
        ),
        (bench_stream, "--batch 0", "argument --batch: .* at least 1, got 0"),
        (bench_stream, "--rounds 0", "argument --rounds: .* at least 1, got 0"),
        (bench_stream, "--threads -1", "argument --threads: .* at least 1, got -1"),
        (bench_stream, "--device cuda", "argument --device: PyTorch finds no GPU"),
        (bench_stream, "--json DIR/none/x.json", "argument --json: cannot write to"),
    ],
)
def test_bad_arguments_are_refused(script, arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as raised:
        script.main(arguments.replace("DIR", str(tmp_path)).split())
    assert raised.value.code == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if "error:" in x]
    assert re.search(message, line)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "script", [measure_delta, measure, tune], ids=lambda script: script.__name__
)
def test_the_ops_need_a_gpu(script, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"^this benchmark needs a GPU and Triton(, or --cpu)?$"):
        script.main(["--json", str(tmp_path / "x.json")])
    assert not list(tmp_path.iterdir())


# The op


@pytest.fixture
def untimed(monkeypatch):
    """Every call takes 2 microseconds, in Triton's interpreter too."""
    pytest.importorskip("triton")

    def timer(call):
        call()
        return 2.0

    monkeypatch.setattr(measure, "median_us", timer)
    monkeypatch.setattr(measure, "graph_us", timer)
    monkeypatch.setattr(measure, "replay_us", timer)
    measure.figures.cache_clear()
    yield
    measure.figures.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_row_beside_the_roof(untimed, dtype):
    row = measure.against_roof(CASE._replace(dtype=dtype), (90, 101))
    assert row["roof"] == row["ours"] == (2.0, 2.0)
    assert row["% of roof"] == (100, 100)
    assert row["losing"] == "backward"


def test_the_roof_moves_the_bytes_of_the_op():
    moved = []
    case = CASE._replace(head_dim=64)  # channels a frame: 15 + 64 + 64; 15 + 15 + 64 + 64 + 64
    for part in measure.roof(case, lambda copy: copy().nbytes * 2):
        moved.append(part / (case.batch * case.heads * case.frames * case.dtype.itemsize))
    assert moved == [143, 222]


@pytest.mark.parametrize("backward", [False, True])
def test_rows_are_tried_and_the_table_stays(untimed, monkeypatch, backward):
    table, seen = tune.kernel._tiles, []

    def clock(call):
        call()
        row = tune.kernel._tiles(15, 16, 2, False, backward)
        seen.append(row)
        return float(row[0])

    monkeypatch.setattr(tune, "replay_us", clock)
    now = tune.present(CASE, backward)
    monkeypatch.setattr(tune, "rows", lambda *_: [now, (32, 2 if backward else 1, 16, 1, None)])
    line = tune.tuned(CASE, backward)
    assert seen == tune.rows(CASE, backward)
    assert line["best 1"] == f"{now} 16.0" == line["now"] and line["best 2"].endswith("None) 32.0")
    assert tune.kernel._tiles is table


def test_rows_hold_the_present_one_first():
    for case in tune.CASES:
        for backward in (False, True):
            rows = tune.rows(case, backward)
            assert rows[0] == tune.present(case, backward) and len(set(rows)) == len(rows)
            assert len(rows) > 5, case


@pytest.mark.parametrize("wrong", ["out", "grad of v"])
def test_a_wrong_result_has_no_time(untimed, monkeypatch, wrong):
    right = measure.ours

    def op(logits, v, left, right_, **options):
        out = right(logits, v, left, right_, **options)
        if wrong == "out":
            return out * 1.01
        return out + 0.01 * (v - v.detach())

    monkeypatch.setattr(measure, "ours", op)
    calls = [partial(measure.against_roof, CASE, (90, 85))]
    ((title, rows),) = measure.measured({"group": calls}, SimpleNamespace(update=lambda: None))
    assert title == "group"
    assert rows[0].keys() == {"case", "losing"}
    assert rows[0]["losing"].startswith(f"WRONG: {wrong} has a relative error of ")


def test_what_one_case_breaks_the_others_survive(capsys):
    def broken(case):
        raise TypeError("no len()")

    calls = [partial(broken, CASE), lambda: {"case": "whole"}]
    (group,) = measure.measured({"group": calls}, SimpleNamespace(update=lambda: None))
    broken, whole = group[1]
    assert (broken["losing"], whole) == ("FAILED: TypeError", {"case": "whole"})
    assert "tiny" in broken["case"] and "TypeError: no len()" in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"^wrong results, or none: .*tiny"):
        measure.finish(dict([group]))


def test_peers(untimed, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda op, dynamic: op)
    row = measure.against_peers(CASE, compiled=True)
    assert row["x eager"] == row["x compiled"] == (1, 1)
    assert row["losing"] == "forward, backward"
    assert "losing" not in measure.against_peers(CASE, compiled=False)


@pytest.mark.parametrize("change", [{"lengths": (30, 16)}, {"dropout_p": 0.25}], ids=str)
def test_padding_and_dropout_are_relative_to_neither(untimed, change):
    row = measure.against_full(CASE, (1.0, 0.9), name="changed", **change)
    assert row["ratio"] == (1, 1)
    assert row["losing"] == "backward"


def test_dropout_that_drops_too_little_is_wrong(untimed):
    def op(logits, v, left, right, dropout_p=0.0, **options):
        return measure.ours(logits, v, left, right, dropout_p=dropout_p / 2, **options)

    with pytest.raises(measure.WrongError, match=r"dropout of 0.5 keeps 0.7"):
        measure.checked(CASE._replace(dropout_p=0.5), op)


def test_ragged_lengths_are_half_full():
    lengths = measure.ragged(Case("full", 32, 8, 3000, 64, 14, 0))
    assert len(set(lengths)) == 32
    assert sum(lengths) == pytest.approx(16 * 3000, rel=0.001)
    assert 0 < min(lengths) < max(lengths) <= 3000


def test_small_calls(untimed, monkeypatch):
    row = measure.in_a_graph(CASE)
    assert (row["value"], row["floor"], row["losing"]) == ((2, 2), (2, 2), "")
    spans = iter([100.0, 112.0, 90.0, 108.0] * 3 + [100.0, 112.0] * 8)
    monkeypatch.setattr(measure, "wall_us", lambda call, calls: call() is None or next(spans))
    row = measure.overhead(CASE)
    # The least of either over the rounds.
    assert (row["floor"], row["value"]) == ((90, 100), (18, 12))
    assert row["losing"] == "no_grad"


def test_the_first_call_is_made_in_a_process_with_an_empty_cache(monkeypatch):
    seen = {}

    def process(command, env, **options):
        seen.update(command=command, cached=os.listdir(env["TRITON_CACHE_DIR"]), **options)
        return SimpleNamespace(stdout="10.5\n")

    monkeypatch.setattr(measure.subprocess, "run", process)
    row = measure.first_call()
    assert (row["value"], row["losing"]) == ((10.5,), "yes")
    assert seen["cached"] == []
    monkeypatch.undo()
    monkeypatch.setitem(measure.BENCHMARKS, "channel-last", [CASE])
    pytest.importorskip("triton")
    assert 0 < measure.first_seconds() < 600


def test_every_target_has_cases():
    groups = measure.jobs(curves=True)
    assert all(groups.values())
    assert set(measure.BENCHMARKS) == {*measure.TARGETS, measure.CARD}
    assert (
        sum(
            call.keywords.get("compiled", False)
            for calls in groups.values()
            for call in calls
            if isinstance(call, partial)
        )
        == 1
    )


def test_table():
    rows = [{"case": "a", "us": (1.234, 123.4)}, {"case": "b", "losing": "x", "target": (None, 5)}]
    assert measure.table(rows).splitlines() == [
        "| case | us | target | losing |",
        "| --- | --- | --- | --- |",
        "| a | 1.23 / 123 |  |  |",
        "| b |  | - / 5 | x |",
    ]


def test_plot_of_the_op(tmp_path):
    rows = [{"ours": (2, 3), "roof": (1, 2), "% of roof": (50, 67)} for _ in measure.OVER_FRAMES]
    rows[0] = {"losing": "WRONG: out"}
    measure.plot(tmp_path / "x.png", rows, rows)
    assert (tmp_path / "x.png").stat().st_size > 1000


# The delta rule

TINY = measure_delta.Shape(2, 70, 2, 64, 128)


@pytest.fixture
def delta(untimed, monkeypatch):
    """Tiny tensors of eager PyTorch on any device, without a clock or a count of memory."""
    monkeypatch.setattr(measure_delta, "peak_mib", lambda call: call() is not None and 3.0)
    monkeypatch.setattr(measure_delta, "has_peer", lambda module="": True)
    rule = measure_delta.tiled_delta_rule
    monkeypatch.setattr(measure_delta, "chunk_kda", lambda *x: rule(*x)[0])
    for cached in (measure_delta.figures, measure_delta.kda_layer_figures):
        cached.cache_clear()
    yield measure_delta
    for cached in (measure_delta.figures, measure_delta.kda_layer_figures):
        cached.cache_clear()


def test_delta_beside_its_peer(delta, monkeypatch):
    limits = {"x KDA": 1.5, "ms": 1, "MiB / KDA": 1}
    row = delta.versus(TINY, TINY._replace(peer=True), **limits)
    assert row["ms"] == row["KDA ms"] == (0.002, 0.002)
    assert row["x KDA"] == row["MiB / KDA"] == (1, 1)
    assert row["losing"] == "x KDA"
    assert row["target of both"] == "x KDA >= 1.5, ms <= 1, MiB / KDA <= 1"
    monkeypatch.setattr(delta, "has_peer", lambda module: False)
    row = delta.versus(TINY, TINY._replace(peer=True), **limits | {"ms": 0.001})
    assert "KDA ms" not in row
    assert (row["note"], row["losing"]) == ("no fla.ops.kda", "ms")


@pytest.mark.parametrize(("wrong", "factor"), [("out", 1.01), ("grad_g", 1.05)])
def test_a_wrong_delta_rule_has_no_time(delta, monkeypatch, wrong, factor):
    def op(q, k, v, g, beta):
        out = delta.tiled_delta_rule(q, k, v, g, beta)[0]
        if wrong == "out":
            return factor * out
        return delta.tiled_delta_rule(q, k, v, factor * g - (factor - 1) * g.detach(), beta)[0]

    monkeypatch.setattr(delta, "ours", op)
    with pytest.raises(measure.WrongError, match=f"^{wrong} has a relative error of "):
        delta.figures(TINY)
    monkeypatch.setattr(delta, "chunk_kda", lambda *x: 1.2 * delta.tiled_delta_rule(*x)[0])
    figures, note = delta.of_peer(lambda: delta.figures(TINY._replace(peer=True)))
    assert figures is None and note.startswith("KDA: WrongError: out has a relative error of ")


def test_delta_steps(delta):
    for row in (delta.decoding(2, 1.5), delta.layer_step(2)):
        assert row["value"] == (2,)
    assert delta.decoding(1, 1.5)["losing"] == "yes"


@pytest.mark.parametrize("compiled", [False, True])
def test_delta_in_a_layer(delta, monkeypatch, compiled):
    compile = partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setattr(delta, "has_peer", lambda module: False)
    row = delta.layers(1, 20, compiled)
    assert row["ms"] == (0.002, 0.002)
    assert ("compiled" in row["case"]) == compiled


@pytest.mark.parametrize("frames", [20, 70])
def test_delta_on_a_cpu(delta, monkeypatch, frames):
    monkeypatch.setattr(delta, "DEVICE", "cpu")
    monkeypatch.setattr(delta, "wall_ms", lambda call: call() is not None and 2.0)
    for cases in delta.CPU.values():
        row = delta.on_cpu(frames, cases[-1][1], 1.5)
        assert (row["x"], row["losing"]) == ((1, 1), "forward")


def test_every_group_of_the_delta_rule(delta):
    assert set(delta.jobs()) == set(delta.GROUPS)
    shapes = delta.shapes_of(delta.GROUPS)
    assert len(shapes) == len(set(shapes))
    # Both sides write as many channels.
    for call in (call for word in ("equal", "iso", "speech") for call in delta.jobs()[word]):
        mine, peer = call.args
        assert mine.heads * mine.value_dim == peer.heads * peer.value_dim
        assert (mine.batch, mine.frames) == (peer.batch, peer.frames)


def test_plot_of_the_delta_rule(delta, tmp_path):
    rows = [{"ms": (1, 2), "KDA ms": (2, 3)} for _ in delta.SPEECH]
    rows[0] = {"losing": "WRONG: out"}
    heads = [{"ms": (1, 2)} for _ in delta.HEADS]
    delta.plot(tmp_path / "x.png", {"speech": rows, "heads": heads})
    assert (tmp_path / "x.png").stat().st_size > 1000


# The layer


def test_layer(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch, "compile", lambda module, dynamic: module)
    monkeypatch.setattr(bench_layer, "milliseconds", lambda run, device: 4.0)
    numbers, image = tmp_path / "x.json", tmp_path / "x.png"
    bench_layer.main(f"--device cpu --frames 16 48 --json {numbers} --plot {image}".split())
    rows = json.loads(numbers.read_text())
    assert [row["frames"] for row in rows] == [16, 48] * 3
    for row in rows:
        for peer in bench_layer.PEERS:
            assert row[peer]["forward"] == row[peer]["step"] == 4
            assert row[peer]["step_mib"] > 0
    assert image.stat().st_size > 1000
    times, ratios = capsys.readouterr().out.split("\n\n")
    assert "| 48 | float64 | 4 / 4 | 4 / 4 | 4 / 4 | 4 / 4 |" in times
    wide = rows[1]["ldsa"]["step_mib"] / rows[1]["mhsa"]["step_mib"]
    assert f"| 48 | float32 | 1 / 1 | 1 / 1 | 1 / 1 | {wide:.3g} / " in ratios


def test_the_layer_and_its_projections_have_the_same_gradients_to_compute():
    layer = bench_layer.LocalDenseSynthesizerAttention(2, 8)
    alone = bench_layer.Gemms(layer)
    assert list(map(id, alone.parameters())) == list(map(id, layer.parameters()))
    x = torch.randn(1, 20, 8, requires_grad=True)
    for module in (layer, alone):
        grads = [torch.randn_like(y) for y in bench_layer.outputs(module, x)]
        bench_layer.step(module, x, grads)
        assert x.grad is None
        assert all(p.grad is None for p in module.parameters())
