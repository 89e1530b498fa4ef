"""Presets: docs/moe/routing.md has the same values as the code, each preset is a valid router, capacities follow the systems' formulas."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.recipe import sections
from moe.recipe.load import load, resolved_yaml
from moe.recipe.presets import PRESETS
from moe.recipe.router_spec import RouterSpec
from moe.router.capacity import slots_of
from moe.router.checks import check_spec, looks_ahead, only_second_choices_look_ahead
from tests.support.routed import from_logits, random, route

PAGE = Path(__file__).resolve().parents[3] / "docs/moe/routing.md"


def settings_of(values: dict[str, Any]) -> str:
    """Return values as a recipe writes them on one line."""
    shown = {name: "null" if value is None else f"{value:g}" if isinstance(value, float) else value for name, value in values.items()}
    return "`" + ", ".join(f"{name}: {value}" for name, value in shown.items()) + "`"


def table() -> list[str]:
    """Return the lines of the page's table of presets, made from PRESETS."""
    lines = ["| preset | values other than the defaults | looks ahead |", "|---|---|---|"]
    for name, spec in PRESETS.items():
        ahead = "second choices" if only_second_choices_look_ahead(spec) else "yes" if looks_ahead(spec) else "no"
        lines.append(f"| `{name}` | {settings_of({'num_choices': spec.num_choices} | spec.model_dump(exclude_defaults=True))} | {ahead} |")
    return lines


def test_the_pages_table_is_the_codes() -> None:
    section = PAGE.read_text(encoding="utf-8").split("## Presets")[1].split("\n## ")[0]
    shown = [line for line in section.splitlines() if line.startswith("|")]
    assert shown == table(), "docs/moe/routing.md should have:\n" + "\n".join(table())
    assert f"Defaults: {settings_of(RouterSpec().model_dump())}." in section, settings_of(RouterSpec().model_dump())


def test_a_recipe_may_name_every_preset_and_every_key_of_a_spec() -> None:
    assert list(get_args(sections.Router.model_fields["preset"].annotation)) == list(PRESETS)
    assert list(sections.Router.model_fields) == ["preset", *RouterSpec.model_fields, "allow_noncausal"]
    for router in (sections.Router(), sections.Router(preset="glam", jitter=0.1)):
        written = router.model_dump()
        assert {key for key, value in written.items() if value != "preset"} == {"preset", "allow_noncausal", *router.own}
        assert sections.Router(**written) == router


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_works_with_the_experts_of_its_paper(name: str) -> None:
    check_spec(PRESETS[name], {"deepseek_v3": 256, "deepseek_v2": 160, "qwen3_moe": 128, "olmoe": 64}.get(name, 8))
    assert dict(sections.Router(preset=name)).items() >= dict(PRESETS[name]).items()  # type: ignore[arg-type]


def test_a_recipes_value_replaces_the_presets_and_null_is_a_value() -> None:
    router = sections.Router(preset="glam", capacity_factor=None, balance_weight=0.5, bias_rate=None)
    assert (router.capacity_factor, router.balance_weight, router.num_choices) == (None, 0.5, 2)
    assert sections.Router(preset="glam").capacity_factor == 1.25
    assert (
        sections.Router(preset="deepseek_v3").bias_rate == 0.001 and sections.Router(preset="deepseek_v3", bias_rate=None).bias_rate is None
    )


def test_a_shown_recipe_says_what_its_preset_chose() -> None:
    run, origins = load("glam_tiny", {"router.preset": "deepspeed"})
    shown = resolved_yaml(run, origins)
    assert re.search(r'gates: "preset" +# deepspeed: "after_drop"', shown)
    assert re.search(r'capacity_factor: "preset" +# deepspeed: 1.0; not 1.5, which glam_tiny.yaml has for its own preset', shown)
    assert re.search(r'bias_rate: "preset" +# deepspeed: null', shown)


# --- capacity by the formulas of other systems --------------------------------------------------------------------------


@given(st.integers(1, 4000), st.integers(1, 256), st.integers(50, 300), st.sampled_from([1, 2]))
@settings(max_examples=200, deadline=None)
def test_slots_are_those_of_the_systems(tokens: int, num_experts: int, hundredths: int, k: int) -> None:
    """`slots_of` gives min(T, slots by the formula of Mesh TensorFlow, DeepSpeed or Megatron), for capacity factors hundredths / 100."""
    over = 100 * num_experts
    wanted = {
        "switch_mtf": max(4, tokens * hundredths // over),
        "deepspeed": max(4, math.ceil(tokens * k * hundredths / over)),
        "megatron": math.ceil(tokens * k * hundredths / over),
    }
    for name, slots in wanted.items():
        spec = sections.Router(preset=name, num_choices=k, capacity_factor=hundredths / 100)  # type: ignore[arg-type]
        got = slots_of(spec, tokens, num_experts=num_experts, training=True)
        assert got == min(tokens, slots), name


@pytest.mark.parametrize(("factor", "slots"), [(1.0, 12), (1.25, 16), (2.0, 28)])
def test_glam_with_the_released_codes_rounding(factor: float, slots: int) -> None:
    """int(T f / E) rounded up to a multiple of 4, without the number of choices k; T = 100 tokens, E = 8 experts."""
    google = {"capacity_counts": "tokens", "capacity_rounding": "floor", "capacity_multiple": 4, "min_capacity": 0}
    assert slots_of(sections.Router(preset="glam", capacity_factor=factor, **google), 100, num_experts=8, training=True) == slots  # type: ignore[arg-type]


def test_t5xs_rounding() -> None:
    """T5X gives an expert max(4, int(round(f T / E))) slots."""
    spec = sections.Router(preset="switch", capacity_counts="tokens", capacity_rounding="round")
    assert [slots_of(spec, t, num_experts=8, training=True) for t in (10, 100, 105)] == [4, 16, 16]


# --- Megatron -----------------------------------------------------------------------------------------------------------


def test_megatrons_router_is_softmax_of_the_chosen_and_drops_the_least_probable() -> None:
    """Gates are the softmax of the top-k logits. Each expert keeps its ceil(T k f / E) most probable choices of the micro-batch."""
    logits = random(60, 4) + torch.tensor([1.5, 0.5, 0.0, 0.0])
    routing = route(from_logits(logits, preset="megatron", capacity_factor=0.8), logits, length=20)
    top = logits.topk(2)
    assert torch.equal(routing.expert_TK, top.indices)
    torch.testing.assert_close(routing.gate_TK, top.values.softmax(-1))
    assert routing.capacity == 24 and routing.num_groups == 1
    probs = torch.zeros(60, 4).scatter(1, top.indices, top.values.softmax(-1))
    want = torch.zeros(60, 4, dtype=torch.bool)
    for e in range(4):
        best = probs[:, e].argsort(descending=True)[:24]
        want[best, e] = probs[best, e] > 0
    assert torch.equal(torch.zeros_like(want).scatter(1, routing.expert_TK, routing.kept_TK), want)
    assert 0 < routing.kept_TK.sum() < 120
