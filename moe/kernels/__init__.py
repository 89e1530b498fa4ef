"""The MoE layer's operations behind one interface, with interchangeable implementations. reference.py defines the results.

    top_k         each token's experts: the highest scores
    kept          the choices within their expert's capacity          all others are dropped
    plan          the row of each kept choice                         rows are sorted by expert
    permute       tokens -> rows
    reorder       rows -> rows, a permutation
    grouped_ffn   each row through its expert's network               products.py says how it multiplies
    combine       rows -> tokens, weighted by the gates
    routed_ffn    permute, grouped_ffn and combine fused              for a rank that holds all experts

A choice is a pair of a token and one of its K experts. A row is a kept choice's copy of its token. `auto` uses `triton` for tensors on
a GPU that Triton supports, else `cpu`. All sums have a fixed order, so results do not depend on how threads are scheduled.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from parallel.errors import BadInput
from parallel.fixes import Set

_NAMES = ("auto", "reference", "cpu", "grouped_mm", "triton", "triton_persistent")
UNFUSED = ("grouped_mm",)  # kernels that save every intermediate tensor of a network for the backward pass
_ALIGNED_BYTES = {"grouped_mm": 16}  # kernels -> alignment in bytes; rows of matrix products must have a multiple of this size


def choose(name: str = "auto") -> ModuleType:
    """Return the module of kernels called `name`. Raise BadInput for an unknown name, and for Triton's kernels without Triton or a GPU.
    A module is imported only when it is chosen, because the planner imports this package without torch.
    """
    if name not in _NAMES:
        raise BadInput("experts.kernels", got=name, needed=f"one of {', '.join(_NAMES)}", fix=Set("it", "auto"))
    if name.startswith("triton"):
        _check_triton(name)
    return import_module(f"moe.kernels.{name}")


def check_widths(kernels: str, widths: Mapping[str, int], *, dtype: str, element_bytes: int) -> None:
    """Raise BadInput if these kernels cannot multiply rows of these widths (name -> number of elements). dtype, element_bytes: name of the
    elements' dtype and its size."""
    unit = max(1, _ALIGNED_BYTES.get(kernels, 1) // element_bytes)
    for name, size in widths.items():
        if size % unit:
            near = " or ".join(str(n) for n in (size // unit * unit, -(-size // unit) * unit) if n)
            got, needed = f"{kernels} for {name} {size}", f"a multiple of {unit} in {dtype}, such as {near}"
            raise BadInput("experts.kernels", got=got, needed=needed, fix=Set("it", "auto"))


def _check_triton(name: str) -> None:
    if find_spec("triton") is None:
        fix = "pip install triton" | Set("it", "auto")
        raise BadInput("experts.kernels", got=f"{name}, which is not installed", needed="the package triton", fix=fix)
    import triton as package

    from parallel.process.process import gpus

    if not gpus() and not package.knobs.runtime.interpret:
        fix = Set("it", "auto", said="auto (to try the kernels, slowly: TRITON_INTERPRET=1)")
        raise BadInput("experts.kernels", got=f"{name}, but torch sees no GPU", needed="a GPU", fix=fix)
