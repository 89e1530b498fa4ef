"""A new pipeline schedule is one function and one row in the catalog. Two made-up ones then work in checks, simulator, planner, verify
and trainer. For the project's schedules: the facts in a row agree with the schedule's order, and no other file names them.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from moe.checks.together import check_run
from moe.cli.simulate import main as simulate_verb
from moe.cli.verbs import Simulate
from moe.plan.choose.candidates import Space, candidates
from moe.plan.choose.legal import refusal
from moe.plan.job.in_flight import in_flight
from moe.plan.job.network import Plan
from moe.plan.job.of_recipe import network_of, plan_of
from moe.plan.machine.cluster import load_cluster
from moe.plan.memory.memory import peak
from moe.plan.time.cost import step_time
from moe.plan.time.pipeline_time import homes_at, pipeline_time
from moe.recipe.load import build_run
from moe.recipe.sections import Run
from moe.verify import expected, layouts, twin
from moe.verify.expected import compare
from moe.verify.kinds import cases
from parallel.errors import BadInput
from parallel.fixes import Set
from parallel.pipeline.schedule import Op, Schedule
from parallel.pipeline.schedules import SCHEDULES, make_schedule
from parallel.pipeline.schedules.kind import ScheduleKind, Size
from parallel.pipeline.schedules.one_f_one_b import one_f_one_b
from parallel.pipeline.schedules.pipedream import pipedream
from parallel.pipeline.simulator.held import peak_held
from parallel.pipeline.simulator.simulate import costs, makespan
from tests.support.verdict import verdict

ROOT = Path(__file__).resolve().parents[2]

# --- the made-up schedules --------------------------------------------------------------------------------------------

EAGER = "eager"


def eager(ranks: int, microbatches: int) -> Schedule:
    """1F1B with one more forward pass before the first backward pass, on every rank."""
    return replace(one_f_one_b(ranks, microbatches, extra_warmup=[1] * ranks), name=EAGER)


def eager_refusal(size: Size) -> BadInput | None:
    """Return the refusal of a number of micro-batches that is no multiple of twice the number of ranks; else None."""
    each = 2 * size.ranks
    if size.microbatches % each == 0:
        return None
    near = (size.microbatches // each + 1) * each
    return BadInput("microbatches", got=size.microbatches, needed=f"a multiple of {each} for eager", fix=Set("it", near))


SYNCED = "synced"


def synced(size: Size) -> Schedule:
    """PipeDream with vertical sync: every stage uses the weight version that the first stage used for the same micro-batch."""
    return replace(pipedream(size.ranks, size.microbatches, batches=size.batches, vertical_sync=True), name=SYNCED)


ROWS = {
    EAGER: ScheduleKind(
        lambda s: eager(s.ranks, s.microbatches).repeated(s.batches), "1F1B, one more forward ahead", refusal=eager_refusal
    ),
    SYNCED: ScheduleKind(synced, "one age of weights", age=lambda size, stage: size.ranks - 1, advice="weights are older; better: zb_h1"),
}


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, row in ROWS.items():
        monkeypatch.setitem(SCHEDULES, name, row)


def run_of(schedule: str, pp: int, microbatches: int) -> Run:
    model = {"num_layers": 8, "d_model": 24, "num_heads": 4, "d_ff": 48, "max_length": 16, "tied_embeddings": False}
    values = {
        "model": model,
        "degrees": {"pp": pp, "dp": 1},
        "pipeline": {"schedule": schedule, "microbatches": microbatches},
        "optimizer": {"clip_norm": None},
        "train": {"global_batch": 24, "eval_sequences": 24},
    }
    return build_run(values).resolve(pp)


def test_checks_and_planner_refuse_its_sizes_in_its_words(listed: None) -> None:
    assert verdict(run_of(EAGER, 3, 6), 3).status == "runs"
    with pytest.raises(BadInput, match="pipeline.microbatches: got 3, needed a multiple of 6 for eager; fix: set it to 6"):
        check_run(run_of(EAGER, 3, 3), 3)
    for microbatches, said in ((3, "pipeline.microbatches=3: needed a multiple of 6 for eager"), (6, None)):
        run = run_of(EAGER, 3, microbatches)
        assert refusal(network_of(run), plan_of(run)) == said


def test_checks_and_planner_know_that_its_updates_do_not_wait(listed: None) -> None:
    run = run_of(SYNCED, 3, 1)
    assert verdict(run, 3).advice == ("pipeline.schedule synced: weights are older; better: zb_h1",)
    for section, keys, said in (
        ("pipeline", {"microbatches": 4}, "pipeline.microbatches: got 4 with synced, needed 1: synced updates weights after 1 micro-batch"),
        ("optimizer", {"clip_norm": 1.0}, "optimizer.clip_norm: got 1.0 with synced, whose stages update without waiting"),
        ("optimizer", {"kind": "kfac"}, "optimizer.kind: got kfac with pipeline.schedule=synced"),
        ("sharding", {"kind": "zero", "stage": 1}, "sharding.kind: got zero with synced"),
    ):
        changed = run.model_copy(update={section: getattr(run, section).model_copy(update=keys)})
        with pytest.raises(BadInput, match=re.escape(said)):
            check_run(changed, 3)
        if section != "optimizer":  # the planner's Plan has no optimizer keys to refuse
            assert SYNCED in (refusal(network_of(changed), plan_of(changed)) or "")


def test_the_simulator_lists_it(listed: None, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"stages": 3, "microbatches": 6}
    assert simulate_verb(Simulate(**sizes), {}) == simulate_verb(Simulate(EAGER, **sizes), {}) == 0
    out = capsys.readouterr().out
    assert re.search(rf"{EAGER} +\d.* 4 3 2 .*1F1B, one more forward ahead", out) and f"{EAGER}: 3 ranks, 6 micro-batches" in out
    simulate_verb(Simulate(stages=3, microbatches=3), {})
    assert f"{EAGER}: microbatches: got 3, needed a multiple of 6" in capsys.readouterr().out


def test_the_planner_times_and_fills_it_as_the_simulator_does(listed: None) -> None:
    draw = random.Random(5)
    for ranks, microbatches in ((2, 4), (3, 6), (3, 42), (4, 56)):
        made = make_schedule(EAGER, ranks=ranks, microbatches=microbatches)
        assert tuple(max(of.most)[0] for of in in_flight(EAGER, ranks=ranks, microbatches=microbatches)) == peak_held(made)
        forward = [float(draw.randint(200, 1000)) for _ in range(ranks)]
        backward, plan = [2 * x for x in forward], Plan(pp=ranks, microbatches=microbatches, schedule=EAGER)
        least, whole = (
            pipeline_time(plan, forward, backward, [x / 2 for x in backward], 40.0, how=how)  # type: ignore[arg-type]
            for how in ("least", "simulated")
        )
        plain = makespan(made, costs(forward, backward), transfer_time=40.0)
        assert least <= whole == pytest.approx(plain, rel=2e-3)
    network, cluster = network_of(run_of(EAGER, 2, 4)), load_cluster("a100-80-8").holding(4)
    space = Space(engines=("ddp",), schedules=((EAGER, 1), ("1f1b", 1)), largest_tp=1, largest_sp=1)
    plans = [plan for plan in candidates(network, world=4, global_batch=24, base=Plan(), space=space) if plan.pp == 4]
    allowed = [plan for plan in plans if plan.schedule == EAGER and refusal(network, plan) is None]
    assert {plan.microbatches for plan in allowed} == {8, 24}
    for plan in allowed:
        plain_plan = replace(plan, schedule="1f1b")
        assert peak(network, plan).used > peak(network, plain_plan).used
        assert step_time(network, plan, cluster).step == pytest.approx(step_time(network, plain_plan, cluster).step, rel=0.2)


def test_two_ranks_train_it_as_one_process_does(listed: None, five_steps: None) -> None:
    """`moe verify` finds cases of both schedules with legal numbers of micro-batches. Their steps equal the twin's, which uses equally
    old weights."""
    rows = [
        case for case in cases(2, kinds=("pipeline",)) if case.schedule in ROWS and (case.precision, case.recompute) == ("fp32", "none")
    ]
    assert {(case.schedule, case.microbatches) for case in rows} == {(EAGER, 4), (SYNCED, 1)} and len(rows) == 8
    ran = list(layouts.run_world([case for case in rows if case.model == "gshard"], 2))
    assert [case.schedule for case, _ in ran] == list(ROWS)
    for case, found in ran:
        assert not isinstance(found, str), found
        assert max(compare(found[0], twin.reference(expected.twin_of(case))).values()) < 1e-5


# --- rows of the project's schedules ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_row_says_what_the_order_does(name: str) -> None:
    """A catalog row agrees with the order: ranks of stages, split passes, micro-batches per update, and age of forward passes' weights."""
    kind, p, m = SCHEDULES[name], 4, 8
    m = kind.update_every or m
    made = make_schedule(name, ranks=p, microbatches=m, batches=p)
    assert made.homes == homes_at(kind.placed, p, made.num_stages // p)
    assert kind.splits_backward == any(a.op is Op.I for order in made.orders for a in order)
    assert made.microbatches_per_update == m
    forward = [a for order in made.orders for a in order if a.op is Op.F]
    for stage in range(made.num_stages):
        age = max(a.microbatch // m - a.version for a in forward if a.stage == stage)
        assert age == (0 if kind.age is None else kind.age(Size(p, m), stage))
    assert (kind.continuous and kind.advice is not None) == kind.continuous


@pytest.mark.parametrize("name", SCHEDULES)
def test_checks_and_planner_refuse_the_same_sizes(name: str) -> None:
    for pp in (2, 3, 4):
        for microbatches in (1, 3, 4, 8):
            run = run_of(name, pp, microbatches)
            assert (refusal(network_of(run), plan_of(run)) is None) == (verdict(run, pp).status != "refused"), (pp, microbatches)


MAY_NAME = {
    "moe/recipe/sections/layout.py": "the default",
    "moe/plan/job/network.py": "the default",
    "moe/plan/choose/candidates.py": "presets of what a planner tries",
    "moe/plan/choose/planned.py": "presets of what a planner tries",
    "moe/cli/energy.py": "EnvPipe is made for 1F1B",
    "parallel/pipeline/energy/plan_file.py": "the example of a file",
    "moe/recipe/other_names.py": "flags of other systems, with their keys here",
    "moe/verify/cases.py": "the default",
    "moe/verify/rows/data.py": "rows",
    "moe/verify/rows/pipeline.py": "rows",
    "moe/verify/rows/sequence.py": "rows",
    "moe/verify/rows/tensor.py": "rows",
    "moe/verify/kinds.py": "rows",
    "moe/verify/hybrid.py": "rows",
    "moe/verify/peers/torch.py": "torch's own schedules",
}


def test_no_other_file_names_a_schedule() -> None:
    """Quoted names of schedules occur only in parallel/pipeline/schedules/, moe/bench/ and the files of MAY_NAME."""
    named = re.compile(rf"""["']({"|".join(SCHEDULES)})["']""")
    found = {
        path.relative_to(ROOT).as_posix()
        for folder in ("moe", "parallel")
        for path in (ROOT / folder).rglob("*.py")
        if named.search(path.read_text(encoding="utf-8"))
    }
    assert {path for path in found if not path.startswith(("parallel/pipeline/schedules/", "moe/bench/"))} == set(MAY_NAME)
