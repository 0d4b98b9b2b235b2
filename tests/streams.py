"""What the tests of streaming share: plans of chunks, and layers fed by them."""

import math

import hypothesis.strategies as st
import torch
from cases import DEVICE, error, random


def chunks_of(x, plan):
    """[(chunk, its lengths)] of streams x, one [T,D] each.

    plan: [(T, [frames of each stream])]; what a stream does not fill holds NaN.
    """
    place = [0] * len(x)
    for frames, counts in plan:
        chunk = torch.full((len(x), frames, x[0].shape[1]), math.nan).to(x[0])
        for b, n in enumerate(counts):
            chunk[b, :n] = x[b][place[b] : place[b] + n]
            place[b] += n
        yield chunk, torch.tensor(counts, device=DEVICE)


@st.composite
def plans(draw, streams=3, chunks=6, frames=7):
    """Chunks of any length with any number of real frames for each stream."""
    plan = []
    for _ in range(draw(st.integers(1, chunks))):
        T = draw(st.integers(1, frames))
        ragged = draw(st.booleans())
        plan.append((T, [draw(st.integers(0, T)) if ragged else T for _ in range(streams)]))
    return plan


def streams_of(plan, width, dtype):
    """A stream [T,width] for each of the plan's, as long as its frames there."""
    totals = [sum(counts[b] for _, counts in plan) for b in range(len(plan[0][1]))]
    return [random(total, width, dtype=dtype, seed=b) for b, total in enumerate(totals)]


def streamed(layer, x, plan):
    """Each stream's output of a layer, steps and flush."""
    state = layer.init_state(len(x))
    out = [[] for _ in x]
    for chunk, lengths in chunks_of(x, plan):
        full = bool((lengths == chunk.shape[1]).all())
        y, new = layer.step(chunk, state, None if full else lengths)
        assert y.shape == chunk.shape and type(new) is type(state)
        for b, n in enumerate(lengths.tolist()):
            out[b].append(y[b, :n])
            assert (y[b, n:] == 0).all()
            assert n > 0 or all(
                torch.equal(old[b], kept[b]) for old, kept in zip(state, new, strict=True)
            )
        for old, kept in zip(state, new, strict=True):
            assert (kept.shape, kept.dtype) == (old.shape, old.dtype)
            assert kept.untyped_storage().nbytes() <= 2 * old.untyped_storage().nbytes()
        state = new
    rest = layer.flush(state)
    assert rest.shape == (len(x), layer.delay, layer.n_feat)
    return [torch.cat([*parts, rest[b]]) for b, parts in enumerate(out)]


def assert_streams(layer, plan, tolerance, dtype):
    """The frames of whole streams come out, after `delay` zeros."""
    x = streams_of(plan, layer.n_feat, dtype)
    for alone, y in zip(x, streamed(layer, x, plan), strict=True):
        assert (y[: layer.delay] == 0).all()
        assert error(y[layer.delay :], layer(alone[None])[0]) <= tolerance
