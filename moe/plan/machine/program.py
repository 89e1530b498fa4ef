"""Properties of a training program that decide how fast it runs a plan: kernels, launch times, overlap of communication.

This file describes the project's own trainer; tests/planner/software.py describes programs with published measurements.
moe/plan/memory/stack.py describes the memory that a program needs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from moe.plan.job.hashed import hashed_once
from moe.plan.job.states import Update

# a pass takes the longer of host's time (kernel launches) and device's time, plus this fraction of the shorter; fitted to vTrain's steps
# with small layers
ALONE = 0.3


@dataclass(frozen=True)
class Updates:
    """How a program computes an optimizer's update. The default is this project's: torch's operators in fp32, except AdamW's fused kernel.

    adamw, sgd, muon, adafactor: bytes that this optimizer reads and writes for one parameter, apart from gradients and Muon's matrix
    products. AdamW reads and writes 12 (two moments, fp32 master copy), and writes 2 (the parameter in 16 bits). decay: additional bytes
    if separate operators decay the weights. products: dtype of Muon's matrix products."""

    adamw: float = 26.0
    sgd: float = 36.0
    muon: float = 56.0
    adafactor: float = 52.0
    decay: float = 8.0
    products: str = "fp32"

    def moved(self, update: Update) -> tuple[float, float]:
        """Return the bytes that an update reads and writes for one parameter, apart from gradients: (outside of experts, in experts)."""
        bytes_of = {"adamw": self.adamw, "sgd": self.sgd, "muon": self.muon, "adafactor": self.adafactor}
        rule = bytes_of[update.optimizer] + (self.decay if update.decays and update.optimizer != "adamw" else 0.0)
        dense, expert = update.own
        return dense * rule + (1 - dense) * self.adamw, expert * rule + (1 - expert) * self.adamw


@hashed_once
@dataclass(frozen=True)
class Program:
    """One training program. The value `overlapped` means: at the same time as computation, so that it takes no additional time. `waited`
    means: computation waits for it."""

    name: str
    attention: Literal["fused", "scores"] = "fused"  # one kernel that keeps scores on the chip, or kernels that write and read them
    launch_us: float = 12.0  # host's time to launch a kernel
    checkpoint_us: float = 100.0  # host's time to begin a recomputed layer: random number states, a nested backward pass
    step_ms: float = 1.0  # host's time once per step: data, gradient norm, loss scale, logging
    pointwise: float = 1.0  # bytes that norms, activations and residual additions move, as a multiple of fully fused kernels' bytes
    streams: Literal["bytes", "elements"] = "bytes"  # a pointwise kernel's time grows with its bytes, or (on a CPU) with its elements
    gradients: Literal["after", "overlapped"] = "overlapped"  # reductions run after the last backward pass of a step, or during it
    # with pipeline stages, gradients are reduced as `gradients` says, or by each rank as soon as a stage's gradients are complete
    staged: Literal["as gradients", "by stage"] = "as gradients"
    gathers: Literal["overlapped", "partly", "waited"] = "overlapped"  # computation hides all, 2/3 or none of the all-gathers of parameters
    alone: float = ALONE  # a pass takes max(host's time, device's time) + this fraction of their minimum; 0: full overlap, 1: none
    shards: Literal["micro-batch", "step"] = "step"  # with stages: how often FSDP gathers parameters and reduces gradients
    gather_gb_s: float | None = None  # largest rate at which a rank receives gathered parameters; None: the rate of its links
    gather_us: float = 0.0  # host's time to copy to and from buffers, for each all-gather or reduce-scatter of a sharded layer
    tensor_overlap: float = 0.0  # fraction of tensor parallelism's collectives that matrix products hide
    experts_overlap: float = 0.0  # fraction of the dispatch to experts that computation hides
    shared: Literal["waited", "overlapped"] = "waited"  # rows are sent to experts before the shared network runs, or while it runs
    transfers: Literal["parts", "whole"] = "parts"  # between stages, each tp rank sends its part of the tensor, or the whole tensor
    interleaved_transfers: Literal["waited", "overlapped"] = "waited"  # whether ranks wait for messages between interleaved stages
    # all_to_all sends a row for each choice; by_node sends a token once to each node, and there once to each rank, that needs it (DeepEP)
    dispatch: Literal["all_to_all", "by_node"] = "all_to_all"
    dispatch_kernels: tuple[int, int] = (45, 45)  # (forward, backward) kernels of router and dispatch; fitted to Megatron-Core
    capacity_kernels: int = 0  # forward kernels among dispatch_kernels that only a layer with a capacity needs
    # if a group's tokens are on several ranks: each counts all ranks' choices itself (kernels), or counts are all-reduced (operations)
    router: Literal["kernels", "operations"] = "operations"
    exchange_kernels: tuple[int, int] = (4, 4)  # (forward, backward) kernels of the exchange over ep and etp
    experts: Literal["grouped", "each"] = "grouped"  # products of a rank's experts: one kernel for all, or one for each expert
    engine: float = 0.0  # time that the engine adds to each micro-batch, as a fraction of the micro-batch's time
    sent_gradients: Literal["stored", "computed"] = "stored"  # gradients are sent in their stored dtype, or in the compute dtype
    accumulates: Literal["apart", "within"] = "apart"  # separate kernels sum micro-batches' gradients, or the matrix products' kernels do
    parameters: Literal["after", "overlapped"] = "after"  # all-gathers of new parameters: after the optimizer, or with the forward pass
    # selective recompute repeats attention's core, the second half of a layer, or operations that take half of a layer's forward time
    selective: Literal["core", "second", "half"] = "core"
    casts: Literal["use", "step"] = "step"  # weights are cast at each use (layer times include these casts), or once a step
    products: str = "compute"  # dtype of linear layers' products: the plan's compute dtype, or a narrower one such as fp8
    updates: Updates = Updates()


# this project's trainer: eager torch with fused attention
OWN = Program(
    "moe-parallel",
    launch_us=20,
    pointwise=2.0,
    transfers="whole",
    selective="second",
    staged="by stage",
    shards="micro-batch",
    casts="use",
    shared="overlapped",
    router="kernels",
    # numbers of kernels, as counted by `moe rehearse --device cuda`
    capacity_kernels=2,
    dispatch_kernels=(11, 8),
    exchange_kernels=(8, 4),
)
# this project's trainer on a CPU host, on which a core either computes or communicates
OWN_ON_CPU = replace(
    OWN,
    name="moe-parallel-cpu",
    streams="elements",
    staged="as gradients",
    gradients="after",
    gathers="waited",
    shared="waited",
    router="operations",
    alone=1.0,
    capacity_kernels=0,
    dispatch_kernels=(45, 45),
    exchange_kernels=(4, 4),
)
