"""Bytes of model states that a data-parallel rank holds, in closed form. Needs no torch.

    share on each of N ranks    parameters | gradients | optimizer (master copy and Adam's moments)
    stage 0   DP, DDP           whole      | whole     | whole
    stage 1   ZeRO-1            whole      | whole     | 1/N
    stage 2   ZeRO-2            whole      | 1/N       | 1/N
    stage 3   ZeRO-3, FSDP      1/N        | 1/N       | 1/N

N is the number of data-parallel ranks: Plan.copies for dense parameters, Plan.edp = dp sp tp / (ep etp) for experts. Activations, weights
gathered for the current layer, and communication buckets are not included. Source: ZeRO (arXiv 1910.02054), sections 3 and 5.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from moe.plan.job.hashed import Summed

STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class Update:
    """An optimizer's update, whatever program computes it (program.py has the bytes that a program moves). Pairs: (outside of experts, in
    experts). own: fraction of the parameters that the optimizer's own rule updates; AdamW's rule updates the others. decays: weight decay.
    flops: floating-point operations of matrix products for one parameter; ranks that hold copies of a matrix share them."""

    optimizer: Literal["adamw", "sgd", "muon", "adafactor"] = "adamw"
    own: tuple[float, float] = (1.0, 1.0)
    decays: bool = False
    flops: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class Storage:
    """Bytes of one parameter, of its gradient, and of its optimizer states, before sharding. of_experts: bytes of optimizer states for a
    parameter of an expert; None: the same as for other parameters. blocks: bytes of a frozen parameter that is stored in quantized blocks
    (moe/nn/blocks.py). Blocks are never sharded. update: work of the optimizer's update."""

    parameters: int
    gradients: int
    optimizer: float
    of_experts: float | None = None
    blocks: float = 0.0
    update: Update = Update()

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer

    @property
    def expert(self) -> Storage:
        """The storage of experts' parameters."""
        return self if self.of_experts is None else replace(self, optimizer=self.of_experts)


MIXED = Storage(2, 2, 12)  # parameters and gradients in 16 bits; Adam's moments and master copy in fp32 (ZeRO section 3.1, K = 12)
MIXED_FP32_GRADIENTS = Storage(2, 4, 12)  # MIXED with gradients in fp32, as in Megatron-LM: 18 bytes
BF16 = Storage(2, 2, 4)  # parameters, gradients and Adam's moments in 16 bits, no fp32 copy
FP32 = Storage(4, 4, 8)  # fp32 parameters without a master copy: DP, DDP and FSDP of this project, for any compute dtype
FP32_AND_COPY = Storage(4, 4, 12)  # FP32 with a master copy in the engine: DeepSpeed's ZeRO in this project


@dataclass(frozen=True)
class States(Summed):
    """Bytes of each kind of state on one rank."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer


def model_states(num_parameters: float, *, stage: int, copies: int, storage: Storage = MIXED) -> States:
    """Bytes of the model states of P = `num_parameters` parameters on one of N = `copies` data-parallel ranks with ZeRO stage 0 to 3. For
    MIXED: 16 P in stage 0; 4 P + 12 P/N, 2 P + 14 P/N and 16 P/N in stages 1, 2 and 3."""
    assert stage in STAGES and copies >= 1, f"no stage {stage} on {copies} ranks"
    return States(
        num_parameters * storage.parameters / (copies if stage >= 3 else 1),
        num_parameters * storage.gradients / (copies if stage >= 2 else 1),
        num_parameters * storage.optimizer / (copies if stage >= 1 else 1),
    )


def sparse_model_states(*, dense: float, expert: float, stage: int, dp: int, ep: int = 1, etp: int = 1, storage: Storage = MIXED) -> States:
    """Bytes of a sparse model's states on one rank, without tp, sp and pp. dense, expert: numbers of parameters outside and inside of
    experts. Dense parameters have copies on dp ranks. A rank holds 1 / (ep etp) of the experts' parameters, which have copies
    on dp / (ep etp) ranks."""
    apart = ep * etp
    assert dp % apart == 0, "ep * etp must divide dp"
    held = model_states(expert / apart, stage=stage, copies=dp // apart, storage=storage.expert)
    return model_states(dense, stage=stage, copies=dp, storage=storage) + held
