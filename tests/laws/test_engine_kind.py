"""A new data-parallel engine needs only its class, an EngineKind and a row in the catalog: with these three, a made-up engine works in
checks, planner, training, verify and docs. Names of engines occur only in parallel/data/ and in the files of MAY_NAME.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from moe.checks.together import check_run
from moe.plan.choose.candidates import Space, candidates
from moe.plan.choose.legal import refusal
from moe.plan.choose.predicted import change_that_fits
from moe.plan.choose.recipe_of import recipe_of
from moe.plan.job.network import Plan
from moe.plan.job.of_recipe import network_of, plan_of
from moe.plan.machine.cluster import load_cluster
from moe.plan.memory.memory import peak
from moe.plan.time.cost import step_time
from moe.recipe.load import build_run
from moe.recipe.sections import Run
from moe.rehearse import carried
from moe.verify import cases, expected, kinds, layouts, twin
from moe.verify.cases import Case
from moe.verify.expected import compare
from parallel.data.engine import Rule
from parallel.data.kinds import ENGINES, planned
from parallel.data.kinds.kind import EngineKind, Setup
from parallel.data.stepped import Stepped
from parallel.errors import BadInput
from parallel.mesh.gradients import sum_gradients
from tests.laws import combinations
from tests.support.verdict import verdict

ROOT = Path(__file__).resolve().parents[2]

# --- the made-up engine -----------------------------------------------------------------------------------------------


class Plain(Stepped):
    """DDP without buckets: each gradient is summed by itself, after the last backward pass."""

    def __init__(self, model: nn.Module, setup: Setup, optimizer: Rule) -> None:
        super().__init__(model, layouts=setup.layouts, mesh=setup.mesh)
        self.rule, self.parameters = optimizer, dict(model.named_parameters())
        self.optimizer = optimizer.build(optimizer.groups(self.parameters.items()))

    def reduce(self) -> None:
        for name, grad in self.gradients():
            sum_gradients({name: grad}, self.layouts, self.mesh)


PLAIN = EngineKind("plain", Plain, {"kind": "plain"}, overlaps=False)


@pytest.fixture(autouse=True)
def listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the made-up engine to the catalog, and to the recipes of its verify cases without validation, which accepts only `Named`."""
    real, sharding_of = Case.run, cases.sharding_of
    monkeypatch.setitem(ENGINES, PLAIN.name, PLAIN)
    monkeypatch.setattr(cases, "sharding_of", lambda kind: {"kind": "ddp"} if kind == PLAIN.name else sharding_of(kind))
    monkeypatch.setattr(Case, "run", lambda case: by(real(case)) if case.kind == PLAIN.name else real(case))


def by(run: Run, kind: str = PLAIN.name, **sharding: Any) -> Run:
    return run.model_copy(update={"sharding": run.sharding.model_copy(update={"kind": kind} | sharding)})


def run_of(**changes: dict[str, Any]) -> Run:
    model = {"num_layers": 4, "d_model": 24, "num_heads": 4, "d_ff": 48, "max_length": 16, "tied_embeddings": False}
    values = {"model": model, "optimizer": {"clip_norm": None}, "train": {"global_batch": 24, "eval_sequences": 24}} | changes
    return build_run(values).resolve(4)


def test_checks_and_rehearsal_ask_it() -> None:
    run = by(run_of(optimizer={"kind": "muon"}))
    assert verdict(run, 4).status == "runs" and carried(run) == (run, "")
    staged = by(run_of(degrees={"pp": 2}, pipeline={"schedule": "pipedream"}))
    with pytest.raises(
        BadInput, match=r"sharding.kind: got plain with pipedream.* needed ddp: the other engines update all stages together"
    ):
        check_run(staged, 4)
    assert refusal(network_of(staged), plan_of(staged)) == "pipedream updates stages at different times, which only ddp can do"
    offloading = by(run, offload=run.sharding.offload.model_copy(update={"optimizer": "cpu"}))
    for changed, said in ((offloading, "sharding.offload.optimizer: got cpu with"), (by(run, stage=3), "sharding.stage: got 3 with")):
        with pytest.raises(BadInput, match=f"{said} sharding.kind=plain, needed sharding.kind zero"):
            check_run(changed, 4)
    assert refusal(network_of(run), plan_of(offloading)) == "offload of the optimizer to cpu needs ZeRO stage 1, not plain"


def test_the_planner_asks_it() -> None:
    """The planner gives it at most DDP's memory, because it has no buckets, and a longer step, because its sums do not overlap."""
    run, cluster = run_of(), load_cluster("a100-80-8").holding(4)
    network, plan = network_of(run), plan_of(by(run))
    assert plan == replace(plan_of(run), engine="plain") and recipe_of(plan, run).sharding.kind == "plain"
    assert peak(network, plan).used <= peak(network, replace(plan, engine="ddp")).used
    assert step_time(network, plan, cluster).step > step_time(network, replace(plan, engine="ddp"), cluster).step
    found = candidates(network, world=4, global_batch=24, base=Plan(), space=Space(engines=("plain",), largest_tp=1, largest_sp=1))
    assert {one.engine for one in found if one.dp > 1} == {"plain"}


def test_a_sharded_one_is_tried_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, PLAIN.name, replace(PLAIN, stage=2))
    run, tried = run_of(), list[str]()
    change_that_fits(run, 4, fits=lambda run: tried.append(run.sharding.kind) or False, checked=lambda run, _: run, has_gpus=False)  # type: ignore[func-returns-value]
    assert "plain" in tried


def test_verify_and_the_page_of_combinations_list_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("data", "tensor", "sequence"):
        assert "gshard" in {case.model for case in kinds.cases(2, kinds=(kind,)) if case.kind == "plain"}
    monkeypatch.setattr(combinations, "FACTORS", {"schedule": ("none", "1f1b", "pipedream"), "data": planned()})
    table = combinations.judge_pairs()
    found = {schedule: table[("schedule", schedule), ("data", "plain")].status for schedule in ("none", "1f1b", "pipedream")}
    assert found == {"none": "runs", "1f1b": "runs", "pipedream": "refused"} and "`plain`" in combinations.page(table, {})


def test_two_ranks_train_as_one_process_does(three_steps: None) -> None:
    chosen = [Case("gshard", PLAIN.name, 2, 2, 3, "fp32"), Case("dense", PLAIN.name, 2, 1, 1, "fp32", tp=2, tensor="1d")]
    for case, found in layouts.run_world(chosen, 2):
        assert not isinstance(found, str), found
        assert max(compare(found[0], twin.reference(expected.twin_of(case))).values()) < 1e-5


MAY_NAME = {
    "moe/checks/together.py": "experts.zero, another key",
    "moe/plan/choose/candidates.py": "what bounds the degrees that a planner tries",
    "moe/plan/choose/planned.py": "presets of what a planner tries",
    "moe/plan/search/runnable.py": "presets of what a planner tries",
    "moe/verify/cases.py": "rows",
    "moe/verify/telling.py": "experts.zero, another key",
    **{f"moe/verify/rows/{name}.py": "rows" for name in ("data", "expert", "pipeline", "sequence", "tensor")},
    "moe/verify/kinds.py": "rows",
    "moe/cli/run/runs.py": "the flag --fsdp",
    **{
        f"moe/verify/peers/{name}.py": "a peer's own form" for name in ("deepspeed", "megatron_core", "torch", "torchtitan", "transformers")
    },
}


def test_no_other_file_names_an_engine() -> None:
    """Quoted names of engines occur only in parallel/data/, moe/recipe/, moe/bench/, MAY_NAME, and fixes that set `sharding.kind`."""
    kinds = {str(kind.sharding["kind"]) for kind in ENGINES.values()} - {
        "dp",
        "plain",
    }  # "dp" alone is not searched for: it is also an axis
    names = "|".join(sorted((kinds | set(ENGINES)) - {"dp", "plain"}))
    named = re.compile(rf"""(?<!sharding.kind": )(?<!sharding.kind", )["']({names})["']|kind [!=]= "dp\"""")
    found = {
        path.relative_to(ROOT).as_posix()
        for folder in ("moe", "parallel")
        for path in (ROOT / folder).rglob("*.py")
        if named.search(path.read_text(encoding="utf-8"))
    }
    assert {path for path in found if not path.startswith(("parallel/data/", "moe/recipe/", "moe/bench/"))} == set(MAY_NAME)
