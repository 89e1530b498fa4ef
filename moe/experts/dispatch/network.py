"""Applies a rank's experts to the rows that it received. Matrices are whole, or sharded over the axis etp (tensor parallelism of experts).

    rows_RD of each etp rank --all-gather--> rows of all, by expert --1/etp of the hidden units--> partial sums
    rows_RD back             <--reduce-scatter, fp32--------------------------------------------------'

w1 and w3 are split by columns, w2 by rows, so one sum after w2 is enough (Megatron-LM, arXiv 1909.08053, section 3). Ranks may have
different numbers of rows, or none: each pads its rows to the largest number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe.experts.experts import ExpertChunk, Experts
from moe.kernels.rows import Plan
from parallel.mesh.collectives import all_gather, reduce_scatter
from parallel.mesh.host import read_later
from parallel.mesh.mesh import Axis

# on this rank: T tokens, R rows, F hidden units, E experts. D model, P etp ranks, A rows of all etp ranks together
# S slots of each etp rank: as many as the largest number of rows of one rank


@dataclass(frozen=True)
class Dropout:
    """Dropout inside the experts. `position_T` int64 [T]: each token's index in the step.
    `scale(position_R)` returns 0 or 1 / (1 - p) for each hidden unit, [R, F].
    """

    position_T: Tensor
    scale: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Arrived:
    """Numbers of received rows. `counts_PE` int64: rows that each etp rank received for each of this rank's experts. `rows_P`: their sums
    over experts, already on the host; [] with one etp rank.
    """

    counts_PE: Tensor
    rows_P: list[int]

    @classmethod
    def of(cls, counts_E: Tensor, etp: Axis) -> Arrived:
        """Gather the numbers of rows of all etp ranks. With several etp ranks, the host waits for the numbers."""
        counts_PE = all_gather(counts_E.unsqueeze(0), etp)
        return cls(counts_PE, [] if etp.size == 1 else read_later(counts_PE.sum(1))()[0])


def compute(
    rows_RD: Tensor,
    experts: Experts,
    *,
    etp: Axis,
    counts_E: Tensor | Arrived,
    weights: ExpertChunk = None,
    position_R: Tensor | None = None,
    dropout: Dropout | None = None,
) -> Tensor:
    """Apply the experts to rows [R, D], sorted by expert. Return the results in the same order and dtype. `counts_E`: number of rows of
    each expert. With several etp ranks, the host waits for these numbers; an `Arrived` already has them on the host. `weights`: the chunk
    of experts to apply; None: all experts of this rank. `position_R`: for dropout, the index of each row's token among the step's tokens.
    """
    arrived = counts_E if isinstance(counts_E, Arrived) else Arrived.of(counts_E, etp)
    if etp.size == 1:
        dropped_RF = None if dropout is None or position_R is None else dropout.scale(position_R)
        out_RD: Tensor = experts(rows_RD, counts=arrived.counts_PE[0], dropped_RF=dropped_RF, weights=weights)
        return out_RD
    longest, kernels = max(arrived.rows_P), experts.kernels

    def gathered(values: Tensor) -> Tensor:
        return all_gather(torch.cat((values, values.new_zeros(longest - len(values), *values.shape[1:]))), etp)

    plan = _plan(arrived, longest, kernels)
    rows_AD = kernels.permute(gathered(rows_RD), plan)
    dropped_AF = None
    if dropout is not None and position_R is not None:
        dropped_AF = dropout.scale(gathered(position_R)[plan.choice_R])[:, experts.hidden]
    out_AD = experts(rows_AD, counts=plan.counts_E, dropped_RF=dropped_AF, weights=weights)
    partial = kernels.combine(out_AD.float(), None, plan)
    return reduce_scatter(partial, etp)[: len(rows_RD)].to(rows_RD.dtype)


def _plan(arrived: Arrived, longest: int, kernels: Any) -> Plan:
    """Return the plan that sorts the gathered rows by expert. The gathered tensor has a block of `longest` slots for each etp
    rank: first the rank's rows, sorted by expert, then empty slots. In the plan, a slot is a token with one choice, its row's expert. An
    empty slot has no choice."""
    end_PE = arrived.counts_PE.cumsum(1)
    slot_PS = torch.arange(longest, device=end_PE.device).expand(len(end_PE), -1).contiguous()
    expert_S1 = torch.searchsorted(end_PE, slot_PS, right=True).view(-1, 1)
    held = end_PE.shape[1]
    plan: Plan = kernels.plan(expert_S1.clamp(max=held - 1), expert_S1 < held, num_experts=held)
    return plan.cut(sum(arrived.rows_P))
