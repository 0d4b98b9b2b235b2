"""Argument checks: every message names the argument, what was expected and what came."""

import torch

EDGES = ("zero", "renormalize")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def _check_float_4d(name, x, shape):
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a tensor {shape}, got {type(x).__name__}")
    if x.dtype not in FLOATS:
        raise TypeError(
            f"{name} must have dtype float16, bfloat16, float32 or float64, got {x.dtype}"
        )
    if x.dim() != 4:
        raise ValueError(
            f"{name} must have 4 dimensions {shape}, got {x.dim()} in shape {tuple(x.shape)}"
        )


def _check_frames(name, n):
    if isinstance(n, bool) or not isinstance(n, int):
        raise TypeError(f"{name} must be an int (frames), got {type(n).__name__}")
    if n < 0:
        raise ValueError(f"{name} must be >= 0 frames, got {n}")


def check_bound(name, bound, batch, device):
    """Check lengths or starts: None, or integers [B] on `device` or on the CPU."""
    if bound is None:
        return
    if not isinstance(bound, torch.Tensor):
        raise TypeError(f"{name} must be an integer tensor [B] or None, got {type(bound).__name__}")
    if bound.dtype not in INTEGERS:
        raise TypeError(
            f"{name} must have an integer dtype (int8 to int64 or uint8), got {bound.dtype}"
        )
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
