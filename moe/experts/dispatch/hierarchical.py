"""Sends a token once to each node that holds some of its experts, and there once to each rank. Partial sums come back the same way.

    token of rank (0, i), experts on (1, 0) and (1, 2)     --between nodes-->  (1, i)  --within the node-->  (1, 0): g E(x)
                                                                                  |                ------->  (1, 2): g E(x) + g' E'(x)
    y  <--sum over nodes, one row each--  (1, i)  <--sum over ranks, one row each--

Rank (o, i) of the axes ep_outer and ep_inner is rank o * inner + i of ep. E and E' are experts, g and g' their gates. A token is sent
together with the gates of its choices and the places of their experts (an expert's place is its number in the order in which ranks hold
experts, placement.py). After the second exchange, each rank sums the outputs of its own experts for a token, by the same kernel call as
Local (dispatcher.py). The numbers of tokens in the second exchange are computed on the device from the first exchange's, so the host waits
once for both. Source: DeepSeek-V3 (arXiv 2412.19437, section 3.2.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING, Any, NamedTuple

from moe.experts.dispatch.dispatcher import Dispatcher, Exchange, Sizes
from parallel.errors import BadInput
from parallel.fixes import Set
from parallel.mesh.mesh import Axis, Mesh, divisors
from parallel.mesh.traffic import Load, Message, Traffic

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from moe.experts.dispatch.network import Dropout
    from moe.experts.experts import Experts
    from moe.kernels.rows import Plan
    from moe.router.routing import Routing

# T tokens on this rank (its own, or received ones), D model, K choices, R rows, P ranks, O nodes, I ranks of a node


class Hierarchical(Dispatcher):
    name = "hierarchical"
    about = "many nodes"
    reads = {"node_size": "only hierarchical sends between nodes and within nodes separately"}
    examples = {"hierarchical": {"node_size": 2}}
    least_ranks = 4
    returns_rows = False

    def check(self, *, ranks: int, held: int) -> None:
        size = self.settings.node_size
        if size is None:
            got, needed = "null with dispatch.kind=hierarchical", "how many ranks of the ep axis share a node"
            fix = Set("it", *divisors(ranks)) | Set("dispatch.kind", "all_to_all")
            raise BadInput("dispatch.node_size", got=got, needed=needed, fix=fix)
        if ranks > 1 and ranks % size:
            needed = f"a divisor of degrees.ep={ranks}"
            raise BadInput("dispatch.node_size", got=size, needed=needed, fix=Set("it", *divisors(ranks)))

    def traffic(self, load: Load) -> Traffic:
        inner = gcd(self.settings.node_size or 1, load.ranks)
        outer = load.ranks // inner
        counts, forward, backward = list[Message](), list[Message](), list[Message]()
        hops = (("ep_outer", outer, inner, outer, 2 * inner + 2), ("ep_inner", inner, 1, load.ranks, 3))
        for axis, ranks, stride, targets, columns in hops:
            copies = load.tokens * load.copies(targets)
            busiest = min(load.busiest, max(1.0, targets / load.copies(targets)))  # at most a copy of each token
            rows = Message(axis, "all_to_all", copies * load.row_bytes, ranks, stride, busiest=busiest)
            gates = rows._replace(handed=copies * 4 * load.choices)  # a gate is sent in fp32
            places = gates  # a place (placement.py) is int32, so places need as many bytes as gates
            counts.append(Message(axis, "counts", 8 * ranks * columns, ranks, stride))
            forward += [rows, gates, places, rows]
            backward += [rows, rows, gates] if load.weighed else [rows, rows]
        return Traffic(tuple(counts), tuple(forward), tuple(backward), meanwhile=tuple(forward[:1]))

    def open(self, mesh: Mesh, sizes: Sizes) -> Exchange:
        return OncePerNode.over(("ep_outer", "ep_inner"), mesh, sizes)


class Tokens(NamedTuple):
    """Tokens on a rank, with their choices. `place_TK` int64: the place of each choice's expert (placement.py); -1 for a choice that is
    dropped, or for an expert elsewhere. Places are numbered over all ranks at first, within this node after the exchange between nodes,
    and within this rank after the exchange within the node. `position_T`: each token's index in the step, for dropout.
    """

    x_TD: Tensor
    gate_TK: Tensor
    place_TK: Tensor
    position_T: Tensor | None

    def target_TK(self, places: int, targets: int) -> Tensor:
        """Return the index of the rank or node to which each choice is sent; `targets` for a choice with place -1. places: number of
        experts on each of the `targets` ranks or nodes."""
        return (self.place_TK // places).where(self.place_TK >= 0, targets)

    def reached(self, places: int, targets: int) -> Tensor:
        """Return whether each token is sent to each target, a rank or a node: bool [T, targets]. places: number of experts on a target."""
        import torch

        found = torch.zeros(len(self.place_TK), targets + 1, dtype=torch.bool, device=self.place_TK.device)
        return found.scatter_(1, self.target_TK(places, targets), True)[:, :targets]


@dataclass(frozen=True)
class Hop:
    """The exchange over one axis, between nodes or within a node. `places`: number of experts on each target (node or rank). `send`,
    `receive`: number of tokens sent to and received from each target. `choices`: the largest K of all senders, because K differs between
    ranks with expert-choice routing.
    """

    axis: Axis
    kernels: Any
    places: int
    send: list[int]
    receive: list[int]
    choices: int

    def there(self, tokens: Tokens, meanwhile: Callable[[], object]) -> tuple[Tokens, Plan]:
        """Send each token once to each target (node or rank) with some of its experts, and call `meanwhile` during the transfer. Return the
        received tokens, and the plan of the copies sent. Backward: each token's gradient is the sum over its copies, in fp32.
        """
        import torch
        import torch.nn.functional as F

        from parallel.mesh.collectives import finish_rows, start_all_to_all

        count, targets = len(tokens.x_TD), self.axis.size
        target_TP = torch.arange(targets, device=tokens.x_TD.device).expand(count, -1)
        plan = self.kernels.plan(target_TP, tokens.reached(self.places, targets), num_experts=targets).cut(sum(self.send))
        more = (0, self.choices - tokens.place_TK.shape[1])
        gate_TK = self._sent(F.pad(tokens.gate_TK, more), plan)
        place_TK = self._sent(F.pad(tokens.place_TK, more, value=-1).int(), plan).long() - self.axis.index * self.places
        place_TK = place_TK.where((place_TK >= 0) & (place_TK < self.places), -1)
        position_T = None if tokens.position_T is None else self._sent(tokens.position_T.unsqueeze(1), plan).squeeze(1)
        started = start_all_to_all(self.kernels.permute(tokens.x_TD, plan), self.axis, send=self.send, receive=self.receive)
        meanwhile()
        return Tokens(finish_rows(started), gate_TK, place_TK, position_T), plan

    def _sent(self, values: Tensor, plan: Plan) -> Tensor:
        from parallel.mesh.collectives import all_to_all

        return all_to_all(self.kernels.permute(values, plan), self.axis, send=self.send, receive=self.receive)

    def back(self, sum_TD: Tensor, plan: Plan) -> Tensor:
        """Send the partial sums of received tokens back, and add up each token's sums in fp32. Backward: a token's gradient is sent to all
        targets that computed one of its sums."""
        from parallel.mesh.collectives import all_to_all

        rows_RD = all_to_all(sum_TD, self.axis, send=self.receive, receive=self.send)
        y_TD: Tensor = self.kernels.combine(rows_RD, None, plan)
        return y_TD


class OncePerNode(Exchange):
    def run(self, x_TD: Tensor, routing: Routing, experts: Experts, *, dropout: Dropout | None = None) -> Tensor:
        place_TK = self.places(routing).where(routing.kept_TK, -1)
        tokens = Tokens(x_TD, routing.gate_TK, place_TK, None if dropout is None else dropout.position_T)
        between, within, rows_P = self._agree(tokens, routing.probs_TE.shape[1])
        in_node, copies_to_nodes = between.there(tokens, self.meanwhile)
        here, copies_to_ranks = within.there(in_node, lambda: None)
        plan = self.kernels.plan(here.place_TK.clamp(min=0), here.place_TK >= 0, num_experts=within.places).cut(rows_P[self.etp.index])
        sum_TD = self._computed(here, plan, rows_P, experts, dropout)
        return between.back(within.back(sum_TD, copies_to_ranks), copies_to_nodes)

    def _agree(self, tokens: Tokens, num_experts: int) -> tuple[Hop, Hop, list[int]]:
        """Return the exchange between nodes, the exchange within the node, and the number of choices that each etp rank will get."""
        import torch

        from parallel.mesh.collectives import all_gather
        from parallel.mesh.exchange import exchange_counts
        from parallel.mesh.host import read_later

        outer, inner = self.axes
        ranks, size = outer.size * inner.size, inner.size
        places, kept_TK = num_experts // ranks, tokens.place_TK >= 0
        to_node_O, to_rank_P = tokens.reached(places * size, outer.size).sum(0), tokens.reached(places, ranks).sum(0)
        choices_P = self.kernels.plan(tokens.target_TK(places, ranks), kept_TK, num_experts=ranks).counts_E
        width_O = torch.full_like(to_node_O, kept_TK.shape[1])
        # sent to each node: number of tokens for it, numbers of tokens and of choices for each of its ranks, and K
        told = torch.cat([to_node_O.unsqueeze(1), to_rank_P.view(-1, size), choices_P.view(-1, size), width_O.unsqueeze(1)], 1)
        heard = exchange_counts(told, outer)
        most = heard[:, -1].max()
        forward_I, choices_I = heard[:, 1:-1].sum(0).split(size)
        arriving = exchange_counts(torch.stack([forward_I, choices_I, most.expand(size)], 1), inner)
        rows_P = all_gather(arriving[:, 1].sum().unsqueeze(0), self.etp)
        sends, receives, widest, forward, arrivals, rows = read_later(to_node_O, heard[:, 0], most, forward_I, arriving, rows_P)()
        from_ranks, _, widths = zip(*arrivals, strict=True)
        between = Hop(outer, self.kernels, places * size, sends, receives, widest)
        return between, Hop(inner, self.kernels, places, forward, list(from_ranks), max(widths)), rows

    def _computed(self, tokens: Tokens, plan: Plan, rows_P: list[int], experts: Experts, dropout: Dropout | None) -> Tensor:
        """Return the sum of gate * expert(x) over each token's choices of this rank's experts, [T, D]. `rows_P`: number of such choices on
        each etp rank."""
        from moe.experts.dispatch.network import Arrived, compute
        from moe.experts.experts import Routed
        from parallel.mesh.collectives import all_gather
        from parallel.numerics.supposed import supposed

        position_R = None if tokens.position_T is None else tokens.position_T[plan.token_R]
        if self.etp.size == 1:
            dropped_RF = None if dropout is None or position_R is None else dropout.scale(position_R)
            sum_TD: Tensor = experts(tokens.x_TD, counts=Routed(tokens.gate_TK, plan), dropped_RF=dropped_RF)
            return sum_TD
        rows_RD = self.kernels.permute(tokens.x_TD, plan)
        # in `moe rehearse` tensors have no values, so the choices are unknown: assume equally many rows for each local expert
        counts_E = supposed(plan.counts_E, lambda: _even(len(rows_RD), len(plan.counts_E)))
        arrived = Arrived(all_gather(counts_E.unsqueeze(0), self.etp), rows_P)
        rows_RD = compute(rows_RD, experts, etp=self.etp, counts_E=arrived, position_R=position_R, dropout=dropout)
        sum_TD = self.kernels.combine(rows_RD, tokens.gate_TK, plan)
        return sum_TD


def _even(total: int, parts: int) -> Tensor:
    """Divide `total` into `parts` integers that differ by at most 1, int64 [parts]."""
    import torch

    return torch.tensor([total // parts + (part < total % parts) for part in range(parts)])
