"""Bytes of model states that a rank holds, and that it sends in a step, as closed forms for data parallelism. Needs no torch.

    states of one parameter     parameters | gradients | optimizer (master copy and moments)
    stage 0   DP, DDP           whole      | whole     | whole            on N ranks that hold copies of it
    stage 1   ZeRO-1            whole      | whole     | 1/N
    stage 2   ZeRO-2            whole      | 1/N       | 1/N
    stage 3   ZeRO-3, FSDP      1/N        | 1/N       | 1/N

Dense parameters have copies on the ranks of dp, experts only on edp = dp / (ep etp) ranks. Activations, weights gathered for the current
layer, and buckets are not included. Source: ZeRO (arXiv 1910.02054), sections 3, 5 and 7.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class Storage:
    """Bytes of one parameter, its gradient and its optimizer states, unsharded. of_experts: optimizer bytes in experts, if different."""

    parameters: int
    gradients: int
    optimizer: float
    of_experts: float | None = None

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer

    @property
    def expert(self) -> Storage:
        """Storage of the parameters of experts."""
        return self if self.of_experts is None else replace(self, optimizer=self.of_experts)


MIXED = Storage(2, 2, 12)  # 16 bits, and Adam in fp32 with its master copy: ZeRO section 3.1, K = 12
MIXED_FP32_GRADIENTS = Storage(2, 4, 12)  # as MIXED, but gradients are summed in fp32, as in Megatron-LM: 18 bytes
MIXED_BOTH_GRADIENTS = Storage(2, 6, 12)  # gradients in 16 bits and their sum in fp32, as in DeepSpeed's bf16 optimizer and its estimates
BF16 = Storage(2, 2, 4)  # weights, gradients and moments in 16 bits, no fp32 copy
FP32 = Storage(4, 4, 8)  # parameters are their own master copy: DP, DDP and FSDP here, for any compute dtype
FP32_AND_COPY = Storage(4, 4, 12)  # as FP32, with another master copy in the engine: DeepSpeed's ZeRO here


@dataclass(frozen=True)
class States:
    """Bytes of each kind of state on one rank."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer

    def __add__(self, other: States) -> States:
        return States(self.parameters + other.parameters, self.gradients + other.gradients, self.optimizer + other.optimizer)


def model_states(num_parameters: float, *, stage: int, copies: int, storage: Storage = MIXED) -> States:
    """Bytes of the model states on one rank, for P parameters held or sharded by N = `copies` ranks. stage: ZeRO stage, 0 to 3.

    For MIXED: 16 P in stage 0; 4 P + 12 P/N, 2 P + 14 P/N and 16 P/N in stages 1, 2 and 3.
    """
    _check(stage, copies)
    return States(
        num_parameters * storage.parameters / (copies if stage >= 3 else 1),
        num_parameters * storage.gradients / (copies if stage >= 2 else 1),
        num_parameters * storage.optimizer / (copies if stage >= 1 else 1),
    )


def sparse_model_states(*, dense: float, expert: float, stage: int, dp: int, ep: int = 1, etp: int = 1, storage: Storage = MIXED) -> States:
    """Bytes of the model states on one rank of a model with experts.

    dense, expert: total parameters outside and inside the experts. stage: ZeRO stage, 0 to 3. The dp ranks hold copies of the dense
    parameters, which ZeRO shards. A rank holds 1 / (ep etp) of the experts' parameters, and dp / (ep etp) ranks hold copies of these (the
    edp axis).
    """
    apart = ep * etp
    assert dp % apart == 0, "ep * etp must divide dp"
    held = model_states(expert / apart, stage=stage, copies=dp // apart, storage=storage.expert)
    return model_states(dense, stage=stage, copies=dp, storage=storage) + held


def sent_bytes(
    *,
    parameters: float,
    gradients: float,
    stage: int,
    copies: int,
    microbatches: int = 1,
    reduces: Literal["step", "microbatch"] = "step",
    gathers: int = 2,
) -> float:
    """Bytes that a rank sends in one step, by ring collectives: (N - 1)/N of the buffer, twice that for an all-reduce. (This is optimal.)

    parameters, gradients: bytes of all parameters, of all gradients, in the dtype that is sent. copies: N. Stage 0: an all-reduce of the
    gradients. Stages 1 and 2: a reduce-scatter of the gradients, and an all-gather of the new parameters. Stage 3: `gathers` all-gathers
    of the parameters in each micro-batch (2: forward and backward; 1: they stay gathered in between), and the reduce-scatter. reduces:
    gradients are sent once a step, or once a micro-batch (if no unsharded gradients are kept). Source: ZeRO section 7.
    """
    _check(stage, copies)
    reduced = gradients * (microbatches if reduces == "microbatch" else 1)
    gathered = (0, 1, 1, gathers * microbatches)[stage] * parameters
    return (copies - 1) / copies * (reduced * (2 if stage == 0 else 1) + gathered)


def _check(stage: int, copies: int) -> None:
    assert stage in STAGES and copies >= 1, f"no stage {stage} on {copies} ranks"
