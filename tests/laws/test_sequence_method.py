"""A new method of sequence parallelism needs only its class, a SequenceKind and a row in the catalog: with these three, a made-up method
works in checks, planner, model and verify. Names of methods occur only in parallel/sequence/ and in the files of MAY_NAME.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moe.checks.together import check_run
from moe.plan.choose.candidates import Space, candidates
from moe.plan.choose.legal import refusal
from moe.plan.choose.recipe_of import recipe_of
from moe.plan.job.network import Plan
from moe.plan.job.of_recipe import network_of, plan_of
from moe.plan.machine.cluster import load_cluster
from moe.plan.memory.memory import peak
from moe.plan.time.cost import step_time
from moe.recipe.load import build_run
from moe.recipe.sections import Run
from moe.verify import cases, expected, kinds, layouts, twin
from moe.verify.cases import Case
from moe.verify.expected import compare
from parallel.errors import BadInput
from parallel.mesh.collectives import gather_into, scatter_sum_into
from parallel.sequence.kinds import DEFAULT, SEQUENCES, Attention, Cost, Held, SequenceKind
from parallel.sequence.method import Known, Method, SavedTensors
from parallel.sequence.softmax import Gradients, Partial, attend, attend_backward, merge, nothing
from tests.counted import sequence as attention
from tests.laws.combinations import judge
from tests.support.verdict import verdict

ROOT = Path(__file__).resolve().parents[2]

# --- the made-up method -----------------------------------------------------------------------------------------------


class Gathered(Method):
    """Every rank gathers all keys and values before it computes."""

    def whole(self, *mine: Tensor) -> list[Tensor]:
        made = [x.new_empty(self.axis.size, *x.shape) for x in mine]
        for out, x in zip(made, mine, strict=True):
            gather_into(out, x.unsqueeze(0), self.axis)
        return made

    def forward(self, q: Tensor, k: Tensor, v: Tensor, known: Known) -> tuple[Tensor, ...]:
        mine, merged = known.tokens(self.axis.index, q), nothing(q, known.sink_H)
        for source, (k_there, v_there) in enumerate(zip(*self.whole(k, v), strict=True)):
            for rows, columns, triangle in self.order.blocks(self.axis.index, source):
                about = {"triangle": triangle, "queries": mine[rows], "keys": known.tokens(source, q)[columns], "bias": known.bias}
                merge(merged, attend(q[:, :, rows], k_there[:, :, columns], v_there[:, :, columns], **about), rows)
        return merged.out_BHLC.to(q.dtype), merged.lse_BHL

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, kept: SavedTensors, known: Known) -> Gradients:
        (out, lse), mine, total, of_keys = kept, known.tokens(self.axis.index, q), Gradients.zeros(q, k, v, known.bias), list[Gradients]()
        for source, (k_there, v_there) in enumerate(zip(*self.whole(k, v), strict=True)):
            total = total.of_other_keys()
            for rows, columns, triangle in self.order.blocks(self.axis.index, source):
                about = {"triangle": triangle, "queries": mine[rows], "keys": known.tokens(source, q)[columns], "bias": known.bias}
                block = grad[:, :, rows], q[:, :, rows], k_there[:, :, columns], v_there[:, :, columns]
                found = attend_backward(*block, Partial(out[:, :, rows], lse[:, :, rows]), **about)
                total.add(found, queries=rows, keys=columns)
            of_keys.append(total)
        parts = torch.stack([torch.stack([one.k_BKSC, one.v_BKSC]) for one in of_keys])
        scatter_sum_into(summed := torch.empty_like(parts[:1]), parts, self.axis)
        return total._replace(k_BKSC=summed[0, 0], v_BKSC=summed[0, 1])


def gathered_cost(ranks: int, layer: Attention) -> Cost:
    (q, k, r), i, wide = Held.of(layer, ranks), layer.itemsize, layer.wide
    return Cost(ranks * (ranks - 1) * 2 * k * i, ranks * (ranks - 1) * 2 * k * (i + wide), (2 * q + 2 * k) * i + r * wide)


GATHERED = SequenceKind("gathered", "all keys first", Gathered, gathered_cost, orders=("zigzag", "contiguous"), overlaps=False)


@pytest.fixture(autouse=True)
def listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the made-up method to the catalog, and to the recipes of its verify cases without validation, which accepts only `Named`."""
    real, attentions = Case.run, cases.attentions
    monkeypatch.setitem(SEQUENCES, GATHERED.name, GATHERED)
    monkeypatch.setattr(cases, "attentions", lambda: attentions() | {GATHERED.name: {"kind": DEFAULT}})
    monkeypatch.setattr(Case, "run", lambda case: by(real(case)) if case.attention == GATHERED.name else real(case))


def by(run: Run) -> Run:
    return run.model_copy(update={"sequence": run.sequence.model_copy(update={"kind": GATHERED.name})})


def run_of(order: str | None = None) -> Run:
    model = {"num_layers": 2, "d_model": 32, "num_heads": 4, "d_ff": 48, "max_length": 24}
    values = {"model": model, "degrees": {"sp": 2}, "sequence": {"order": order}, "train": {"global_batch": 12, "eval_sequences": 12}}
    return by(build_run(values).resolve(4))


def test_checks_refuse_an_order_that_it_does_not_have() -> None:
    assert verdict(run_of(), 4).status == "runs" and run_of().sequence.position_order == "zigzag"
    with pytest.raises(BadInput, match="sequence.order: got striped with sequence.kind=gathered"):
        check_run(run_of(order="striped"), 4)


def test_the_planner_asks_it() -> None:
    """The planner gives it a ring's memory and a longer step than a ring's, because its messages do not overlap with computation."""
    run, cluster = run_of(), load_cluster("a100-80-8").holding(4)
    network, plan = network_of(run), plan_of(run)
    ring = replace(plan, sequence=DEFAULT)
    assert recipe_of(plan, run).sequence == run.sequence and refusal(network, plan) is None
    assert peak(network, plan) == peak(network, ring) and step_time(network, plan, cluster).step > step_time(network, ring, cluster).step
    space = Space(sequences=("gathered",), largest_tp=1)
    found = candidates(network, world=4, global_batch=12, base=Plan(), space=space)
    assert {(one.sequence, one.order) for one in found if one.sp > 1} == {("gathered", "zigzag")}


def test_its_bytes_are_counted_against_its_formula(capsys: pytest.CaptureFixture[str]) -> None:
    for what in ("sent", "kept"):
        rows = [row for row in attention.measured(2, what) if row["kind"] == "sequence gathered"]
        assert len(rows) == 2 and all(row["passed"] for row in rows)


def test_verify_and_the_page_of_combinations_list_it() -> None:
    assert {case.model for case in kinds.cases(2, kinds=("sequence",)) if case.attention == "gathered"} > {"dense", "gshard", "packed_t5"}
    assert judge(("sequence", "gathered")).status == judge(("sequence", "zigzag")).status == "runs"


def test_two_ranks_attend_as_one_process_does(two_steps: None) -> None:
    rows = [case for case in kinds.cases(2, kinds=("sequence",)) if case.attention == "gathered" and case.precision == "fp32"]
    rows = [case for case in rows if case.ep == 1 and case.model in ("gshard", "packed")]
    assert len(rows) == 2
    for case, found in layouts.run_world(rows, 2):
        assert not isinstance(found, str), found
        assert max(compare(found[0], twin.reference(expected.twin_of(case))).values()) < 1e-5


MAY_NAME = {
    "moe/plan/choose/candidates.py": "what bounds the degrees that a planner tries",
    "moe/plan/choose/planned.py": "presets of what a planner tries",
    "moe/verify/cases.py": "rows",
    "moe/verify/rows/sequence.py": "rows",
    "moe/verify/rows/tensor.py": "rows",
    "moe/verify/kinds.py": "rows",
    "moe/verify/hybrid.py": "rows",
}


def test_no_other_file_names_a_method() -> None:
    """Quoted names of methods occur only in parallel/sequence/, moe/recipe/, moe/bench/, MAY_NAME, and fixes that set `sequence.kind`."""
    names = "|".join(name for name in SEQUENCES if name != GATHERED.name)
    named = re.compile(rf"""(?<!sequence.kind", )["']({names})["']""")
    found = {
        path.relative_to(ROOT).as_posix()
        for folder in ("moe", "parallel")
        for path in (ROOT / folder).rglob("*.py")
        if named.search(path.read_text(encoding="utf-8"))
    }
    assert {path for path in found if not path.startswith(("parallel/sequence/", "moe/recipe/", "moe/bench/"))} == set(MAY_NAME)
