"""A new dispatcher is one `Dispatcher` object and one line in the catalog. A made-up one then works in checks, planner, mesh, model,
counts, watchdog, verify and docs.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from moe.checks.together import check_run
from moe.experts.dispatch import DISPATCHERS, PLAIN, check_dispatch, dispatcher_of, examples, open_exchange, rows_for
from moe.experts.dispatch.dispatcher import Dispatcher, Exchange, Sizes
from moe.experts.dispatch.network import Dropout, compute
from moe.experts.experts import Experts
from moe.experts.layer import _run_on_scaled_inputs
from moe.kernels import choose
from moe.model.transformer import moe_layers
from moe.parallelize.build import build
from moe.plan.job.network import Experts as PlannedExperts
from moe.plan.job.network import Network, Plan
from moe.plan.job.of_recipe import network_of, plan_of
from moe.plan.machine.cluster import load_cluster
from moe.plan.memory.memory import peak
from moe.plan.memory.rows import traffic_of
from moe.plan.time.cost import step_time
from moe.recipe import sections
from moe.recipe.load import build_run, load
from moe.router.routing import Routing
from moe.verify import expected, layouts, twin
from moe.verify.cases import Case
from moe.verify.expected import compare
from moe.verify.kinds import cases
from parallel.errors import BadInput
from parallel.mesh.collectives import shift
from parallel.mesh.mesh import Degrees, Mesh
from parallel.mesh.record import Record
from parallel.mesh.traffic import Load, Message, Traffic
from parallel.process import process
from parallel.process.process import World
from tests.moe.experts.dispatch.test_dispatch import D, E, experts_of, random
from tests.support.ranks import run_on_ranks

ROOT = Path(__file__).resolve().parents[2]

# --- the made-up dispatcher -------------------------------------------------------------------------------------------


class Ring(Dispatcher):
    """Sends tokens, with the sums of their outputs, around the ring of ep ranks. Each rank adds its experts' outputs to the sums. The
    last message returns the sums to the tokens' rank."""

    name = "ring"
    about = "links in a ring"

    def check(self, *, ranks: int, held: int) -> None:
        if ranks > 2:
            raise BadInput("degrees.ep", got=ranks, needed="at most 2 with dispatch.kind=ring", fix="set degrees.ep to 2")

    def traffic(self, load: Load) -> Traffic:
        def rounds(token_bytes: int, number: int) -> Message:
            return Message("ep", "shift", number * load.tokens * token_bytes, load.ranks, calls=number)

        on = load.ranks - 1
        rows, gates, sums = rounds(load.row_bytes, on), rounds(4 * load.choices, on), rounds(4 * load.width, load.ranks)
        return Traffic((rounds(8 * load.choices, on),), (rows, gates, sums), (rows, gates, sums) if load.weighed else (rows, sums))

    def open(self, mesh: Mesh, sizes: Sizes) -> Exchange:
        return Around.over(("ep",), mesh, sizes, opened=torch.zeros(sizes.experts, sizes.width))


@dataclass(frozen=True)
class Around(Exchange):
    opened: Any = None

    def run(self, x_TD: Tensor, routing: Routing, experts: Experts, *, dropout: Dropout | None = None) -> Tensor:
        held, ranks = len(experts.held), self.axis.size
        place_TK = self.places(routing).where(routing.kept_TK, routing.probs_TE.shape[1])
        x, gate_TK, y_TD = x_TD, routing.gate_TK, torch.zeros_like(x_TD, dtype=torch.float32)
        position_T = None if dropout is None else dropout.position_T
        for number in range(ranks):
            here_TK = place_TK - self.axis.index * held
            plan = self.kernels.plan(here_TK.clamp(0, held - 1), (here_TK >= 0) & (here_TK < held), num_experts=held)
            keys = {"dropout": dropout, "position_R": None if position_T is None else position_T[plan.token_R]}
            out = compute(self.kernels.permute(x, plan), experts, etp=self.etp, counts_E=plan.counts_E, **keys)
            y_TD = shift(y_TD + self.kernels.combine(out.float(), gate_TK, plan), self.axis)
            if number + 1 < ranks:
                x, gate_TK, place_TK = (shift(values, self.axis) for values in (x, gate_TK, place_TK))
                position_T = None if position_T is None else shift(position_T, self.axis)
        return y_TD.to(x_TD.dtype)


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DISPATCHERS, Ring.name, Ring)


def with_it(run: sections.Run, **keys: object) -> sections.Run:
    """Return the recipe with the made-up dispatcher. It is set without validation, which accepts only the names in sections.py."""
    return run.model_copy(update={"dispatch": run.dispatch.model_copy(update={"kind": Ring.name} | keys)})


def test_checks_and_mesh_ask_it(listed: None) -> None:
    run = with_it(load("switch_tiny", {"degrees.ep": "2"})[0])
    assert check_run(run, 2).mesh_degrees().ep_inner == 1
    four = run.model_copy(update={"degrees": run.degrees.model_copy(update={"ep": 4})})
    with pytest.raises(BadInput, match="degrees.ep: got 4, needed at most 2 with dispatch.kind=ring"):
        check_run(four, 4)
    for keys, said in (
        ({"overlap_chunks": 2}, "2 with dispatch.kind=ring, needed 1: only all_to_all sends chunks; fix: set dispatch.kind to all_to_all"),
        ({"node_size": 2}, "2 with dispatch.kind=ring, needed null: only hierarchical sends between nodes and within nodes separately"),
    ):
        with pytest.raises(BadInput, match=said):
            check_run(with_it(run, **keys), 2)


def test_kfac_asks_whether_experts_are_computed_in_chunks(listed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    run = with_it(load("switch_tiny", {"degrees.ep": "2", "optimizer.kind": "kfac"})[0])
    check_run(run, 2)
    monkeypatch.setattr(Ring, "chunks", 3)
    with pytest.raises(BadInput, match="dispatch.overlap_chunks: got 3 with optimizer.kind=kfac"):
        check_run(run, 2)


def test_the_planner_asks_for_its_messages(listed: None) -> None:
    """The planner takes message sizes from the plugged-in dispatcher `ring`: on two ranks all tokens and their fp32 sums, for any top_k."""
    model = {
        "num_layers": 2,
        "d_model": 64,
        "d_ff": 240,
        "max_length": 16,
        "moe_every": 1,
    }  # a large d_ff, so that memory peaks within a layer
    router = {"preset": "glam", "capacity_factor": None}
    values = {"model": model, "router": router, "experts": {"num_experts": 4}, "degrees": {"ep": 2}, "train": {"global_batch": 4}}
    values |= {"dispatch": {"busiest": 1.25}}
    plain = build_run(values).resolve(2)
    found = {}
    for name, run in ((PLAIN, plain), (Ring.name, with_it(plain))):
        network, plan = network_of(run), plan_of(run)
        exchange = dispatcher_of(run.dispatch)
        assert network.experts is not None and network.experts.exchange == exchange
        load = Load(2 * 16, 2, 2 * 16 * 2, None, 64, 64 * plan.compute_bytes, 4, 2, busiest=1.25)
        assert peak(network, plan).parts["dispatch buffers"] == max(message.held for message in exchange.traffic(load).forward)
        found[name] = step_time(network, plan, load_cluster("h100-8").holding(2)).experts
    assert 0 < found[PLAIN] != found[Ring.name] > 0


def _counted_on_rank(rank: int, name: str, on_inputs: bool) -> list[Any]:
    mesh = process.connect(Degrees(dp=4, ep=4, ep_inner=2), World(rank, 4))
    mesh.communicator.record = record = Record(rank)
    sizes, tokens = Sizes(D, E, 2, choose("auto")), 12
    exchange = open_exchange(sections.Dispatch.model_construct(**sections.Dispatch().model_dump() | examples()[name]), mesh, sizes)
    layer = exchange.layer("layers.3", (5, 0, 7, 2, 6, 1, 3, 4))
    expert_TK = torch.arange(2 * tokens).view(tokens, 2) % E
    ones_TE = torch.ones(tokens, E)
    routing = Routing(expert_TK, torch.ones(tokens, 2, requires_grad=True), expert_TK >= 0, ones_TE, ones_TE, 5, 1)
    given = random(tokens, D).requires_grad_(), routing, experts_of(mesh, (5, 0, 7, 2, 6, 1, 3, 4))
    y_TD = _run_on_scaled_inputs(layer, *given, None) if on_inputs else layer.run(*given)
    y_TD.sum().backward()
    counts = {key: (count.calls, count.sent) for key, count in mesh.communicator.counts().items()}
    lines = {last[2] for lane in record.lanes.values() for last in lane.last}
    return [counts, lines, record.token()]


@pytest.mark.parametrize("on_inputs", [False, True])
@pytest.mark.parametrize("name", [*examples(), Ring.name])
def test_it_sends_what_it_states_and_the_watchdog_knows_where(name: str, on_inputs: bool, listed: None) -> None:
    """Counted calls and bytes of every collective equal `traffic`. All ranks record the same collectives, labelled by layer and pass.
    Each token's two choices are on two ranks of two nodes. With gates on inputs the planner states as many messages as are sent."""
    section = sections.Dispatch.model_construct(**sections.Dispatch().model_dump() | examples()[name])
    exchange = dispatcher_of(section)
    traffic = exchange.traffic(Load(12, 2, 24, E * 5, D, 4 * D, E, 4, reached=lambda _: 2))
    if on_inputs:
        planned = PlannedExperts(E, 2, 1, apart=True, exchange=exchange, slots=E * 5 / 24)
        network = Network(layers=1, width=D, heads=1, hidden=1, vocab=1, length=12, experts=planned, sparse_layers=(0,))
        traffic = traffic_of(network, Plan(dp=4, ep=4), 12, 24, 4)
    stated: Counter[tuple[str, str, str]] = Counter()
    for message in traffic.every:
        stated[message.axis, message.name, "calls"] += message.calls
        stated[message.axis, message.name, "sent"] += message.sent
    ranks = run_on_ranks(_counted_on_rank, 4, name, on_inputs, timeout_s=60)
    for counts, labels, _ in ranks:
        found = {(*key, of): n for key, both in counts.items() for of, n in zip(("calls", "sent"), both, strict=True)}
        assert found == dict(stated)
        assert labels == {"layers.3", "layers.3 backward"}
    assert sum(token for *_, token in ranks) % 2**40 == 0


def test_it_is_opened_once_for_a_model(listed: None) -> None:
    run = with_it(load("switch_tiny", {"degrees.ep": "2"})[0].resolve(2))
    model, _ = build(
        run.model_copy(update={"precision": sections.Precision(compute="fp32")}), Mesh.of(Degrees(dp=2, ep=2)), device=torch.device("cpu")
    )
    first, second = (layer.dispatcher for layer in moe_layers(model))
    assert isinstance(first, Around) and isinstance(second, Around) and first.opened is second.opened
    assert first.opened.shape == (8, run.model.d_model) and (first.axis.label, second.axis.label) == ("layers.1", "layers.3")
    moved = second.layer("layers.3", (1, 0, 2, 3, 4, 5, 6, 7))
    assert moved.placement == (1, 0, 2, 3, 4, 5, 6, 7) and moved.opened is first.opened


def test_verify_has_its_row_and_two_ranks_equal_the_plain_twin(listed: None, monkeypatch: pytest.MonkeyPatch, two_steps: None) -> None:
    real = Case.run

    def run(case: Case) -> sections.Run:
        return with_it(real(replace(case, rows=PLAIN))) if case.rows == Ring.name else real(case)

    monkeypatch.setattr(Case, "run", run)
    assert Ring.name in rows_for(2) and rows_for(1) == [PLAIN]
    rows = [case for case in cases(2, kinds=("expert",)) if case.rows == Ring.name and case.etp == 1 and case.recompute == "full"]
    ((case, ran),) = layouts.run_world([case for case in rows if case.model == "gshard"], 2)  # with dropout in its experts
    assert not isinstance(ran, str), ran
    assert max(compare(ran[0], twin.reference(expected.twin_of(case))).values()) < 1e-5


# --- the project's own dispatchers ------------------------------------------------------------------------------------


def test_recipe_and_docs_have_every_dispatcher() -> None:
    names, _ = get_args(sections.Dispatch.model_fields["kind"].annotation)
    assert get_args(names) == ("auto", *DISPATCHERS)
    page = (ROOT / "docs/moe/dispatch.md").read_text(encoding="utf-8")
    about = {name: said for name, said in re.findall(r"^\| `(\w+)` \|.*\| ([^|]+) \|$", page, flags=re.M) if not said[0].isdigit()}
    assert about == {name: kind.about for name, kind in DISPATCHERS.items()}


def test_sizes_that_a_dispatcher_cannot_have_are_refused_in_its_words() -> None:
    for section, ranks, held, said in (
        ({"overlap_chunks": 3}, 2, 4, "a divisor of 4, the experts that a rank holds"),
        ({"kind": "hierarchical"}, 4, 2, "how many ranks of the ep axis share a node"),
        ({"kind": "hierarchical", "node_size": 3}, 4, 2, "a divisor of degrees.ep=4"),
        ({"kind": "mine:rows", "node_size": 3}, 4, 2, "null: only hierarchical sends between nodes and within nodes separately"),
    ):
        with pytest.raises(BadInput, match=said):
            check_dispatch(sections.Dispatch(**section), ranks=ranks, held=held)


MAY_NAME = {
    "moe/recipe/sections/experts.py": "the names of a recipe",
    "moe/recipe/other_names.py": "flags of other systems, with their keys here",
    "moe/verify/cases.py": "padded batches",
    "moe/verify/verify.py": "padded batches",
    "moe/plan/machine/program.py": "what other systems do",
}


def test_no_other_file_names_a_dispatcher() -> None:
    """Quoted names of dispatchers occur only in the files of MAY_NAME. all_to_all and the like, which also name collectives, count only
    on lines with the word `dispatch`."""
    named = re.compile(r"""["'](padded|hierarchical)["']|dispatch\b.*["'](all_to_all|all_gather|overlapped)["']""")
    found = {
        path.relative_to(ROOT).as_posix()
        for folder in ("moe", "parallel")
        for path in (ROOT / folder).rglob("*.py")
        if named.search(path.read_text(encoding="utf-8"))
    }
    assert {path for path in found if not path.startswith("moe/experts/dispatch/")} == set(MAY_NAME)
