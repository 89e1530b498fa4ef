"""A new method of expert selection is one `Method` object and one line in the catalog. A made-up one then works in checks, groups,
planner, model, layouts and verify.

Only the plain twin of `moe verify` gets its own function, because it shares no code with the router.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torch import Tensor

from moe.checks.together import check_run
from moe.plan.job.of_recipe import network_of
from moe.plan.memory.rows import router_kept
from moe.plan.memory.stack import OURS
from moe.recipe.load import load
from moe.recipe.sections import Run
from moe.router.checks import check_causal, decides_together
from moe.router.methods import METHODS
from moe.router.methods.method import Method, RoutingRequest
from moe.verify import expected, layouts, twin
from moe.verify.cases import Case
from moe.verify.expected import compare
from moe.verify.plain import router
from parallel.errors import BadInput

ROOT = Path(__file__).resolve().parents[2]


class RunnersUp(Method):
    """Skip each token's best expert, and choose the K next best."""

    name = "runners_up"
    uses_bias = False
    is_balanced = "the best is never taken"

    def experts_needed(self, spec: object) -> int:
        return 1 + spec.num_choices  # type: ignore[attr-defined, no-any-return]

    def kept_bytes(self, *, num_choices: int, num_experts: int) -> int:
        return 7 * num_choices

    def select(self, request: RoutingRequest) -> Tensor:
        expert_TK: Tensor = request.kernels.top_k(request.preferred_TE, 1 + request.spec.num_choices)
        return expert_TK[:, 1:].contiguous()


@pytest.fixture(autouse=True)
def listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, RunnersUp.name, RunnersUp())


def with_it(run: Run, **keys: object) -> Run:
    """Return the recipe with the made-up method, set without validation, which accepts only methods that RouterSpec lists."""
    return run.model_copy(update={"router": run.router.model_copy(update={"select": RunnersUp.name} | keys)})


def test_checks_groups_and_planner_ask_it(monkeypatch: pytest.MonkeyPatch) -> None:
    top_k = load("switch_tiny", {"router.balance_weight": "0", "router.capacity_factor": "null"})[0]
    run = check_run(with_it(top_k), 2)
    assert router_kept(network_of(run), OURS, 4) == router_kept(network_of(top_k), OURS, 4) + 7
    for keys, line in (({"balance_weight": 0.1}, "0: the best is never taken"), ({"bias_rate": 0.1}, "null: nothing is chosen by")):
        with pytest.raises(BadInput, match=f"with select runners_up, needed {line}"):
            check_run(with_it(top_k, **keys), 2)
    assert not decides_together(run.router)
    monkeypatch.setattr(RunnersUp, "excess", 0.7)
    assert (experts := network_of(run).experts) is not None and experts.excess == 0.7
    monkeypatch.setattr(RunnersUp, "needs_whole_groups", True)
    assert decides_together(run.router)
    monkeypatch.setattr(RunnersUp, "looks_ahead", "it sees the end")
    with pytest.raises(BadInput, match="false with select runners_up, needed true: it sees the end"):
        check_causal(run.router, allowed=False)


def test_layouts_equal_the_plain_twin(monkeypatch: pytest.MonkeyPatch, three_steps: None) -> None:
    """Steps on one process, and on two with ep 2, equal the twin's. The twin computes the method by a plain Python function."""
    real = Case.run
    monkeypatch.setattr(Case, "run", lambda case: with_it(real(case), balance_weight=0.0))
    runners_up = lambda liked, *_: [sorted(range(len(row)), key=lambda e: (-row[e], e))[1:2] for row in liked.tolist()]  # noqa: E731
    monkeypatch.setitem(router.CHOOSE, RunnersUp.name, runners_up)
    case = Case("switch", "ddp", 2, 2, 1, "fp32")
    want = twin.reference(expected.twin_of(case))
    assert max(compare(layouts.compute(expected.alone(expected.twin_of(case))), want).values()) < 1e-5
    ((_, ran),) = layouts.run_world([case], 2)
    assert not isinstance(ran, str), ran
    assert max(compare(ran[0], want).values()) < 1e-5


def test_no_other_file_names_a_method() -> None:
    """Quoted names of methods occur only in moe/router/methods/ and in the files of `allowed`."""
    names = "|".join(name for name in METHODS if name not in ("top_k", "hash", RunnersUp.name))
    allowed = {
        "moe/recipe/router_spec.py", "moe/recipe/presets.py", "moe/recipe/sections/experts.py", "moe/verify/plain/layer.py",
        "moe/verify/plain/router.py", "moe/convert/huggingface/config.py", "moe/verify/cases.py", "moe/recipe/other_names.py",
    }  # fmt: skip
    found = {
        path.relative_to(ROOT).as_posix()
        for folder in ("moe", "parallel")
        for path in (ROOT / folder).rglob("*.py")
        if re.search(rf"""["']({names})["']""", path.read_text(encoding="utf-8"))
    }
    assert {path for path in found if not path.startswith("moe/router/methods/")} - allowed == set()
