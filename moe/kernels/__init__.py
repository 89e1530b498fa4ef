"""The MoE layer's operations behind one interface, with interchangeable implementations.

    top_k         the experts of the highest scores
    slots         position of every choice in its expert's queue      (decides which choices are dropped)
    plan          the row of every kept choice                        (rows are sorted by expert)
    permute       tokens -> rows                                      backward: rows -> tokens
    reorder       rows -> rows, a permutation                         backward: its inverse
    grouped_ffn   each expert's rows through its own network          (network.py; products.py: other ways to multiply)
    combine       rows -> tokens, weighted by the gates
    routed_ffn    permute, grouped_ffn and combine fused           (if this rank holds all experts)

A choice is a pair of a token and one of its K experts. `reference` defines the right result in plain, slow loops. `cpu` uses torch
operations only, and `triton` is for GPUs; their memory and time grow with the number of routed rows. `auto` takes `triton` for
tensors on a GPU, else `cpu`. All sums have a fixed order, so results do not depend on how threads are scheduled.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from moe.kernels.plan import Plan
from parallel.errors import BadInput
from parallel.fixes import Set

__all__ = ["Plan", "choose"]

_NAMES = ("auto", "reference", "cpu")


def choose(name: str = "auto") -> ModuleType:
    """Return the module of kernels called `name`. Raise BadInput if the name is unknown, or if triton is not installed or has no GPU.

    A module is imported when it is chosen: the planner reads this package without torch. Example: `choose("cpu").permute(x_TD, plan)`.
    """
    if name == "triton":
        return _triton()
    if name not in _NAMES:
        raise BadInput("experts.kernels", got=name, needed=f"one of {', '.join(_NAMES)}, triton", fix=Set("it", "auto"))
    return import_module(f"moe.kernels.{name}")


def _triton() -> ModuleType:
    if find_spec("triton") is None:
        raise BadInput(
            "experts.kernels",
            got="triton, which is not installed",
            needed="the package triton",
            fix="pip install triton" | Set("it", "auto"),
        )
    import torch
    import triton as package

    if not torch.cuda.is_available() and not package.knobs.runtime.interpret:
        raise BadInput(
            "experts.kernels",
            got="triton, but torch sees no GPU",
            needed="a GPU",
            fix=Set("it", "auto", said="auto (to try the kernels, slowly: TRITON_INTERPRET=1)"),
        )
    from moe.kernels import triton

    return triton
