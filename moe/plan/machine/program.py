"""Properties of a training program that decide how fast it runs a plan: kernels, launch times, overlap of communication.

This file has the properties of the project's own trainer; tests/planner/software.py has those of programs with published measurements.
moe/plan/memory/stack.py describes the memory that a program needs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from moe.plan.job.hashed import hashed_once

ALONE = 0.3  # default of Program.alone, fitted to vTrain's measured steps of small layers


@hashed_once
@dataclass(frozen=True)
class Program:
    """One training program. `overlapped`: at the same time as computation, so that it takes no additional time.

    attention      `fused`: one kernel that keeps scores on the chip; `scores`: kernels that write, read and mask scores in memory
    launch_us      host's time to launch a kernel in the forward pass; in the backward pass times `backward_launch`
    checkpoint_us  host's time to begin a recomputed layer: random number states, a nested backward pass
    step_ms        host's time once per step: data, gradient norm, loss scale, logging
    pointwise      bytes that norms, activations and residual additions move / bytes that fully fused kernels would move
    streams        time of pointwise kernels depends on `bytes`, or on the number of `elements` (on a CPU, which computes in fp32)
    gradients      gradient reductions run `after` the backward pass, or `overlapped` with its last micro-batch
    staged         gradient reductions with pipeline stages: the same `as gradients`, or `by stage`, when a stage has all its gradients
    gathers        all-gathers of sharded parameters: `overlapped` with the previous layer, `partly` overlapped, or `waited` for
    alone          a pass takes the longer of the host's and the device's time, plus this fraction of the shorter (1: no overlap)
    shards         FSDP with stages gathers parameters and reduces gradients in each `micro-batch`, or once per `step`
    gather_gb_s    largest rate at which a rank receives gathered parameters; None: the rate of its links
    gather_us      host's time for one all-gather or reduction of a layer's sharded parameters: copies to and from buffers, waiting
    experts_overlap  fraction of the dispatch to experts that computation hides
    tensor_overlap   fraction of tensor parallelism's collectives that products hide
    transfers      messages between stages: each tp rank sends its part of the tensor (`parts`), or all send the `whole` tensor
    interleaved_transfers  messages between the chunks of interleaved stages are `waited` for, or `overlapped`
    dispatch       to experts: `all_to_all` sends a row for each choice; `by_node` sends a token once to each rank and node (DeepEP)
    experts        products of a rank's experts: `grouped` in one kernel, or one kernel for `each`
    engine         additional time of the engine / time of a micro-batch
    sent_gradients dtype of sent gradients: the `stored` gradients', or the `computed` activations'
    accumulates    gradients of micro-batches are summed in a kernel of their own (`apart`), or by the product that makes them (`within`)
    parameters     all-gathers of new parameters run `after` the optimizer, or `overlapped` with the next forward pass
    selective      selective recompute repeats attention with written scores (`core`), the second half of a layer (`second`: norm and
                   feed-forward network or experts), or `half` of the forward pass
    products       dtype of linear layers' products: `compute`, the plan's, or a narrower dtype such as fp8, to which operands are cast
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


# this project's trainer: eager torch with fused attention
OWN = Program("moe-parallel", launch_us=20, pointwise=2.0, transfers="whole", selective="second", staged="by stage", shards="micro-batch")
# this project's trainer on a CPU host, where a core either computes or communicates
OWN_ON_CPU = replace(
    OWN, name="moe-parallel-cpu", streams="elements", staged="as gradients", gradients="after", gathers="waited", alone=1.0
)
