"""Argument checks: every message names the argument, what was expected and what came."""

import torch

EDGES = ("zero", "renormalize")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def _check_float_4d(name, x, shape):
    _check_float(name, x, 4, shape)


def _check_float(name, x, dims, shape):
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a tensor {shape}, got {type(x).__name__}")
    if x.dtype not in FLOATS:
        raise TypeError(
            f"{name} must have dtype float16, bfloat16, float32 or float64, got {x.dtype}"
        )
    if x.dim() != dims:
        raise ValueError(
            f"{name} must have {dims} dimensions {shape}, got {x.dim()} in shape {tuple(x.shape)}"
        )


def _check_frames(name, n):
    if isinstance(n, bool) or not isinstance(n, int):
        raise TypeError(f"{name} must be an int (frames), got {type(n).__name__}")
    if n < 0:
        raise ValueError(f"{name} must be >= 0 frames, got {n}")


def _check_integers(name, bound, shape):
    if not isinstance(bound, torch.Tensor):
        raise TypeError(
            f"{name} must be an integer tensor {shape} or None, got {type(bound).__name__}"
        )
    if bound.dtype not in INTEGERS:
        raise TypeError(
            f"{name} must have an integer dtype (int8 to int64 or uint8), got {bound.dtype}"
        )


def check_bound(name, bound, batch, device):
    """Check lengths or starts: None, or integers [B] on `device` or on the CPU."""
    if bound is None:
        return
    _check_integers(name, bound, "[B]")
    if bound.dim() != 1 or bound.shape[0] != batch:
        raise ValueError(f"{name} must have shape [B] = [{batch}], got {list(bound.shape)}")
    if bound.device != device and bound.device.type != "cpu":
        raise ValueError(f"{name} must be on {device} (with v) or on the CPU, got {bound.device}")


def check_window(a_logits, left, right, lengths, starts, edge):
    """Check everything that concerns the logits and the window, before anything is launched."""
    _check_float_4d("a_logits", a_logits, "[B,H,W,T]")
    _check_frames("left", left)
    _check_frames("right", right)
    if a_logits.shape[2] != left + 1 + right:
        raise ValueError(
            f"a_logits must have W = left + 1 + right = {left} + 1 + {right} = {left + 1 + right} "
            f"slots in dimension 2, got {a_logits.shape[2]} in shape {tuple(a_logits.shape)}"
        )
    if edge not in EDGES:
        raise ValueError(f"edge must be 'zero' or 'renormalize', got {edge!r}")
    check_bound("lengths", lengths, a_logits.shape[0], a_logits.device)
    check_bound("starts", starts, a_logits.shape[0], a_logits.device)


def check_inputs(a_logits, v, left, right, lengths, starts, edge, dropout_p):
    """Check all arguments of the op, before anything is launched."""
    _check_float_4d("a_logits", a_logits, "[B,H,W,T]")
    _check_float_4d("v", v, "[B,H,Dh,T]")
    if a_logits.device != v.device:
        raise ValueError(
            f"a_logits and v must be on one device, got {a_logits.device} and {v.device}"
        )
    for d, letter in ((0, "B"), (1, "H"), (3, "T")):
        if a_logits.shape[d] != v.shape[d]:
            raise ValueError(
                f"a_logits [B,H,W,T] and v [B,H,Dh,T] must agree in {letter}, got "
                f"{a_logits.shape[d]} and {v.shape[d]} in shapes {tuple(a_logits.shape)} and "
                f"{tuple(v.shape)}"
            )
    check_window(a_logits, left, right, lengths, starts, edge)
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, (int, float)):
        raise TypeError(f"dropout_p must be a number, got {type(dropout_p).__name__}")
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p must be in [0, 1), got {dropout_p}")


def check_delta(q, k, v, g, beta, scale, initial_state, lengths, cu_seqlens):
    """Check all arguments of the delta rule, before anything is launched."""
    _check_float_4d("q", q, "[B,T,H,K]")
    _check_float_4d("k", k, "[B,T,H,K]")
    _check_float_4d("v", v, "[B,T,H,R*P]")
    _check_float_4d("g", g, "[B,T,H,tiles]")
    _check_float("beta", beta, 3, "[B,T,H]")
    if k.shape != q.shape:
        raise ValueError(f"k must have q's shape {tuple(q.shape)}, got {tuple(k.shape)}")
    for name, x in (("v", v), ("g", g), ("beta", beta)):
        if x.shape[:3] != q.shape[:3]:
            raise ValueError(
                f"{name} must agree with q in B, T and H = {tuple(q.shape[:3])}, got "
                f"{tuple(x.shape[:3])} in shape {tuple(x.shape)}"
            )
    key_dim, tiles = q.shape[3], g.shape[3]
    if key_dim == 0 or v.shape[3] == 0:
        name, x = ("v", v) if key_dim else ("q", q)
        raise ValueError(f"{name} must have a last dimension >= 1, got {tuple(x.shape)}")
    if tiles == 0 or key_dim % tiles:
        raise ValueError(
            f"g [B,T,H,tiles] must have a number of tiles that divides K = {key_dim}, got {tiles}"
        )
    others = {"k": k, "v": v, "g": g, "beta": beta}
    if initial_state is not None:
        others["initial_state"] = initial_state
        _check_float_4d("initial_state", initial_state, "[N,H,K,R*P]")
    for name, x in others.items():
        if x.device != q.device:
            raise ValueError(f"{name} must be on {q.device} (with q), got {x.device}")
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, (int, float))):
        raise TypeError(f"scale must be a number or None, got {type(scale).__name__}")
    if lengths is not None and cu_seqlens is not None:
        raise ValueError("give lengths or cu_seqlens, not both")
    check_bound("lengths", lengths, q.shape[0], q.device)
    sequences = q.shape[0]
    if cu_seqlens is not None:
        _check_cu_seqlens(cu_seqlens, q)
        sequences = cu_seqlens.shape[0] - 1
    state = (sequences, q.shape[2], key_dim, v.shape[3])
    if initial_state is not None and initial_state.shape != state:
        raise ValueError(
            f"initial_state must have shape [N,H,K,R*P] = {list(state)}, got "
            f"{list(initial_state.shape)}"
        )


def _check_cu_seqlens(cu_seqlens, q):
    _check_integers("cu_seqlens", cu_seqlens, "[N+1]")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"cu_seqlens must have shape [N+1], got {list(cu_seqlens.shape)}")
    if cu_seqlens.device != q.device and cu_seqlens.device.type != "cpu":
        raise ValueError(
            f"cu_seqlens must be on {q.device} (with q) or on the CPU, got {cu_seqlens.device}"
        )
    if q.shape[0] != 1:
        raise ValueError(f"cu_seqlens packs sequences in B = 1 row, got q with B = {q.shape[0]}")
    # Values are looked at only where that does not synchronise.
    if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
        places = cu_seqlens.tolist()
        if places != sorted(places) or places[0] < 0 or places[-1] > q.shape[1]:
            raise ValueError(
                f"cu_seqlens must not decrease and lie in [0, T] = [0, {q.shape[1]}], got {places}"
            )
