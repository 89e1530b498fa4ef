"""Properties of training programs on which the time of a step depends: kernels, launch times, and overlap of communication.

Two programs run the same plan at different speeds. Each field of a Program can be looked up or measured. This file has the project's own
trainer; tests/planner/software.py has the programs of published measurements. memory/stack.py describes the memory that a program needs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from moe.plan.job.hashed import hashed_once

ALONE = 0.3  # see Program.alone; fitted to vTrain's measured steps of small layers


@hashed_once
@dataclass(frozen=True)
class Program:
    """One training program. `overlapped` work runs at the same time as other work, so it takes no additional time.

    attention      `fused`: one kernel, scores stay on the chip; `scores`: they are written, read and masked in memory
    launch_us      host's time to launch a kernel of the forward pass; the backward pass, driven by C++, takes `backward_launch` times that
    checkpoint_us  host's time to enter a recomputed layer: states of random numbers, a nested backward pass
    step_ms        host's time once a step: data, gradient norm, loss scale, logging
    pointwise      bytes that norms, activations and residual sums move, divided by the bytes of fully fused kernels
    streams        time of pointwise kernels depends on `bytes`, or on the number of `elements` (on a CPU, which computes in fp32)
    gradients      gradient sums run `after` the backward pass, or `overlapped` with its last micro-batch
    staged         gradient sums with pipeline stages: `as gradients` says, or `by stage`: each as soon as its stage has all gradients
    gathers        gathers of sharded parameters run `overlapped` with the previous layer, only `partly` so, or are `waited` for
    alone          host and device work at the same time, but not always: fraction of the faster one's time that is added to the
                   slower one's (1: one core does both, one after the other)
    shards         FSDP with pipeline stages gathers parameters and sums gradients in each `micro-batch`, or once a `step`
    gather_gb_s    largest rate at which a rank receives gathered parameters (None: the rate of its links)
    gather_us      host's time around one gather or sum of a layer's sharded parameters: copies in and out of buffers, waiting for ranks
    experts_overlap  fraction of the exchanges with experts that the other direction's computation hides
    tensor_overlap   fraction of tensor parallelism's collectives that products hide
    transfers      between stages: each rank of tp sends its part (`parts`), or all send the same (`whole`)
    interleaved_transfers  `waited` for, or `overlapped` with the next chunk's work
    dispatch       to experts: `all_to_all` sends each choice; `by_node` sends a token once to every rank that
                   needs it, and once over the network to every node (DeepEP)
    experts        products of a rank's experts: `grouped` in one kernel, or one kernel for `each`
    engine         additional time of the engine around the layers, as a fraction of a micro-batch's time
    sent_gradients dtype of sent gradients: as they are `stored`, or as activations are `computed`
    accumulates    a micro-batch's gradients are added to the sum in a kernel `apart`, or in the product that makes them (`within`)
    parameters     gathers of new parameters run `after` the optimizer, or `overlapped` with the next forward pass
    selective      selective recompute repeats `core`: attention that writes scores; `second`: a layer's norm and network or experts;
                   `half`: half of the forward pass
    products       dtype of linear layers' products: `compute` (the plan's), or a narrower dtype to which operands are cast, as fp8
    """

    name: str
    attention: Literal["fused", "scores"] = "fused"
    launch_us: float = 12.0
    backward_launch: float = 1.0
    checkpoint_us: float = 100.0
    step_ms: float = 1.0
    pointwise: float = 1.0
    streams: Literal["bytes", "elements"] = "bytes"
    gradients: Literal["after", "overlapped"] = "overlapped"
    staged: Literal["as gradients", "by stage"] = "as gradients"
    gathers: Literal["overlapped", "partly", "waited"] = "overlapped"
    alone: float = ALONE
    shards: Literal["micro-batch", "step"] = "step"
    gather_gb_s: float | None = None
    gather_us: float = 0.0
    tensor_overlap: float = 0.0
    experts_overlap: float = 0.0
    transfers: Literal["parts", "whole"] = "parts"
    interleaved_transfers: Literal["waited", "overlapped"] = "waited"
    dispatch: Literal["all_to_all", "by_node"] = "all_to_all"
    experts: Literal["grouped", "each"] = "grouped"
    engine: float = 0.0
    sent_gradients: Literal["stored", "computed"] = "stored"
    accumulates: Literal["apart", "within"] = "apart"
    parameters: Literal["after", "overlapped"] = "after"
    selective: Literal["core", "second", "half"] = "core"
    products: str = "compute"


# torch's eager mode and fused attention; selective recompute repeats the second half of a layer
OWN = Program("moe-parallel", launch_us=20, pointwise=2.0, transfers="whole", selective="second", staged="by stage", shards="micro-batch")
# on processes of a host without accelerators: a core computes and sends, one after the other
OWN_ON_CPU = replace(
    OWN, name="moe-parallel-cpu", streams="elements", staged="as gradients", gradients="after", gathers="waited", alone=1.0
)
