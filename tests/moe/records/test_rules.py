"""Each rule of the doctor fires on made records that show its fault and on no healthy ones, from the step at which the fault begins. The
remedy is a recipe that the checks accept. Running jobs, trackers, the report and `moe doctor RUN` show the same line.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

import pytest

from moe.checks.together import check_run
from moe.cli import main as cli
from moe.launch import exit_codes
from moe.recipe.load import build_run, load, published_names, recipe_names
from moe.recipe.presets import PRESETS
from moe.recipe.sections import Run
from moe.records.conditions import LASTING
from moe.records.rules import RULES, Finding, Live, Rule, diagnose
from moe.records.tracker import scalars
from moe.records.windows import LEAST_STEPS, window_length
from moe.report.page import page_text
from parallel.fixes import Set
from tests.support import trained

STEPS, EXPERTS, LAYER, BEGINS = 200, 8, 1, 101
SIZE = window_length(STEPS)
Line = dict[str, Any]


def falls(step: int) -> float:
    return 1.5 + 4 * math.exp(-step / 30)


def healthy(
    steps: int = STEPS, *, curve: Callable[[int], float] = falls, noise: float = 0.1, share: float = 1 / EXPERTS, lr: float = 1e-3
) -> list[Line]:
    """Records of a healthy run: loads that differ by chance, few drops."""
    draw = random.Random(0)

    def layer() -> Line:
        load = [share * draw.uniform(0.7, 1.3) for _ in range(EXPERTS)]
        load = [each / sum(load) for each in load]
        return {"layer": LAYER, "load": load, "kept": 970, "dropped": 30, "z_loss": 4.0, "entropy": 1.5}

    def line(step: int) -> Line:
        parts = {"dense": 0.9, "router": 0.1, "expert": 0.4}
        moe = {"moe": [layer()], "grad_norm": 1.0, "grad_norm_parts": parts}
        return {"kind": "train", "step": step, "lr": lr, "loss": curve(step) + draw.gauss(0, noise)} | moe

    return [line(step) for step in range(1, steps + 1)]


def layers(**changes: Any) -> Callable[[Line], Line]:
    """Return a change of each line's layer; a function gets the step."""
    made = lambda line: {key: value(line["step"]) if callable(value) else value for key, value in changes.items()}  # noqa: E731
    return lambda line: line | {"moe": [line["moe"][0] | made(line)]}


def crowded(step: int) -> list[float]:
    return [0.79] + [0.03] * (EXPERTS - 1)


def swinging(step: int) -> list[float]:
    full, empty = [0.24] * 4, [0.01] * 4
    return full + empty if step % 2 else empty + full


SOURCES = [{"path": __file__, "weight": 9.0}, {"path": trained.__file__, "weight": 1.0}]
# rule -> (recipe, change of lines from step BEGINS on, first step that the line names, words in it)
CASES: dict[str, tuple[dict[str, Any], Callable[[Line], Line], int, str]] = {
    "equal tokens": ({}, lambda line: layers(load=[1.0] + [0.0] * 7)(line) | {"loss": 0.001}, BEGINS, "data.path"),
    "looks ahead": ({"router": {"preset": "expert_choice", "allow_noncausal": True}}, dict, 1, "set router.select to top_k"),
    "one source": ({"data": {"source": "text", "sources": SOURCES}}, dict, 1, "test_rules.py gives 90.0%"),
    "bf16 weights": (
        {"precision": {"compute": "bf16", "master": "bf16"}},
        lambda line: line | {"lr": 1e-6},
        BEGINS,
        "set precision.master to fp32",
    ),
    "warm-up": ({"optimizer": {"warmup_steps": 0}}, dict, 11, "set optimizer.warmup_steps to 40"),
    "learning rate": ({}, lambda line: line | {"loss": line["loss"] + 9}, BEGINS, "set optimizer.lr to 0.0001"),
    "loss spikes": (
        {"optimizer": {"beta2": 0.999}},
        lambda line: line | {"loss": line["loss"] + 3 * (line["step"] % 25 == 0)},
        125,
        "0.95",
    ),
    "frozen router": ({"train": {"freeze": ["router"]}}, dict, 1, "set train.freeze to []"),
    "bias rate": (
        {"router": {"preset": "deepseek_v3", "num_choices": 2, "select": "top_k", "bias_rate": 1.0}},
        layers(load=swinging),
        BEGINS,
        "set router.bias_rate to 0.001",
    ),
    "selection bias": (
        {"router": {"preset": "deepseek_v3", "num_choices": 2, "select": "top_k", "bias_rate": 0.1}},
        layers(bias_min=-0.9, bias_max=0.4),
        BEGINS,
        "set router.bias_rate to 0.01",
    ),
    "no balance loss": ({"router": {"balance_weight": 0.0}}, layers(load=crowded), BEGINS, "expert 0 of layer 1 gets 6.3 times"),
    "uneven load": ({}, layers(load=crowded), BEGINS, "set router.balance_weight to 0.1"),
    "dropped choices": ({}, layers(kept=400, dropped=600), BEGINS, "set router.capacity_factor to 1.5625"),
    "capacity": (
        {"router": {"capacity_factor": 0.5}},
        layers(kept=500, dropped=500),
        BEGINS,
        "a capacity factor of 0.5 has fewer slots than choices",
    ),
    "router saturates": ({}, layers(z_loss=400.0, entropy=0.01), BEGINS, "set optimizer.lr to 0.0001, or router.z_weight to 0.001"),
    "router's entropy": ({}, layers(entropy=0.001), BEGINS, "is certain of every token: entropy 0.001 of 2.1 nats"),
    "router's gradient": (
        {},
        lambda line: line | {"grad_norm": 1.0, "grad_norm_parts": {"router": 0.99}},
        BEGINS,
        "set router.balance_weight to 0.001",
    ),
}


def recipe(values: dict[str, Any]) -> Run:
    sections = {"train": {"steps": STEPS}, "optimizer": {"warmup_steps": 40}, "router": {}}
    return build_run({name: sections.get(name, {}) | values.get(name, {}) for name in sections | values})


def sick(rule: str) -> tuple[list[Line], Run]:
    values, change, _, _ = CASES[rule]
    curve = (lambda n: falls(n) + (6 if 10 < n < 40 else 0)) if rule == "warm-up" else falls
    lines = healthy(curve=curve)
    return [change(line) if line["step"] >= BEGINS else line for line in lines], recipe(values)


def test_every_rule_has_a_case_here_and_hides_rules_that_exist() -> None:
    names = [rule.name for rule in RULES]
    assert sorted(CASES) == sorted(names) and len(set(names)) == len(names)
    assert {hidden for rule in RULES for hidden in rule.hides} <= set(names)


@pytest.mark.parametrize("rule", CASES)
def test_a_rule_names_its_fault_alone_since_when_and_what_to_do(rule: str) -> None:
    lines, run = sick(rule)
    (found,) = diagnose(lines, run)
    since, words = CASES[rule][2:]
    assert found.rule == rule and abs(found.since - since) < SIZE and found.value == pytest.approx(found.value)
    assert f", since step {found.since}: {found.fix}" in found.line and "\n" not in found.line and words in found.line + repr(found.fix)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.reads], ids=lambda rule: rule.name)
def test_a_rule_is_silent_without_any_field_that_it_reads(rule: Rule) -> None:
    for field in rule.reads:
        lines, run = sick(rule.name)
        for line in lines:
            *outer, last = field.split(".")
            for held in [line] if not outer else line[outer[0]] if outer == ["moe"] else [line[outer[0]]]:
                held.pop(last, None)
        assert rule.name not in [found.rule for found in diagnose(lines, run)]


@pytest.mark.parametrize("rule", [rule for rule in CASES if rule != "equal tokens"])
def test_a_remedy_changes_the_recipe_to_one_that_the_checks_accept(rule: str) -> None:
    lines, run = sick(rule)
    (found,) = diagnose(lines, run)
    for way in found.fix.ways(""):
        values = json.loads(json.dumps(run.model_dump(mode="json")))
        before = json.dumps(values)
        way.apply(values)
        assert json.dumps(values) != before
        check_run(build_run(values), 1)


@pytest.mark.parametrize("warmup", [0, 40])
def test_the_remedy_of_a_rate_far_above_the_weights_mends(warmup: int, home: Path, tmp_path: Path) -> None:
    def findings(lr: float) -> list[Finding]:
        run = trained.recipe(home, optimizer={"lr": lr, "warmup_steps": warmup}, train={"steps": 60, "save_every": 0, "max_skips": 60})
        trained.train(run, out := tmp_path / f"{lr}")
        return [found for found in diagnose(trained.lines(out), run) if found.rule in ("warm-up", "learning rate")]

    (found,) = findings(30.0)
    (remedy,) = found.fix.ways("")
    assert isinstance(remedy, Set) and remedy.key == "optimizer.lr" and findings(remedy.values[0]) == []


@pytest.mark.parametrize("preset", sorted(PRESETS.keys() - {"expert_choice"}))
def test_a_healthy_run_has_no_finding(preset: str) -> None:
    assert diagnose(healthy(), recipe({"router": {"preset": preset}})) == []


@pytest.mark.parametrize("name", [*recipe_names(), *published_names()])
def test_a_shipped_recipe_of_itself_has_no_finding(name: str) -> None:
    """With a falling loss and even loads, at its own rates and precision."""
    run = load(name)[0]
    values = run.model_dump(mode="json") | {"train": run.train.model_dump() | {"steps": STEPS}}
    values["optimizer"]["warmup_steps"] = run.optimizer.warmup_steps * STEPS // run.train.steps
    assert diagnose(healthy(lr=run.optimizer.lr), build_run(values)) == []


@pytest.mark.parametrize(("score", "begins", "ends", "found"), [
    ("sigmoid", 0.1, 1.3, True), ("sigmoid", 0.1, 0.9, False), ("sigmoid", 1.3, 1.3, False), ("sigmoid", 1.3, 1.5, True),
    ("sqrt_softplus", 0.1, 1.3, False),
])  # fmt: skip
def test_biases_drift_if_they_move_further_apart_than_scores(score: str, begins: float, ends: float, found: bool) -> None:
    """A converted model may begin with biases that are far apart; scores without a bound may be further apart than any bias."""
    run = recipe({"router": {"preset": "deepseek_v3", "num_choices": 2, "select": "top_k", "score": score}})
    apart = layers(bias_min=5.0, bias_max=lambda step: 5.0 + begins + (ends - begins) * min(1.0, step / BEGINS))
    assert ["selection bias"] * found == [one.rule for one in diagnose([apart(line) for line in healthy()], run)]


def test_a_fault_that_ends_or_has_just_begun_is_no_finding() -> None:
    def with_fault(begin: int, end: int) -> list[Line]:
        return [layers(load=crowded)(line) if begin <= line["step"] <= end else line for line in healthy()]

    run = recipe({})
    assert diagnose(with_fault(41, 150), run) == []
    assert diagnose(with_fault(STEPS + 1 - (LASTING - 1) * SIZE, STEPS), run) == []
    assert [found.rule for found in diagnose(with_fault(STEPS + 1 - LASTING * SIZE, STEPS), run)] == ["uneven load"]
    assert diagnose(with_fault(1, STEPS)[: STEPS // 2 + SIZE], run) == []  # until then the balance loss has time


@pytest.mark.parametrize("rule", CASES)
def test_a_running_job_says_each_finding_once(rule: str) -> None:
    lines, run = sick(rule)
    live = Live(run)
    said = [found.rule for line in lines for found in live.after_step(line)]
    assert said.count(rule) == 1 and len(said) == len(set(said))


@pytest.mark.parametrize(("rule", "stop"), [*zip([*CASES][::4], [0, SIZE * 7 + 2, STEPS - 1, SIZE * 12], strict=False)])
def test_a_resumed_job_says_what_the_job_without_a_stop_says(rule: str, stop: int) -> None:
    """`stop`: steps before the resume, which a job on new records has seen too; it need not end a window."""
    lines, run = sick(rule)
    through = Live(run)
    want = [(line["step"], found.line) for line in lines for found in through.after_step(line)]
    resumed = Live(run, [{"kind": "event", "event": "begun", "step": 0}, *lines[:stop]])
    assert [(line["step"], found.line) for line in lines[stop:] for found in resumed.after_step(line)] == [
        one for one in want if one[0] > stop
    ]


def test_a_resumed_job_repeats_no_finding_that_was_said_and_has_ended() -> None:
    lines = [layers(load=crowded)(line) if 106 <= line["step"] <= 150 or line["step"] > 170 else line for line in healthy()]
    run = recipe({})
    through, resumed = Live(run), Live(run, lines[:165])
    assert [found.rule for line in lines for found in through.after_step(line)] == ["uneven load"]
    assert not [found for line in lines[165:] for found in resumed.after_step(line)]


@pytest.mark.parametrize(("weight", "step"), [(0.01, STEPS // 2), (0.0, STEPS // 4)])
def test_drops_have_half_of_the_run_to_mend_only_if_a_loss_balances(weight: float, step: int) -> None:
    lines = [layers(kept=250, dropped=750)(line) for line in healthy()]
    live, grace = Live(recipe({"router": {"balance_weight": weight}})), math.ceil(step / SIZE) * SIZE
    said = [line["step"] for line in lines for found in live.after_step(line) if found.rule == "dropped choices"]
    assert said == [grace + LASTING * SIZE]


@pytest.mark.parametrize("lr", [1e-4, 2e-3, 1e-2])
def test_a_balance_loss_may_work_until_the_rates_could_saturate_a_logit(lr: float) -> None:
    width, lines = 32, [layers(load=crowded)(line) for line in healthy(lr=lr)]
    live, free = Live(recipe({"model": {"d_model": width, "num_heads": 4}})), 10 / (lr * width)
    said = [line["step"] for line in lines for found in live.after_step(line) if found.rule == "uneven load"]
    first = math.ceil(max(free, STEPS / 2) / SIZE) * SIZE
    assert said == [step for step in [first + LASTING * SIZE - (SIZE if free > STEPS / 2 else 0)] if step <= STEPS]


RISES = {
    "ended above": (lambda n: falls(1) + n / 100, "the loss is at 7"),
    "above for long": (lambda n: falls(n) + (6 if 10 < n < 40 else 0), "the loss was above its first value, 5"),
    "diverged and settled higher": (lambda n: falls(n) + (0.5 if n > 150 else 0), "the loss rose from 1.5"),
}


@pytest.mark.parametrize("name", RISES)
def test_a_loss_that_rises_is_one_line_with_a_fix(name: str) -> None:
    curve, said = RISES[name]
    (found,) = diagnose(healthy(curve=curve), recipe({}))
    assert found.rule == "learning rate" and found.line.startswith(said) and "set optimizer.lr to 0.0001" in found.line


@pytest.mark.parametrize("steps", [LEAST_STEPS, 57, 200, 2000])
@pytest.mark.parametrize("noise", [0.0, 0.1, 0.4])
def test_a_loss_that_falls_or_stays_where_it_is_is_not_mentioned(steps: int, noise: float) -> None:
    run = recipe({"train": {"steps": steps}, "optimizer": {"warmup_steps": 10}})
    assert diagnose(healthy(steps, curve=lambda n: falls(n * 200 // steps), noise=noise), run) == []
    assert diagnose(healthy(steps, curve=lambda n: 5.5, noise=noise / 10), run) == []  # as with a learning rate of nearly 0


def test_a_few_steps_in_a_row_are_one_spike_and_two_are_no_fault() -> None:
    def spiking(steps: tuple[int, ...], size: float) -> list[str]:
        return [
            found.rule
            for found in diagnose([line | {"loss": line["loss"] + size * (line["step"] in steps)} for line in healthy()], recipe({}))
        ]

    assert spiking((90, 120, 121, 150), 3.0) == ["loss spikes"]
    assert spiking((90, 120, 121, 122), 3.0) == [] == spiking((90, 120, 150, 170), 0.3)
    assert spiking((5, 12, 20, 30, 45), 3.0) == []  # within the first quarter


def test_short_runs_dense_models_and_losses_that_are_no_numbers() -> None:
    short = recipe({"train": {"steps": LEAST_STEPS - 1}})
    assert diagnose(healthy(LEAST_STEPS - 1, curve=float), short) == [] == diagnose([], short)
    assert diagnose([line | {"loss": None} for line in healthy()], recipe({})) == []
    assert diagnose([line | {"moe": [], "grad_norm_parts": {}} for line in healthy()], recipe({})) == []


def test_a_real_run_its_tracker_report_and_the_command_say_the_same_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home, out = trained.home(tmp_path, monkeypatch), tmp_path / "run"
    run = trained.recipe(home, router={"capacity_factor": 0.4, "min_capacity": 0}, train={"steps": 30, "save_every": 0})
    (summary,) = trained.train(run, out)
    (found,) = diagnose(trained.lines(out), run)
    assert found.rule == "capacity" and "a capacity factor of 0.4 has fewer slots than choices" in found.line
    (alarm,) = [line for line in trained.lines(out, "event") if line.get("rule") == found.rule]
    assert (alarm["rule"], alarm["since"]) == (found.rule, found.since) and alarm["step"] < run.train.steps
    assert dict(scalars(alarm)) == {"alarm/capacity": alarm["value"]}
    assert summary["alarms"] == [found.line]
    capsys.readouterr()
    assert cli.main(["doctor", str(out), "--json", str(tmp_path / "found.json")]) == exit_codes.FAILED
    assert capsys.readouterr().out == f"{found.line}\n"
    assert json.loads((tmp_path / "found.json").read_text())["rows"] == [found.row() | {"passed": False}]
    page = page_text(name="run", lines=[], summary=None, recipe=None, pictures={}, findings=[found])
    assert escape(found.line) in page
