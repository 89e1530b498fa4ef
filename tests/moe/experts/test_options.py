"""Options of experts and routers from published models: three training steps, on one process and on ranks, equal the plain twin of `moe
verify`. The twin computes each option by a formula of its own.

Only these tests notice a bias after the experts whose gradient is summed over too few ranks, or that has weight decay.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from moe.checks.together import check_run
from moe.recipe.load import build_run
from moe.recipe.sections import Run
from moe.verify.cases import Case
from moe.verify.expected import compare
from moe.verify.layouts import compute, run_world
from parallel.errors import BadInput
from tests.support.twins import three_steps_of

OPTIONS: dict[str, dict[str, Any]] = {
    "gpt_oss": {
        "model": {"swiglu": {"alpha": 1.702, "limit": 0.4, "offset": 1.0}},  # many activations exceed this limit
        "experts": {"biases": True, "shared": 1},
        "router": {"preset": "mixtral", "logits": "affine", "num_choices": 3, "balance_scope": "sequence"},
    },
    "relu": {"experts": {"biases": True, "ffn": "relu"}, "router": {"preset": "switch", "capacity_factor": 1.0, "min_capacity": 2}},
    "scaled inputs": {
        "experts": {"biases": True, "dropout": 0.2},
        "router": {
            "preset": "llama4",
            "num_choices": 2,
            "balance_scope": "sequence",
            "logit_cap": 0.5,
            "capacity_factor": 1.0,
            "queue": "tokens_first",
        },
    },
    "free": {
        "experts": {"skip": 2, "zero": 1, "biases": True},
        "router": {"preset": "deepseek_v3", "select": "top_k", "num_choices": 3, "bias_rate": 0.02, "capacity_factor": 1.25},
    },
    "load": {
        "router": {
            "preset": "glam",
            "noise": "noisy_top_k",
            "load_weight": 0.2,
            "capacity_factor": None,
            "balance_weight": 0.0,
            "balance_scope": "global_batch",
        }
    },
    "load of a sequence": {
        "router": {"preset": "mixtral", "noise": "noisy_top_k", "load_weight": 0.2, "balance_weight": 0.0, "balance_scope": "sequence"}
    },
    "mixer": {
        "model": {"norm_eps": 0.2},  # the router's norm adds it too
        "router": {
            "preset": "switch",
            "select": "sparsemixer",
            "num_choices": 3,
            "mixer_margin": 0.45,  # then about half of the experts can be drawn
            "input_norm": "rmsnorm",
            "expert_scale": "learned",
            "gate_scale": 1.5,
            "capacity_factor": 1.0,
            "balance_counts": "unbiased",
        },
    },
    "best group": {"router": {"preset": "glam", "select": "group_limited", "expert_groups": 4, "top_groups": 2, "group_score": "best"}},
}


@dataclass(frozen=True)
class Chosen(Case):
    """A case of `moe verify` with the options OPTIONS[option] of model, experts and router."""

    option: str = ""

    def run(self) -> Run:
        values = super().run().model_dump(mode="json")
        for section, options in OPTIONS[self.option].items():
            values[section] = (values[section] if section != "router" else {}) | options
        return build_run(values)


def farthest(ran: Any, twin: Case) -> float:
    """Return the largest error of all numbers except weight updates: a bias starts at 0, and Adam amplifies rounding errors of tiny
    gradients. The losses of later steps check the updates.
    """
    assert not isinstance(ran, str), ran
    return max(value for name, value in compare(ran, three_steps_of(twin)).items() if name != "update")


@pytest.mark.usefixtures("three_steps")
@pytest.mark.parametrize("option", OPTIONS)
def test_three_steps_of_one_process_are_the_plain_twins(option: str) -> None:
    case = Chosen("switch", "ddp", 1, 1, 1, "fp32", experts=8, option=option)
    assert farthest(compute(case), case) < 1e-5


@pytest.mark.usefixtures("three_steps")
def test_three_steps_on_ranks_are_the_plain_twins() -> None:
    """On two ranks with ep or etp, dispatchers, FSDP, tiles, recomputation, a zero-bubble pipeline and sequence parallelism."""
    two = {"precision": "fp32", "experts": 8, "option": "gpt_oss"}
    cases: list[Case] = [
        Chosen("switch", "ddp", 2, 2, 3, **two, recompute="full"),
        Chosen("switch", "fsdp", 2, 2, 1, **two, rows="overlapped"),
        Chosen("switch", "ddp", 2, 1, 1, **two, etp=2),
        Chosen("switch", "ddp", 2, 2, 1, **two, tiles=5, rows="padded"),
        Chosen("switch", "ddp", 2, 1, 4, **two, pp=2, schedule="zb_h1", layers=4),
        Chosen("switch", "ddp", 2, 2, 3, **two | {"option": "scaled inputs"}, rows="all_gather"),
        Chosen("switch", "fsdp", 2, 2, 1, **two | {"option": "scaled inputs"}, rows="padded", recompute="full"),
        Chosen("switch", "ddp", 2, 1, 3, **two | {"option": "load"}),
        Chosen("switch", "ddp", 2, 1, 1, **two | {"option": "load of a sequence"}, sp=2, attention="contiguous"),
        Chosen("switch", "ddp", 2, 2, 1, **two | {"option": "free"}, rows="padded"),
        Chosen("switch", "fsdp", 2, 2, 3, **two | {"option": "mixer"}, recompute="full"),
        Chosen("switch", "ddp", 2, 1, 1, **two | {"option": "mixer"}, sp=2, attention="contiguous"),
        Chosen("switch", "ddp", 2, 1, 1, **two | {"option": "best group"}, sp=2, attention="contiguous"),
    ]
    for case, ran in run_world(cases, 2):
        assert not isinstance(ran, str), (case.layout, ran)
        assert isinstance(case, Chosen)
        twin = Chosen("switch", "ddp", 1, 1, 1, **two | {"option": case.option}, layers=case.layers)
        assert farthest(ran[0], replace(twin, layers=case.layers)) < 1e-5, case.layout


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"model": {"swiglu": {"limit": 7.0}}}, "model.swiglu.limit: got 7 with model.ffn=gelu"),
        ({"model": {"swiglu": {"limit": 0}}}, "model.swiglu.limit"),
        (
            {"model": {"moe_every": 2}, "router": {"select": "sparsemixer", "gates": "before_drop", "num_choices": 2}},
            "router.gates: got before",
        ),
        ({"model": {"moe_every": 2}, "router": {"mixer_margin": 0.1}}, "router.mixer_margin: got 0.1 with select top_k"),
        ({"model": {"moe_every": 2}, "router": {"group_score": "best"}}, "router.group_score: got best with select top_k"),
    ],
)
def test_what_does_not_go_together_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        check_run(build_run(values), 1)
