"""Every dispatcher gives the output and all gradients of Local, for several routings, numbers of choices and layouts of ranks.

Inputs and weights are functions of seeds, so each forked gloo rank makes its own. Expected values are computed in the parent process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor

from moe.experts.dispatch import open_exchange
from moe.experts.dispatch.all_gather import Gathered
from moe.experts.dispatch.dispatcher import Exchange, Local, Sizes
from moe.experts.dispatch.hierarchical import OncePerNode
from moe.experts.dispatch.network import Dropout
from moe.experts.dispatch.padded import Slots
from moe.experts.dispatch.steps import Steps
from moe.experts.experts import HIDDEN_DIM, Experts
from moe.kernels import choose, reference
from moe.nn.context import Context
from moe.recipe import sections
from moe.router.capacity import kept_choices
from moe.router.routing import Routing
from parallel.mesh import collectives
from parallel.mesh.mesh import Degrees, Mesh
from parallel.process import process
from parallel.process.process import World
from tests.support.ranks import each_case, run_on_ranks

# T tokens, D model, F hidden, E experts, K choices, R rows
D, F, E = 6, 20, 8

SETTINGS: dict[str, dict[str, Any]] = {
    "all_to_all": {},
    "padded": {"kind": "padded"},
    "all_gather": {"kind": "all_gather"},
    "hierarchical": {"kind": "hierarchical", "node_size": 2},
    "chunked": {"overlap_chunks": 2},
}
PLACEMENT = (5, 0, 7, 2, 6, 1, 3, 4)


def opened(mesh: Mesh, placement: tuple[int, ...] | None = None, label: str = "", **settings: Any) -> Exchange:
    """Open one layer's exchange, for the dispatcher that `settings` (keys of the recipe's section `dispatch`) name."""
    return open_exchange(sections.Dispatch(**settings), mesh, Sizes(D, E, 2, choose("auto"))).layer(label, placement)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def routing_of(kind: str, rank: int, k: int) -> Routing:
    """Return one rank's routing of 5 + 3 * rank tokens, `k` choices each; gates require gradients. `kind`: one of KINDS."""
    tokens = 0 if kind == "a rank without tokens" and rank == 0 else 5 + 3 * rank
    k += rank if kind == "another number of choices on each rank" else 0  # if experts choose tokens, ranks have different K
    scores_TE = random(tokens, E, seed=rank)
    if kind == "all to one expert":
        scores_TE[:, 2] += 100
    expert_TK = scores_TE.topk(k).indices
    kept_TK = torch.rand(tokens, k, generator=torch.Generator().manual_seed(rank)) < (0.6 if kind == "drops" else 2.0)
    if kind == "nothing is kept":
        kept_TK[:] = False
    capacity = {"a capacity that drops": 1, "a capacity for all": 7}.get(kind)
    if capacity == 1:
        kept_TK = kept_choices(expert_TK, kept_TK, num_groups=1, num_experts=E, slots_each=2, kernels=reference)
        assert rank == 0 or not kept_TK.all()
    gate_TK = torch.rand(tokens, k, generator=torch.Generator().manual_seed(rank + 9)).requires_grad_()
    return Routing(expert_TK, gate_TK, kept_TK, scores_TE.softmax(-1), scores_TE, capacity, 1 if capacity is None else 2)


BOUNDED = ("a capacity that drops", "a capacity for all")
FREE = ("uneven", "drops", "a rank without tokens", "all to one expert", "nothing is kept", "another number of choices on each rank")
KINDS = (*BOUNDED, *FREE)
CASES = [(kind, k) for kind in KINDS for k in (1, 2)]


def weights() -> dict[str, Tensor]:
    return {"w1": random(E, D, F, seed=1) / 3, "w2": random(E, F, D, seed=2) / 4, "w3": random(E, D, F, seed=3) / 3}


def close(got: Tensor, want: Tensor, what: str, dtype: torch.dtype) -> None:
    """Assert that no element differs by more than a few roundings of the largest value; bf16 has 8 significant bits."""
    assert got.shape == want.shape and got.dtype == want.dtype, what
    limit = (2**-6 if dtype == torch.bfloat16 else 2e-6) * float(want.abs().max()) if want.numel() else 0.0
    assert not want.numel() or float((got.float() - want.float()).abs().max()) <= limit, what


def experts_of(mesh: Mesh, placement: tuple[int, ...] | None) -> Experts:
    """Return the experts that this rank holds, each whole or (etp) with this rank's hidden units."""
    ep, etp = mesh.axis("ep"), mesh.axis("etp")
    experts = Experts(E, d_model=D, d_ff=F, ffn="swiglu")
    each, units = E // ep.size, F // etp.size
    experts.hold((placement or range(E))[ep.index * each : (ep.index + 1) * each], hidden=slice(etp.index * units, (etp.index + 1) * units))
    for name, whole in weights().items():
        units = whole[:, experts.hidden] if name == "w2" else whole[..., experts.hidden]
        getattr(experts, name).data.copy_(units[list(experts.held)])
    return experts


def dropout_of(rank: int, tokens: int) -> Dropout:
    def scale(position_R: Tensor) -> Tensor:
        return replace(Context.of(position_R[None]), position_T=position_R).dropout_scale("here", F, 0.4)

    return Dropout(torch.arange(tokens) + 100 * rank, scale)


def run_once(dispatcher: Exchange, experts: Experts, rank: int, kind: str, k: int, dtype: torch.dtype, dropout: bool) -> list[Tensor]:
    """Return [output, gradients of input and gates, gradients of w1, w2, w3] of one layer, for a fixed gradient of the output."""
    routing = routing_of(kind, rank, k)
    x_TD = random(len(routing.expert_TK), D, seed=50 + rank).to(dtype).requires_grad_()
    called: list[None] = []
    dispatcher = replace(dispatcher, meanwhile=lambda: called.append(None))
    y_TD = dispatcher.run(x_TD, routing, experts, dropout=dropout_of(rank, len(x_TD)) if dropout else None)
    assert len(called) == (not isinstance(dispatcher, Local))
    leaves = [x_TD, routing.gate_TK, *experts.parameters()]
    assert y_TD.dtype == dtype and y_TD.shape == x_TD.shape
    return [y_TD.detach(), *torch.autograd.grad((y_TD.float() * x_TD.detach().float().cos()).sum(), leaves)]


@cache
def wanted(world: int, dtype: torch.dtype, dropout: bool) -> dict[tuple[str, int], tuple[list[list[Tensor]], list[Tensor]]]:
    """Return what Local computes on one process, for each case: (outputs and gradients of inputs and gates by rank, gradients of w1, w2, w3
    summed over ranks).
    """
    found = {}
    mesh = Mesh.of(Degrees())
    for kind, k in CASES:
        each = [run_once(Local(), experts_of(mesh, None), rank, kind, k, dtype, dropout) for rank in range(world)]
        found[kind, k] = [e[:3] for e in each], [sum(grads) for grads in zip(*(e[3:] for e in each), strict=True)]
    return found


@dataclass(frozen=True)
class Layout:
    """A dispatcher on `dp` ranks. placed: experts are placed in another order, and have dropout."""

    name: str
    dp: int = 2
    ep: int = 1
    etp: int = 1
    bf16: bool = False
    placed: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.bf16 else torch.float32

    @property
    def placement(self) -> tuple[int, ...] | None:
        return PLACEMENT if self.placed else None

    def degrees(self, **inner: int) -> Degrees:
        return Degrees(dp=self.dp, ep=self.ep, etp=self.etp, **inner)


LAYOUTS = [
    *(Layout(name, dp, ep, etp) for dp, ep, etp in ((2, 2, 1), (4, 4, 1), (4, 2, 2)) for name in SETTINGS),
    Layout("all_to_all", 4, 2),
    Layout("all_to_all", 2, etp=2),
    *(Layout(name, 2, 2, bf16=True) for name in SETTINGS),
    *(Layout(name, dp, 2, dp // 2, placed=True) for dp in (2, 4) for name in SETTINGS),
]


def on_rank(rank: int, layout: Layout) -> Any:
    settings = SETTINGS[layout.name]
    inner = {"ep_inner": settings["node_size"]} if "node_size" in settings else {}
    mesh = process.connect(layout.degrees(**inner), World(rank, layout.dp))
    dispatcher, experts = opened(mesh, layout.placement, **settings), experts_of(mesh, layout.placement)
    return [run_once(dispatcher, experts, rank, kind, k, layout.dtype, layout.placed) for kind, k in CASES]


@cache
def on_ranks(dp: int) -> dict[Layout, list[Any]]:
    """Return the results of each rank, for all layouts of `dp` ranks, which are run on the same ranks."""
    layouts = [layout for layout in LAYOUTS if layout.dp == dp]
    return dict(zip(layouts, each_case(on_rank, dp, [(layout,) for layout in layouts]), strict=True))


def test_gathering_adds_partial_sums_in_fp32() -> None:
    """In bf16, a token's sum of two results is rounded once, whether both are sent back or each rank sends its part: the bits are equal."""
    gathered, sent = (on_ranks(2)[Layout(name, 2, 2, bf16=True)] for name in ("all_gather", "all_to_all"))
    at = CASES.index(("uneven", 2))
    assert all(torch.equal(gathered[rank][at][0], sent[rank][at][0]) for rank in range(2))


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_every_dispatcher_equals_local(layout: Layout) -> None:
    """Also in bf16; and if experts are placed in another order and have dropout, whose mask depends only on token and hidden unit."""
    ranks, mesh = on_ranks(layout.dp)[layout], [Mesh.of(layout.degrees(), rank) for rank in range(layout.dp)]
    for number, case in enumerate(CASES):
        each, sums = wanted(layout.dp, layout.dtype, layout.placed)[case]
        for rank in range(layout.dp):
            for what, got, want in zip(("y", "x", "gates"), ranks[rank][number], each[rank], strict=False):
                close(got, want, f"{case} rank {rank} {what}", layout.dtype)
        for i, (matrix, want) in enumerate(zip(("w1", "w2", "w3"), sums, strict=True)):
            got = torch.zeros_like(want)
            for rank in range(layout.dp):  # ranks of edp hold the same experts, and each has the gradient of its own tokens
                held = (layout.placement or tuple(range(E)))[mesh[rank].axis("ep").index * E // layout.ep :][: E // layout.ep]
                units, at = F // layout.etp, mesh[rank].axis("etp").index
                part = got.narrow(HIDDEN_DIM[matrix], at * units, units)
                part.index_add_(0, torch.tensor(held), ranks[rank][number][3 + i])
            close(got, want, f"{case} {matrix}", layout.dtype)


def _bits_on_rank(rank: int, kind: str) -> list[list[Tensor]]:
    mesh = process.connect(Degrees(dp=4, ep=4, ep_inner=2), World(rank, 4))
    exchanges = [opened(mesh, **SETTINGS[name]) for name in ("all_to_all", "padded")]
    return [run_once(exchange, experts_of(mesh, None), rank, kind, 2, torch.float32, False) for exchange in exchanges]


def test_rows_reach_an_expert_in_the_same_order_by_all_to_all_and_padded() -> None:
    """Rows arrive sorted by source rank, then token, so results are bitwise equal. Overlapped chunks are left out: they multiply the same
    rows in other blocks (moe/kernels/grouped.py), which round differently.
    """
    for first, *others in chain(*each_case(_bits_on_rank, 4, [("drops",), *((kind,) for kind in BOUNDED)])):
        for other in others:
            assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def _padded_on_rank(rank: int) -> list[Any]:
    mesh = process.connect(Degrees(dp=2, ep=2), World(rank, 2))
    routing = routing_of("all to one expert", 0, 1)
    routing = Routing(routing.expert_TK, routing.gate_TK, routing.kept_TK, routing.probs_TE, routing.logits_TE, 7, 2)
    seen: list[int] = []
    experts = experts_of(mesh, None)
    real = experts.forward

    def forward(rows_RD: Tensor, **rest: Any) -> Tensor:
        seen.append(len(rows_RD))
        return real(rows_RD, **rest)

    experts.forward = forward  # type: ignore[method-assign]
    opened(mesh, kind="padded").run(random(5, D), routing, experts)
    found = {name: c.bytes for (_, name), c in mesh.communicator.counts().items()}
    return [seen, found]


def test_blocks_are_the_capacity_and_empty_slots_are_no_rows_of_a_product() -> None:
    """With capacity 7 in 2 groups, each rank sends 14 slots for each expert. All 10 tokens choose expert 2: its rank multiplies 10 rows."""
    for rank, (seen, found) in enumerate(run_on_ranks(_padded_on_rank, 2, timeout_s=60)):
        assert seen == [10 if rank == 0 else 0]
        assert found == {"counts": E * 8, "all_to_all": 2 * E * 14 * D * 4}


class Events:
    """Records events in order: the start of an exchange, the wait for its rows, and a chunk's computation, forward or backward."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        begin, wait = collectives._start_exchange, collectives.StartedRows.wait

        def noted_begin(*args: Any, **splits: Any) -> Any:
            self.events.append("start")
            return begin(*args, **splits)

        def noted_wait(started: Any) -> None:
            self.events.append("wait")
            wait(started)

        patch.setattr(collectives, "_start_exchange", noted_begin)
        patch.setattr(collectives.StartedRows, "wait", noted_wait)

    def network(self, experts: Experts, rows_RD: Tensor, out_RD: Tensor) -> None:
        self.events.append("compute")
        out_RD.register_hook(lambda grad: self.events.append("compute backward"))


def in_flight(events: list[str], what: str) -> Iterator[int]:
    """Yield the number of started exchanges that have not been waited for, at each event `what`."""
    flying = 0
    for event in events:
        flying += (event == "start") - (event == "wait")
        if event == what:
            yield flying


def _overlap_on_rank(rank: int) -> list[Any]:
    mesh = process.connect(Degrees(dp=2, ep=2), World(rank, 2))
    with pytest.MonkeyPatch.context() as patch:
        events = Events(patch)
        experts = experts_of(mesh, None)
        experts.register_forward_hook(events.network)
        run_once(opened(mesh, overlap_chunks=4), experts, rank, "uneven", 2, torch.float32, False)
    return [list(in_flight(events.events, "compute")), list(in_flight(events.events, "compute backward")), events.events.count("start")]


def test_exchanges_overlap_the_computation_of_chunks_in_both_passes() -> None:
    for forward, backward, exchanges in run_on_ranks(_overlap_on_rank, 2, timeout_s=60):
        assert forward == [1, 2, 3, 3]  # rows of the next chunk, and results of earlier chunks
        assert len(backward) == 4 and min(backward) >= 1 and backward[0] == 3
        assert exchanges == 16


def _gradients_on_rank(rank: int) -> list[Any]:
    mesh = process.connect(Degrees(dp=2, ep=2), World(rank, 2))
    experts = experts_of(mesh, None)
    parts = experts.chunks(4)
    sum((w.w1.square().sum() + w.w2.sum()) * (i + 1) for i, w in enumerate(parts)).backward()  # type: ignore[union-attr]
    assert experts.w1.grad is not None
    nodes = {w.w1.grad_fn for w in parts}
    return [len(nodes), torch.equal(experts.w1.grad, 2 * experts.w1.detach() * torch.arange(1, 5).view(4, 1, 1))]


def test_the_gradients_of_all_chunks_are_written_into_one_tensor() -> None:
    """All chunks of a weight have the same autograd node, which writes their gradients into one tensor."""
    assert run_on_ranks(_gradients_on_rank, 2, timeout_s=60) == [[1, True]] * 2


def test_the_settings_and_the_mesh_choose_the_dispatcher() -> None:
    one, four = Mesh.of(Degrees()), Mesh.of(Degrees(dp=4, ep=4, ep_inner=2))
    kinds = {"all_to_all": Steps, "padded": Slots, "all_gather": Gathered, "hierarchical": OncePerNode, "chunked": Steps}
    for name, settings in SETTINGS.items():
        assert type(opened(one, **settings)) is Local
        found = opened(four, **settings)
        assert type(found) is kinds[name] and len(found.axes) == 1 + (name == "hierarchical")
        assert getattr(found, "chunks", 1) == 1 + (name == "chunked")
    assert type(opened(Mesh.of(Degrees(dp=2, etp=2)), kind="padded")) is Steps
