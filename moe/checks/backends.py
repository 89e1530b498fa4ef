"""Combinations that three other systems accept or refuse, according to their source code.

A system that is not named with a combination is not known to accept or refuse it. Conditions on sizes (heads by ulysses ranks, layers by
stages) are left out: every system has them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

System = Literal["DeepSpeed", "Megatron-Core", "torchtitan"]


@dataclass(frozen=True)
class Rule:
    """A system's verdict on a pair of choices.

    `one` and `other`: factors of moe/verify/hybrid.py with some of their values. `source`: a file of the system.
    """

    system: System
    one: tuple[str, tuple[str, ...]]
    other: tuple[str, tuple[str, ...]]
    status: Literal["runs", "refused"]
    reason: str
    source: str


STAGES = ("schedule", ("gpipe", "1f1b", "interleaved"))
SPARSE = ("model", ("switch", "gshard", "deepseek"))
SPREAD = ("experts", ("ep2", "ep4"))

RULES = (
    Rule(
        "DeepSpeed", STAGES, ("data", ("zero2", "zero3")), "refused", "its pipeline engine asserts stage 0 or 1", "runtime/pipe/engine.py"
    ),
    Rule(
        "Megatron-Core", STAGES, ("data", ("fsdp",)), "refused", "with torch's FSDP2; its own Megatron-FSDP runs", "training/arguments.py"
    ),
    Rule(
        "torchtitan", STAGES, ("data", ("fsdp",)), "runs", "weights stay gathered over the micro-batches by default", "distributed/fsdp.py"
    ),
    Rule(
        "DeepSpeed", ("data", ("zero3",)), SPARSE, "refused", "of its own MoE layer; its automatic ep runs without tp", "runtime/engine.py"
    ),
    Rule("Megatron-Core", ("data", ("fsdp",)), SPREAD, "refused", "with torch's FSDP2", "training/arguments.py"),
    Rule("torchtitan", ("data", ("fsdp",)), SPREAD, "runs", "where ep divides dp_shard * cp * tp", "distributed/parallel_dims.py"),
    Rule("Megatron-Core", ("data", ("fsdp",)), ("precision", ("fp16",)), "refused", "with torch's FSDP2", "training/arguments.py"),
)
