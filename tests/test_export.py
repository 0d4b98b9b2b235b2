"""Layers and steps leave Python: torch.export, ONNX, AOTInductor and TorchScript, on the CPU."""

import inspect
from pathlib import Path

import pytest
import torch
from cases import close, random
from torch import Tensor, nn
from torch.export import Dim

from ldsa_nn import ConformerEncoder, LocalDenseSynthesizerAttention

BATCH, FRAMES = Dim("batch"), Dim("frames")
QUARTERS = 4 * Dim("quarters", min=2)


# The README's recipe


def flat(state, name="state"):
    """{name: tensor} of a state, in order."""
    if isinstance(state, Tensor):
        return {name: state}
    names = getattr(state, "_fields", range(len(state)))
    return {
        n: t
        for k, part in zip(names, state, strict=False)
        for n, t in flat(part, f"{name}_{k}").items()
    }


def packed(like, tensors):
    """The tensors of an iterator, nested as `like` is."""
    return tuple(packed(x, tensors) if isinstance(x, tuple) else next(tensors) for x in like)


class Step(nn.Module):
    """A step of tensors alone: (x, lengths, *state) -> (*outputs, *new state)."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.like = layer, layer.init_state(1, device="meta")

    def forward(self, x, lengths, *state):
        *outputs, new = self.layer.step(x, packed(self.like, iter(state)), lengths)
        return *outputs, *flat(new).values()


@pytest.mark.parametrize("part", [flat, packed, Step])
def test_the_readme_shows_what_is_tested(part):
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    source = inspect.getsource(part)
    docstring = f'    """{part.__doc__}"""\n'
    assert source.replace(docstring + "\n", "").replace(docstring, "") in readme


def build_layer(**options):
    torch.manual_seed(0)
    options = {"left": 3, "right": 2, "use_bias": True, **options}
    return LocalDenseSynthesizerAttention(2, 8, **options).eval()


def build_encoder(**options):
    torch.manual_seed(0)
    options = {"left": 3, "right": (1, 0), "num_layers": 2, **options}
    return ConformerEncoder(5, 8, n_head=2, ffn_dim=16, conv_kernel=4, **options).eval()


def width(module):
    return module.n_feat if isinstance(module, LocalDenseSynthesizerAttention) else module.input_dim


def step_arguments(module, streams, frames, ragged, chunk=0):
    """A chunk, other numbers and lengths for each, and a fresh state flat."""
    x = random(streams, frames, width(module), seed=chunk, device="cpu")
    lengths = (torch.arange(streams) * 3 + chunk) % (frames + 1) if ragged else None
    return x, lengths, *flat(module.init_state(streams)).values()


def step_shapes(module, ragged, frames=None):
    """What is open in a step's arguments: the batch, and with `frames` the chunk's length."""
    x = {0: BATCH} if frames is None else {0: BATCH, 1: frames}
    state = tuple({0: BATCH} for _ in flat(module.init_state(1)))
    return x, {0: BATCH} if ragged else None, state


@torch.no_grad()
def assert_streams(run, module, ragged, chunks, streams=(1, 2, 5)):
    """run(x, lengths, *state) gives what step gives, from a fresh state on, chunk by chunk."""
    for count in streams:
        state = module.init_state(count)
        carried = list(flat(state).values())
        for i, frames in enumerate(chunks):
            x, lengths, *_ = step_arguments(module, count, frames, ragged, i)
            *expected, state = module.step(x, state, lengths)
            result = run(x, lengths, *carried)
            assert close(result, [*expected, *flat(state).values()], 1e-5)
            assert all(
                a.dtype == b.dtype
                for a, b in zip(result, [*expected, *flat(state).values()], strict=True)
            )
            carried = result[len(expected) :]


def onnx_session(module, arguments, shapes, inputs, outputs):
    """(a function of tensors, the names of what it takes) that runs in onnxruntime."""
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    program = torch.onnx.export(
        module,
        arguments,
        dynamo=True,
        dynamic_shapes=shapes,
        input_names=inputs,
        output_names=outputs,
        verbose=False,
    )
    graph = program.model.graph
    assert {node.domain for node in graph} == {""} and not program.model.functions
    assert [x.name for x in graph.inputs] == inputs
    assert [y.name for y in graph.outputs] == outputs
    assert all(isinstance(size, int) <= (size != 0) for x in graph.inputs for size in x.shape)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    session = runtime.InferenceSession(program.model_proto.SerializeToString(), options)

    def run(*tensors):
        given = [x.numpy() for x in tensors if x is not None]
        return [
            torch.from_numpy(y) for y in session.run(None, dict(zip(inputs, given, strict=True)))
        ]

    return run


def loaded(program):
    # The guards of torch 2.9 cannot name the tensors of *state.
    return program.module(check_guards=torch.__version__ >= (2, 10))


class Offline(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, lengths):
        return self.layer(x, lengths=lengths)


def assert_offline(run, layer, ragged):
    """Any batch, and any length from one frame on, shorter than the window too."""
    for streams, frames in ((1, 1), (2, 2), (3, 5), (1, 6), (2, 40)):
        x, lengths, *_ = step_arguments(layer, streams, frames, ragged)
        with torch.no_grad():
            assert close([run(x, lengths)], [layer(x, lengths=lengths)], 1e-5)


OFFLINE_SHAPES = {
    False: ({0: BATCH, 1: FRAMES}, None),
    True: ({0: BATCH, 1: FRAMES}, {0: BATCH}),
}


@pytest.mark.parametrize(
    ("strict", "edge", "ragged", "grouped"),
    [
        (True, "zero", False, False),
        (True, "renormalize", True, False),
        (False, "zero", True, True),
        (False, "renormalize", False, False),
    ],
)
def test_exported_layer(strict, edge, ragged, grouped):
    layer = build_layer(edge=edge, grouped_w2=grouped)
    arguments = step_arguments(layer, 3, 9, ragged)[:2]
    program = torch.export.export(
        Offline(layer), arguments, dynamic_shapes=OFFLINE_SHAPES[ragged], strict=strict
    )
    assert_offline(program.module(), layer, ragged)


@pytest.mark.parametrize(("edge", "ragged"), [("zero", False), ("renormalize", True)])
def test_onnx_layer(edge, ragged):
    layer = build_layer(edge=edge)
    names = ["x", "lengths"] if ragged else ["x"]
    arguments = step_arguments(layer, 3, 9, ragged)[:2]
    run = onnx_session(Offline(layer), arguments, OFFLINE_SHAPES[ragged], names, ["y"])
    assert_offline(lambda *x: run(*x)[0], layer, ragged)


@pytest.mark.parametrize(("strict", "ragged"), [(True, True), (False, False)])
def test_exported_layer_step(strict, ragged):
    layer = build_layer(edge="renormalize")
    program = torch.export.export(
        Step(layer),
        step_arguments(layer, 3, 9, ragged),
        dynamic_shapes=step_shapes(layer, ragged, FRAMES),
        strict=strict,
    )
    assert_streams(loaded(program), layer, ragged, [1, 4, 20])


@pytest.mark.parametrize(
    ("strict", "ragged", "frames"),
    [(True, True, None), (True, False, QUARTERS), (False, True, QUARTERS)],
)
def test_exported_encoder_step(strict, ragged, frames):
    """Its chunks may be open too, as multiples of the subsampling that give two frames or more."""
    encoder = build_encoder()
    program = torch.export.export(
        Step(encoder),
        step_arguments(encoder, 3, 8, ragged),
        dynamic_shapes=step_shapes(encoder, ragged, frames),
        strict=strict,
    )
    assert_streams(loaded(program), encoder, ragged, [8, 8] if frames is None else [8, 24, 12])


@pytest.mark.parametrize(
    ("build", "ragged", "frames", "chunks"),
    [
        (build_layer, True, FRAMES, [1, 4, 20]),
        (build_encoder, True, None, [8, 8, 8]),
        (build_encoder, False, None, [8, 8, 8]),
    ],
    ids=["layer", "encoder-ragged", "encoder"],
)
def test_onnx_step(build, ragged, frames, chunks):
    module = build(edge="renormalize")
    outputs = ["y"] if build is build_layer else ["out", "out_lengths"]
    state = flat(module.init_state(1))
    run = onnx_session(
        Step(module),
        step_arguments(module, 3, 8, ragged),
        step_shapes(module, ragged, frames),
        ["x", *(["lengths"] if ragged else []), *state],
        [*outputs, *(f"new_{name}" for name in state)],
    )
    assert_streams(run, module, ragged, chunks)


def test_state_names():
    encoder = build_encoder(num_layers=1, right=1)
    assert list(flat(encoder.init_state(2))) == [
        "state_frames",
        "state_subsampling_0",
        "state_subsampling_1",
        "state_blocks_0_attention_logits",
        "state_blocks_0_attention_value",
        "state_blocks_0_attention_start",
        "state_blocks_0_delayed_0",
        "state_blocks_0_delayed_1",
        "state_blocks_0_conv_0",
    ]


def test_aot_inductor(tmp_path):
    """A package of machine code, loaded without the module."""
    encoder = build_encoder(num_layers=1, right=1)
    with torch.no_grad():
        program = torch.export.export(
            Step(encoder),
            step_arguments(encoder, 3, 8, True),
            dynamic_shapes=step_shapes(encoder, True),
        )
        path = torch._inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / "encoder.pt2")
        )
    assert_streams(torch._inductor.aoti_load_package(path), encoder, True, [8, 8, 8], (2, 5))


@pytest.mark.parametrize("build", [build_layer, build_encoder])
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::FutureWarning")
@torch.no_grad()
def test_torchscript_trace(build, tmp_path):
    """Any number of streams; the chunk's length is the traced one."""
    module = build()
    traced = torch.jit.trace(Step(module), step_arguments(module, 2, 8, True), check_trace=False)
    traced.save(tmp_path / "step.ts")
    loaded = torch.jit.load(tmp_path / "step.ts")
    assert_streams(loaded, module, True, [8, 8, 8], (2, 5))
