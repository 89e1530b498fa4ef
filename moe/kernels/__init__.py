"""The hot path behind one interface, with interchangeable implementations.

    top_k         the experts of the highest scores
    slots         position of every choice in its expert's queue      (who is dropped)
    plan          where every kept choice's row lies                  (rows sorted by expert)
    permute       tokens -> rows                                      backward: rows -> tokens
    reorder       rows -> rows, a bijection                           backward: its inverse
    grouped_ffn   each expert's rows through its own network
    combine       rows -> tokens, weighted by the gates
    routed_ffn    permute, grouped_ffn and combine fused           (all experts are here)

`reference` is the definition of right: plain loops, slow, exact. `cpu` is the fast one; memory and time go with routed
rows. Backwards only gather, never add at an index: the result does not depend on the order in which threads run.
"""

from __future__ import annotations

from types import ModuleType

from moe.kernels import cpu, reference
from moe.kernels.plan import Plan
from parallel.errors import BadInput

__all__ = ["Plan", "choose"]

_KERNELS: dict[str, ModuleType] = {"reference": reference, "cpu": cpu}


def choose(name: str = "auto") -> ModuleType:
    """The kernels by name; `auto` is the fastest that runs on every device."""
    if name == "auto":
        return cpu
    if name not in _KERNELS:
        raise BadInput("experts.kernels", got=name, needed=f"one of auto, {', '.join(_KERNELS)}", fix="set it to auto")
    return _KERNELS[name]
