"""Every rank gathers the tokens of all ep ranks, and computes the results of the experts that it holds.

    x_TD, experts, gates --all-gather over ep--> tokens of all ranks --held experts--> partial sums, fp32 --reduce-scatter--> y_TD

Each token is sent ep - 1 times. An all-to-all sends a token with k choices k (ep - 1) / ep times. So gathering suits an ep of at most k.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe.experts.dispatch.dispatcher import Dispatcher, Exchange, Sizes
from parallel.mesh.mesh import Mesh
from parallel.mesh.traffic import Load, Message, Traffic

if TYPE_CHECKING:
    from torch import Tensor

    from moe.experts.dispatch.network import Dropout
    from moe.experts.experts import Experts
    from moe.kernels.rows import Plan
    from moe.router.routing import Routing

# T tokens on this rank, A tokens of all ranks (each rank's padded to the largest T), D model, K choices, E experts, R rows


class AllGather(Dispatcher):
    name = "all_gather"
    about = "ep of about k or less"
    returns_rows = False

    def traffic(self, load: Load) -> Traffic:
        def gather(token_bytes: float, calls: int = 1) -> Message:
            return Message("ep", "all_gather", load.tokens * token_bytes, load.ranks, calls=calls)

        def sums(numbers: int, calls: int = 1) -> Message:
            return Message("ep", "reduce_scatter", load.ranks * load.tokens * 4 * numbers, load.ranks, calls=calls)

        longest = Message("ep", "all_gather", 8 * (2 + load.ranks), load.ranks)
        decisions = gather((4 + 8) * load.choices, calls=2)  # bytes: gate in fp32, number of the expert in int64
        # messages of the backward pass: gradients of the results; gradients of the inputs, which are tokens and gates
        of_results = gather(4 * load.width)
        of_inputs = sums(load.width + load.choices, calls=2) if load.weighed else sums(load.width)
        tokens = gather(load.row_bytes)
        return Traffic((longest, decisions), (tokens, sums(load.width)), (of_results, of_inputs), meanwhile=(tokens,))

    def open(self, mesh: Mesh, sizes: Sizes) -> Exchange:
        return Gathered.over(("ep",), mesh, sizes)


class Gathered(Exchange):
    def run(self, x_TD: Tensor, routing: Routing, experts: Experts, *, dropout: Dropout | None = None) -> Tensor:
        from moe.experts.dispatch.network import Arrived, compute
        from parallel.mesh.collectives import all_gather, finish_rows, reduce_scatter
        from parallel.mesh.exchange import lengthened, start_runs

        (tokens, choices), held = routing.expert_TK.shape, routing.probs_TE.shape[1] // self.axis.size
        place_TK = (self.places(routing) + 1).where(routing.kept_TK, 0)  # 0 for dropped choices, as for padding
        longest, most, rows_N = self._agree(place_TK, held)
        gate_AK = self.gathered(routing.gate_TK, longest, wider=most - choices)
        place_AK = self.gathered(place_TK, longest, wider=most - choices)
        plan = self._plan_held(place_AK, held=held).cut(rows_N[self.etp.index])  # cut to the rows that this rank computes
        arrived = Arrived(all_gather(plan.counts_E.unsqueeze(0), self.etp), rows_N)
        position_R = None if dropout is None else self.gathered(dropout.position_T, longest)[plan.token_R]
        started = start_runs(lengthened(x_TD, longest), self.axis)
        self.meanwhile()
        rows_RD = self.kernels.permute(finish_rows(started), plan)
        out_RD = compute(rows_RD, experts, etp=self.etp, counts_E=arrived, position_R=position_R, dropout=dropout)
        partial_AD = self.kernels.combine(out_RD.float(), gate_AK, plan)
        return reduce_scatter(partial_AD, self.axis)[:tokens].to(x_TD.dtype)

    def _agree(self, place_TK: Tensor, held: int) -> tuple[int, int, list[int]]:
        """Return the largest T and K of all ranks, and the number of rows that each rank of etp will compute. K differs between ranks with
        expert-choice routing. `held`: number of experts on a rank. The host waits once for the GPU.
        """
        import torch

        from parallel.mesh.collectives import all_gather
        from parallel.mesh.host import on_device, read_later

        ranks, here = self.axis.size, self.axis.index
        rank_N = (place_TK - 1).div(held, rounding_mode="floor").flatten() + 1  # 0: a dropped choice
        rows_P = rank_N.new_zeros(ranks + 1).scatter_add_(0, rank_N, torch.ones_like(rank_N))[1:]
        mine = torch.cat((on_device(torch.tensor(place_TK.shape), place_TK.device), rows_P))
        told = all_gather(all_gather(mine.unsqueeze(0), self.axis), self.etp).view(self.etp.size, ranks, -1)
        (longest, most), rows = read_later(told[..., :2].amax((0, 1)), told[..., 2 + here].sum(1))()
        return longest, most, rows

    def gathered(self, values_T: Tensor, longest: int, *, wider: int = 0) -> Tensor:
        """Return the values [A, ...] of all ranks, each rank's padded to `longest` tokens and by `wider` zeros in the last dim."""
        import torch.nn.functional as F

        from parallel.mesh.collectives import all_gather

        lacks = longest - len(values_T)
        missing = (0, wider, 0, lacks) if values_T.ndim > 1 else (0, lacks)
        return all_gather(F.pad(values_T, missing) if any(missing) else values_T, self.axis)

    def _plan_held(self, place_AK: Tensor, *, held: int) -> Plan:
        """Return the plan of the choices that fall on this rank's `held` experts. `place_AK`: 1 + the place of each choice's expert
        (placement.py); 0: a dropped choice, or padding."""
        here_AK = place_AK - 1 - self.axis.index * held
        kept_AK = (place_AK > 0) & (here_AK >= 0) & (here_AK < held)
        plan: Plan = self.kernels.plan(here_AK.clamp(0, held - 1), kept_AK, num_experts=held)
        return plan
