"""What a training program does with its devices, as far as time depends on it: which kernels, launched how fast, what runs beside what.

A plan says who holds what; two programs still run the same plan at different speeds. Each value of a Program is a property that one can
look up or measure. PROGRAMS has those of published measurements, and this project's own. What programs keep in memory is in stack.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moe.plan.job.hashed import hashed_once

ALONE = 0.3  # of the faster of host and device, not beside the slower: fitted to vTrain's steps of small layers


@hashed_once
@dataclass(frozen=True)
class Program:
    """One training program.

    attention      `fused`: one kernel, scores stay on the chip; `scores`: they are written, read and masked in memory
    launch_us      the host's time for one kernel of the forward pass; backward, which C++ drives, takes `backward_launch` of it
    checkpoint_us  the host's time to enter a layer that is computed again: states of random numbers, a nested backward pass
    step_ms        the host's time for what each step has once: data, the gradient norm, the scale, logging
    pointwise      bytes that norms, activations and sums of residuals move, against kernels that fuse what can be fused
    streams        pointwise kernels take their time by `bytes`, or by `elements`, as 4 bytes each, where a core computes in fp32 anyway
    gradients      sums `after` the backward pass, or `beside` its last micro-batch
    staged         sums where there are stages: as above, or `by stage`, each when its stage is done, beside the rank's other actions
    gathers        of sharded parameters: `beside` the layer before, or only `partly`, when layers are fetched in small pieces; `waited` for
    alone          the part of the faster of host and device that is not beside the slower (1: one core does both, one after the other)
    shards         parameters of FSDP beside stages: gathered, and gradients summed, in each `micro-batch`, or once a `step`
    gather_gb_s    the most that one rank receives in such gathers (None: what its links carry)
    gather_us      the host's time around one gather or sum of a layer's sharded parameters, where it hides nothing: copies in and out of
                   buffers, and ranks that wait for each other
    experts_beside the part of exchanges with experts that the other direction's work hides
    tensor_beside  the part of tensor parallelism's collectives that products hide
    transfers      between stages: each of tp's ranks sends its part (`parts`), or all of them the same (`whole`)
    interleaved_transfers  `waited` for, or `beside` the next chunk's work
    dispatch       to experts: `all_to_all` sends each choice; `by_node` sends a token once to every rank that
                   needs it, and once over the network to every node (DeepEP)
    experts        products of a rank's experts: `grouped` in one kernel, or one `each`
    engine         the part of a micro-batch's time that the engine around the layers takes besides
    sent_gradients as the plan `stores` them, or as activations are `computed`
    accumulates    gradients of a micro-batch join the sum in a kernel `apart`, or in the product that makes them (`within`)
    parameters     gathers of new parameters after the optimizer: `after` it, or `beside` the next forward pass
    selective      what its selective recomputation repeats: `core`, attention that writes scores; `second`, a layer's norm and network or
                   experts; `half` of the forward pass
    products       what linear layers multiply: `compute`, the plan's kind, or a narrower kind to which operands are cast, as fp8
    """

    name: str
    attention: Literal["fused", "scores"] = "fused"
    launch_us: float = 12.0
    backward_launch: float = 1.0
    checkpoint_us: float = 100.0
    step_ms: float = 1.0
    pointwise: float = 1.0
    streams: Literal["bytes", "elements"] = "bytes"
    gradients: Literal["after", "beside"] = "beside"
    staged: Literal["as gradients", "by stage"] = "as gradients"
    gathers: Literal["beside", "partly", "waited"] = "beside"
    alone: float = ALONE
    shards: Literal["micro-batch", "step"] = "step"
    gather_gb_s: float | None = None
    gather_us: float = 0.0
    tensor_beside: float = 0.0
    experts_beside: float = 0.0
    transfers: Literal["parts", "whole"] = "parts"
    interleaved_transfers: Literal["waited", "beside"] = "waited"
    dispatch: Literal["all_to_all", "by_node"] = "all_to_all"
    experts: Literal["grouped", "each"] = "grouped"
    engine: float = 0.0
    sent_gradients: Literal["stored", "computed"] = "stored"
    accumulates: Literal["apart", "within"] = "apart"
    parameters: Literal["after", "beside"] = "after"
    selective: Literal["core", "second", "half"] = "core"
    products: str = "compute"


PROGRAMS = {
    program.name: program
    for program in (
        # this project: torch's eager mode and fused attention; selective recomputation repeats the second half of a layer
        Program(
            "moe-parallel", launch_us=20, pointwise=2.0, transfers="whole", selective="second", staged="by stage", shards="micro-batch"
        ),
        # ... on processes of a host without accelerators: a core computes and sends, one after the other
        Program(
            "moe-parallel-cpu",
            launch_us=20,
            pointwise=2.0,
            streams="elements",
            transfers="whole",
            gradients="after",
            gathers="waited",
            alone=1.0,
            selective="second",
            shards="micro-batch",
        ),
        # Megatron-LM of 2021: fused softmax and bias kernels, sums of gradients after the backward pass, parts of messages between stages
        Program("megatron-2021", attention="scores", launch_us=28, checkpoint_us=50, gradients="after"),
        # ... and of 2022, when products began to add to the sums of gradients themselves
        Program("megatron-2022", attention="scores", launch_us=28, checkpoint_us=50, gradients="after", accumulates="within"),
        # Megatron-DeepSpeed: the same layers under DeepSpeed's engine; pointwise kernels less fused
        Program("megatron-deepspeed", attention="scores", launch_us=28, checkpoint_us=50, gradients="after", pointwise=1.25),
        # ... its pipeline engine with bf16. MT-NLG on Selene and BLOOM on Jean Zay both take a sixth longer than Megatron-LM's own engine
        # on the same layers, devices and layout; the reason is not known in parts, so this is measured, not derived
        Program(
            "megatron-deepspeed-bf16",
            attention="scores",
            launch_us=28,
            checkpoint_us=50,
            gradients="after",
            pointwise=1.25,
            engine=0.12,
        ),
        # Megatron-Core since 2023: fused attention, sums beside the backward pass, part of tensor collectives beside products
        Program(
            "megatron-core",
            launch_us=20,
            tensor_beside=0.5,
            interleaved_transfers="beside",
            experts="each",
            accumulates="within",
            parameters="beside",
        ),
        # Megatron-Core's own FSDP, which sums gradients in 16 bits
        Program("megatron-fsdp", launch_us=20, tensor_beside=0.5, experts="each", accumulates="within", sent_gradients="computed"),
        # DeepSpeed's ZeRO-3 of 2021, which gathers parameters one by one (Megatron SC21, Table 2: 17 GB/s a rank)
        Program("deepspeed-zero3-2021", attention="scores", launch_us=30, gathers="partly", gather_gb_s=17, checkpoint_us=300),
        # DeepSpeed's ZeRO since 2022, and users' eager models on it
        Program("deepspeed", attention="scores", launch_us=25, pointwise=2.0),
        # nanotron: eager, with fused attention, norms and rotations
        Program("nanotron", launch_us=15, pointwise=1.5, checkpoint_us=0),
        # torch's FSDP, eager and compiled; torchtitan's selective recomputation repeats every second product
        Program("fsdp", launch_us=20, pointwise=2.0, selective="half"),
        Program("fsdp-compiled", launch_us=10, selective="half"),
        # XLA's programs: fused pointwise work, scores written, one launch a program
        Program("xla", attention="scores", launch_us=2, gradients="after", transfers="whole"),
    )
}
OWN = PROGRAMS["moe-parallel"]
OWN_ON_CPU = PROGRAMS["moe-parallel-cpu"]
