"""A token is sent once to each node and once to each rank, counted in bytes; results and gradients equal a loop over experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moe.experts.dispatch import dispatcher_of, open_exchange
from moe.experts.dispatch.dispatcher import Sizes
from moe.experts.experts import Experts
from moe.kernels import choose, cpu
from moe.plan.job.network import Experts as PlannedExperts
from moe.plan.memory.rows import once_each
from moe.recipe import sections
from moe.router.methods.group_limited import group_limited
from moe.router.routing import Routing
from parallel.mesh.mesh import Degrees, Mesh
from parallel.mesh.traffic import Load, distinct
from parallel.process import process
from parallel.process.process import World
from tests.moe.experts.dispatch.test_dispatch import close, random
from tests.support.ranks import run_on_ranks

# T tokens, D model, F hidden, E experts, K choices
D, HIDDEN, E, NODE = 6, 10, 16, 2
KINDS = ("uneven", "drops", "one expert", "two of four groups")
CASES = [(kind, k, dtype) for kind in KINDS for k, dtype in ((1, torch.float32), (8, torch.float32), (8, torch.bfloat16))]


def routing_of(kind: str, rank: int, k: int) -> Routing:
    """Return a rank's routing of 3 + 2 * rank tokens, none on rank 1 for `one expert`. `two of four groups`: of 4 experts each."""
    tokens = 0 if kind == "one expert" and rank == 1 else 3 + 2 * rank
    scores_TE = random(tokens, E, seed=rank)
    if kind == "one expert":
        scores_TE[:, 5] += 100
        k = 1
    expert_TK = scores_TE.topk(k).indices
    if kind == "two of four groups":
        expert_TK = group_limited(scores_TE, k, expert_groups=4, top_groups=2, best=2, kernels=cpu)
    kept_TK = random(tokens, k, seed=rank + 20) < (0.3 if kind == "drops" else 100)
    gate_TK = random(tokens, k, seed=rank + 9).sigmoid().requires_grad_()
    return Routing(expert_TK, gate_TK, kept_TK, scores_TE.softmax(-1), scores_TE, None, 1)


def weights() -> list[Tensor]:
    return [random(E, D, HIDDEN, seed=1) / 3, random(E, HIDDEN, D, seed=2) / 4, random(E, D, HIDDEN, seed=3) / 3]


def held_by(mesh: Mesh) -> tuple[range, slice]:
    """Return the experts and the hidden units that a rank holds."""
    ep, etp = mesh.axis("ep"), mesh.axis("etp")
    each, units = E // ep.size, HIDDEN // etp.size
    return range(ep.index * each, (ep.index + 1) * each), slice(etp.index * units, (etp.index + 1) * units)


def shards(mesh: Mesh) -> list[tuple[slice, ...]]:
    """Return the rank's part of w1, w2 and w3."""
    held, units = held_by(mesh)
    mine = slice(held.start, held.stop)
    return [(mine, slice(None), units), (mine, units), (mine, slice(None), units)]


def on_rank(rank: int, ep: int, etp: int) -> list[Any]:
    """Return, for each case: [output, gradients of tokens, gates, w1, w2, w3 by hierarchical], bytes sent, and both by all_to_all."""
    mesh = process.connect(Degrees(dp=ep * etp, ep=ep, etp=etp, ep_inner=NODE), World(rank, ep * etp))
    kinds: tuple[dict[str, Any], ...] = ({"kind": "hierarchical", "node_size": NODE}, {})
    exchanges = [open_exchange(sections.Dispatch(**keys), mesh, Sizes(D, E, 8, choose())) for keys in kinds]
    experts, (held, units) = Experts(E, d_model=D, d_ff=HIDDEN, ffn="swiglu"), held_by(mesh)
    experts.hold(held, hidden=units)
    for parameter, whole, shard in zip((experts.w1, experts.w2, experts.w3), weights(), shards(mesh), strict=True):
        assert parameter is not None
        parameter.data.copy_(whole[shard])
    found = []
    for kind, k, dtype in CASES:
        outs: list[Any] = []
        for exchange in exchanges:
            mesh.communicator.reset_counts()
            routing = routing_of(kind, rank, k)
            x_TD = random(len(routing.expert_TK), D, seed=50 + rank).to(dtype).requires_grad_()
            y_TD = exchange.run(x_TD, routing, experts)
            leaves = [x_TD, routing.gate_TK, experts.w1, experts.w2, experts.w3]
            outs.append([y_TD.detach(), *torch.autograd.grad((y_TD.float() * x_TD.detach().float().cos()).sum(), leaves)])
            outs.append({axis: count.sent for (axis, name), count in mesh.communicator.counts().items() if name == "all_to_all"})
        found.append(outs)
    return found


def plain(kind: str, k: int, dtype: torch.dtype, ranks: int) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Return ([output, gradients of tokens and gates] of each rank, gradients of w1, w2, w3) of one loop over all experts, in fp64."""
    w1, w2, w3 = leaves = [w.to(dtype).double().requires_grad_() for w in weights()]
    found, total = [], torch.zeros((), dtype=torch.float64)
    for rank in range(ranks):
        routing = routing_of(kind, rank, k)
        x_TD = random(len(routing.expert_TK), D, seed=50 + rank).to(dtype).double().requires_grad_()
        y_TD = torch.zeros_like(x_TD)
        for e in range(E):
            gate_T = (routing.gate_TK * (routing.expert_TK == e) * routing.kept_TK).sum(1)
            y_TD = y_TD + gate_T.unsqueeze(1) * ((F.silu(x_TD @ w1[e]) * (x_TD @ w3[e])) @ w2[e])
        own = (y_TD * x_TD.detach().cos()).sum()
        total = total + own
        grads = torch.autograd.grad(own, [x_TD, routing.gate_TK], retain_graph=True)
        found.append([y_TD.detach().to(dtype), grads[0].to(dtype), grads[1]])
    return found, [g.float() for g in torch.autograd.grad(total, leaves)]


def bytes_between(kind: str, k: int, size: int, rank: int, ranks: int) -> dict[str, int]:
    """Return the bytes that a rank sends over each axis: sets of a token's kept experts, counted one by one."""
    routings = [routing_of(kind, r, k) for r in range(ranks)]
    reached: list[list[set[int]]] = []  # of each rank's tokens: the ranks that hold its kept experts
    for r in routings:
        pairs = zip(r.expert_TK.tolist(), r.kept_TK.tolist(), strict=True)
        reached.append([{e * ranks // E for e, kept in zip(experts, keeps, strict=True) if kept} for experts, keeps in pairs])
    k, node, place = routings[0].gate_TK.shape[1], rank // NODE, rank % NODE
    if kind == "two of four groups":
        assert all(len({e // 4 for e in row}) <= 2 for r in routings for row in r.expert_TK.tolist())
        assert all(len({to // NODE for to in token}) <= min(2, ranks // NODE) for tokens in reached for token in tokens)

    def sent(out: int, back: int) -> int:
        """Bytes of `out` copies that this rank sends and of `back` copies that it got: tokens, gates, places; sums; and their gradients."""
        return out * (D * size + 8 * k + D * size) + back * (D * size + D * size + 4 * k)

    out = sum(len({to // NODE for to in token} - {node}) for token in reached[rank])
    back = sum(any(to // NODE == node for to in token) for r in range(ranks) for token in reached[r] if r % NODE == place and r != rank)
    arrived = [token for r in range(place, ranks, NODE) for token in reached[r]]
    others = [token for r in range(ranks) if r % NODE != place for token in reached[r]]
    inside = sum(len({to for to in token if to // NODE == node} - {rank}) for token in arrived)
    return {"ep_outer": sent(out, back), "ep_inner": sent(inside, sum(rank in token for token in others))}


@pytest.mark.parametrize(("nodes", "etp"), [(4, 1), (2, 2)])
def test_results_equal_a_loop_and_bytes_are_a_copy_for_each_node_and_rank(nodes: int, etp: int) -> None:
    """Rounded sums of at most 8 terms in another order: within 2e-6 of the largest value in fp32, four roundings (2^-6) in bf16.
    With expert tensor parallelism, ranks of etp send tokens of their own, so bytes are counted without it.
    """
    ep = nodes * NODE
    ranks = ep * etp
    found = run_on_ranks(on_rank, ranks, ep, etp, timeout_s=60)
    meshes = [Mesh.of(Degrees(dp=ranks, ep=ep, etp=etp), rank) for rank in range(ranks)]
    for number, (kind, k, dtype) in enumerate(CASES):
        wanted, sums = plain(kind, k, dtype, ranks)
        gathered = [torch.zeros_like(want) for want in sums]
        for rank in range(ranks):
            ours, sent, other, plainly = found[rank][number]
            for what, got, want in zip(("y", "x", "gates"), ours, wanted[rank], strict=False):
                close(got, want, f"{kind} {k} {dtype} rank {rank} {what}", dtype)
            for got, same in zip(ours, other, strict=True):
                close(got, same, f"{kind} {k} {dtype} rank {rank} as all_to_all", dtype)
            for whole, shard, part in zip(gathered, shards(meshes[rank]), ours[3:], strict=True):
                whole[shard] += part
            assert plainly.keys() == {"ep"}
            assert etp > 1 or sent == bytes_between(kind, k, dtype.itemsize, rank, ranks)
        for i, (got, want) in enumerate(zip(gathered, sums, strict=True)):
            close(got, want, f"{kind} {k} {dtype} w{i}", dtype)


def stated(reached: Callable[[int], float], axis: str, **section: Any) -> int:
    """Return the bytes that the forward pass of such a layer sends over an axis: 4,096 tokens a rank, top-8 of 256 experts, 64 ranks."""
    load = Load(4096, 8, 4096 * 8, None, 7168, 2 * 7168, 256, 64, reached=reached)
    return sum(m.sent for m in dispatcher_of(sections.Dispatch(**section)).traffic(load).forward if m.axis == axis)


def test_a_layer_like_that_of_deepseek_v3_sends_half_between_nodes() -> None:
    """A row for each of 8 choices: 411 MB leave the node in each direction; of 63 ranks, 56 are elsewhere. A copy for each of 4 nodes:
    206 MB, and 1 MB of gates and places.
    """
    rows = 4096 * 7168 * 2 * 7 // 8
    assert stated(lambda _: 8, "ep") * 56 // 63 == 2 * 8 * rows
    assert stated(lambda _: 4, "ep_outer", kind="hierarchical", node_size=8) == 2 * 4 * rows + 4 * 4096 * 64 * 7 // 8
    assert (8 * rows, 4 * rows, int(rows * distinct(8, 8))) == (411_041_792, 205_520_896, 269_804_167)  # last: 8 random choices


@pytest.mark.parametrize(("groups", "targets"), [((1, 1), 8), ((4, 8), 8), ((4, 8), 64), ((2, 8), 4)])
def test_the_planner_expects_the_copies_of_random_choices(groups: tuple[int, int], targets: int) -> None:
    few, every = groups
    scores_TE = random(4000, 256, seed=4)
    expert_TK = group_limited(scores_TE, 8, expert_groups=every, top_groups=few, best=2, kernels=cpu)
    counted = sum(len(set(row)) for row in (expert_TK * targets // 256).tolist()) / 4000
    planned = PlannedExperts(256, 8, 1, open_groups=groups)
    expected = planned.reached(targets)
    assert once_each(planned, 64, targets)[1] * 8 == pytest.approx(expected)  # of the planner's seconds for a program `by_node`
    assert expected <= max(few, targets * few / every)
    assert abs(expected / counted - 1) < (0.03 if targets >= every else 0.07)  # groups are drawn without replacement
