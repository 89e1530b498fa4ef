"""Laws of FSDP with pipeline stages, for schedules with whole and with split backward passes: a step equals one process's step, and the
number of gathers and scatters is the formula's."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from moe.plan.pipeline import schedule_of
from moe.train.parts.executor import Pipelined
from moe.verify.cases import Case
from moe.verify.rows.pipeline import staged
from moe.verify.tape import owned
from parallel.data import fsdp
from parallel.data.deepspeed import load_deepspeed
from parallel.pipeline.schedule import Action, Op, Span, Watcher, flushed
from parallel.pipeline.schedules import SCHEDULES, make_schedule
from tests.support.plain_simulation import any_order
from tests.support.ranks import each_case
from tests.support.sharded_stages import Call, calls_of, stuck
from tests.support.tiny import Tiny, start


def two_steps(rank: int, case: Case) -> dict[str, Any]:
    """Return loss, gradients and norm of the second step, and the weights after it. Adam's eps is large: steps are well-conditioned."""
    tiny = start(case, rank, optimizer={"eps": 0.01})
    found: dict[str, Any] = {}
    for step in range(2):
        found["loss"] = tiny.accumulate(step).loss
        found["gradients"] = owned(tiny.engine, tiny.mesh, "gradient", 1.0)
        found["norm"] = tiny.finish().total
    return found | {"weights": owned(tiny.engine, tiny.mesh, "weight", 1.0)}


def test_a_step_is_that_of_one_process() -> None:
    rows = [
        ("gshard", "1f1b", "fsdp+kept"),
        ("deepseek", "zb_h1", "fsdp"),
        ("gshard", "zb_v", "fsdp"),
        ("dense", "dualpipe_v", "zero2"),
        ("deepseek", "dualpipe", "fsdp+kept"),
        ("deepseek", "v_half", "zero3+cpu"),
    ]
    load_deepspeed()  # imported before the fork, because it takes seconds
    cases = [staged(model, kind, 4, 2, schedule, "fp32") for model, schedule, kind in rows]
    twins = [Case(case.model, "ddp", 1, 1, 1, "fp32", layers=case.layers) for case in cases]
    different = list(dict.fromkeys(twins))
    alone = dict(zip(different, each_case(two_steps, 1, [(twin,) for twin in different]), strict=True))
    for row, twin, got in zip(rows, twins, each_case(two_steps, 4, [(case,) for case in cases]), strict=True):
        (want,) = alone[twin]
        assert [part["loss"] for part in got] == pytest.approx([want["loss"]] * 4, rel=1e-6), row
        assert [part["norm"] for part in got] == pytest.approx([want["norm"]] * 4, rel=1e-6), row
        for what in ("gradients", "weights"):
            largest = max(float(g.abs().max()) for g in want[what].values())
            for name, wanted in want[what].items():
                found = sum(part[what][name] for part in got if name in part[what])
                torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6 * largest, msg=f"{row} {name}")


# --- order of collectives -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("once", [True, False])
def test_no_schedule_has_a_deadlock_over_data_and_pipeline_ranks(once: bool) -> None:
    """1,000 random schedules, half of them with each way to sum, and the catalog's: all pipelines run one order, so rank r calls the same
    collectives in the same order in each. Pipelines with different orders deadlock."""
    catalog = [make_schedule(name, ranks=4, microbatches=8) for name, kind in SCHEDULES.items() if not kind.continuous]
    for schedule in (*catalog, *(any_order(3, 2, seed) for seed in range(500))):
        assert stuck([schedule] * 2, once=once) == [], schedule.name
    orders = [((0, "F"), (1, "F"), (1, "B"), (0, "B")), ((0, "F"), (0, "B"), (1, "F"), (1, "B"))]
    first, second = (flushed("", [(0,), (0,)], 1, [[Action(Op(op), stage, 0) for stage, op in order]]) for order in orders)
    assert stuck([first, first], once=once) == [] and len(stuck([first, second], once=once)) == 2


class Noted(Watcher):
    """Collects the set of (gather or scatter, stage) of the layers' units that each action of a rank calls."""

    def __init__(self, called: list[str], tiny: Tiny) -> None:
        self.called, self.read, self.found = called, 0, list[set[Call]]()
        self.stage_of = {f"layers.{layer}": stage for stage, part in tiny.model.parts.items() for layer in part.layers}

    def after(self, at: int, took: Span) -> None:
        units = (text.split() for text in self.called[self.read :])
        stages = ((what, self.stage_of.get(".".join(path.split(".")[:2]))) for what, path in units)
        self.found.append({(what, stage) for what, stage in stages if stage is not None})
        self.read = len(self.called)


def test_an_action_calls_the_collectives_that_the_schedule_gives() -> None:
    """For the layers, whose gradients are all deferred. Data-parallel ranks call the same units, of all modules, in the same order."""

    def work(rank: int, schedule: str, kind: str) -> tuple[list[str], list[set[Call]], list[set[Call]]]:
        called: list[str] = []
        patch = pytest.MonkeyPatch()
        for name in ("gather_into", "scatter_sum_into"):
            real = getattr(fsdp, name)

            def noted(*args: Any, real: Any = real, name: str = name, **options: Any) -> Any:
                called.append(f"{name.partition('_')[0]} {args[2].label.removeprefix('the gradients of ')}")
                return real(*args, **options)

            patch.setattr(fsdp, name, noted)
        tiny = start(staged("gshard", kind, 4, 2, schedule, "fp32"), rank, sharding={"prefetch": 0})
        assert isinstance(tiny.executor, Pipelined)
        watcher = Noted(called, tiny)
        with tiny.executor.watched(watcher):
            tiny.accumulate(0)
        patch.undo()
        order = schedule_of(tiny.run).orders[tiny.mesh.axis("pp").index]
        return called, watcher.found, by_action(calls_of(order, once=kind == "fsdp+kept"))

    cases = [*product(("1f1b", "zb_v"), ("fsdp", "fsdp+kept"))]
    for case, got in zip(cases, each_case(work, 4, cases), strict=True):
        for called, found, wanted in got:
            assert found == wanted and [other for other, *_ in got].count(called) == 2, case


def by_action(calls: list[Call]) -> list[set[Call]]:
    """Return for each action its gather, called before it, and its scatter, called after it."""
    found: list[set[Call]] = []
    before: set[Call] = set()
    for call in calls:
        if call[0] == "act":
            found.append(before)
            before = set()
        else:
            (found[-1] if call[0] == "scatter" else before).add(call)
    return found
