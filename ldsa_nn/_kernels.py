"""The only door to the kernel package.

``kernels/torch-ext/ldsa`` is a Hugging Face kernel-builder package and the code that ldsa_nn runs:
one source, no copy. A wheel carries it as ``ldsa_nn/_ldsa``; an editable install and a bare
checkout read it where it lies. It is imported as ``ldsa_nn._ldsa`` in every case, so tracebacks,
pickles and multiprocessing workers see one name.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

__all__ = [
    "check_bound",
    "delta_gates",
    "depthwise_convolved",
    "eager_ldsa",
    "eager_ldsa_at",
    "gated_norm",
    "ldsa_local_attention",
    "ldsa_weights",
    "short_convolution",
    "tiled_delta_rule",
]

_NAME = "ldsa_nn._ldsa"

# Operators live in a process-wide table, where a second registration of a name silently replaces
# the first. Each build of the kernel package has a namespace of its own; this is ours.
_NAMESPACE = "ldsa_nn"


def _add_op_namespace_prefix(op_name: str) -> str:
    return f"{_NAMESPACE}::{op_name}"


def _load() -> ModuleType:
    """Import the kernel package as ``ldsa_nn._ldsa``."""
    here = Path(__file__).resolve().parent
    places = (here / "_ldsa", here.parent / "kernels" / "torch-ext" / "ldsa")
    source = next((place for place in places if (place / "__init__.py").is_file()), None)
    if source is None:
        raise ImportError(f"the kernel package is missing, looked in {places[0]} and {places[1]}")
    spec = importlib.util.spec_from_file_location(
        _NAME, source / "__init__.py", submodule_search_locations=[str(source)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"{source} cannot be loaded as a package")
    package = importlib.util.module_from_spec(spec)

    # kernel-builder generates _ops.py in each of its builds; here it is this module.
    ops = ModuleType(f"{_NAME}._ops", "The operator namespace of this copy of the kernel package.")
    ops.__dict__.update(
        add_op_namespace_prefix=_add_op_namespace_prefix, ops=getattr(torch.ops, _NAMESPACE)
    )

    before = set(sys.modules)
    sys.modules[_NAME] = package
    sys.modules[ops.__name__] = ops
    package.__dict__["_ops"] = ops  # as the import system binds a submodule
    try:
        spec.loader.exec_module(package)
    except BaseException:
        # A second attempt must start afresh, not find half a package.
        for name in set(sys.modules) - before:
            if name == _NAME or name.startswith(f"{_NAME}."):
                del sys.modules[name]
        raise
    sys.modules["ldsa_nn"].__dict__["_ldsa"] = package
    return package


if TYPE_CHECKING:
    # The package's place depends on how ldsa_nn is installed, so type checkers cannot follow the
    # import; tests/test_package.py holds these signatures against the real ones.
    def ldsa_local_attention(
        a_logits: Tensor,
        v: Tensor,
        left: int,
        right: int,
        *,
        lengths: Tensor | None = None,
        starts: Tensor | None = None,
        edge: str = "zero",
        dropout_p: float = 0.0,
        implementation: str = "auto",
    ) -> Tensor: ...

    def eager_ldsa(
        a_logits: Tensor,
        v: Tensor,
        left: int,
        right: int,
        *,
        lengths: Tensor | None = None,
        starts: Tensor | None = None,
        edge: str = "zero",
        dropout_p: float = 0.0,
    ) -> Tensor: ...

    def eager_ldsa_at(
        a_logits: Tensor,
        v: Tensor,
        left: int,
        right: int,
        first: int,
        *,
        ends: Tensor | None = None,
        starts: Tensor | None = None,
        edge: str = "zero",
    ) -> Tensor: ...

    def ldsa_weights(
        a_logits: Tensor,
        left: int,
        right: int,
        *,
        lengths: Tensor | None = None,
        starts: Tensor | None = None,
        edge: str = "zero",
    ) -> Tensor: ...

    def tiled_delta_rule(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        lengths: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        implementation: str = "auto",
    ) -> tuple[Tensor, Tensor | None]: ...

    def short_convolution(
        x: Tensor,
        weight: Tensor,
        n_heads: int,
        key_dim: int,
        before: int,
        *,
        implementation: str = "auto",
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def depthwise_convolved(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...

    def delta_gates(
        decay: Tensor, write: Tensor, rate: Tensor, bias: Tensor, *, implementation: str = "auto"
    ) -> tuple[Tensor, Tensor]: ...

    def gated_norm(
        x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, implementation: str = "auto"
    ) -> Tensor: ...

    def check_bound(name: str, bound: Tensor | None, batch: int, device: torch.device) -> None: ...

else:
    _package = _load()
    check_bound = _package.checks.check_bound
    delta_gates = _package.gates.delta_gates
    depthwise_convolved = _package.short_conv.depthwise_convolved
    eager_ldsa = _package.eager_ldsa
    eager_ldsa_at = _package.reference.eager_ldsa_at
    gated_norm = _package.gated_norm.gated_norm
    ldsa_local_attention = _package.ldsa_local_attention
    ldsa_weights = _package.ldsa_weights
    short_convolution = _package.short_conv.short_convolution
    tiled_delta_rule = _package.tiled_delta_rule
