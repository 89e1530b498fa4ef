"""Every key that changes numbers has a telling value in some case of `moe verify`, so that an ignored key is seen."""

from __future__ import annotations

from functools import cache, reduce
from typing import Any

import pytest

from moe.recipe.keys import choices, facts, flat, known_keys
from moe.recipe.plugin import is_plugin
from moe.recipe.sections import Run
from moe.verify.kinds import cases
from moe.verify.telling import TELLING

SPECIAL = (None, 0, 1, 0.5)  # values that hide a factor that is ignored, squared or inverted
KINDS_HERE = ("data", "expert", "tensor", "sequence", "pipeline")
SECTIONS = ("model", "experts", "router", "optimizer", "lora", "precision")
KEYS = [k for k in known_keys() if k.split(".")[0] in SECTIONS and facts(k).alters in ("function", "training", "shape")]
ELSEWHERE = {
    "router.eval_capacity_factor": "for evaluation, which verify does not run",
    "router.hash_table": "a file; tests/moe/router",
    "router.allow_noncausal": "a permission",
    "model.vocab_size": "the batches have the ids of bytes; tests/moe/model",
    "optimizer.sgd.momentum": "the twin has no SGD",
}
NOT_COMPARED = {  # key -> values without a case, and why
    "router.group": ("rank", "depends on the layout by definition"),
    "router.balance_scope": ("micro_batch", "depends on the layout by definition"),
    "optimizer.kind": ("sgd", "given", "the twin has no SGD, and a user's optimizer is not the project's"),
    "precision.compute": ("auto", "one of the others"),
    "precision.master": ("bf16", "rounds states, which no bound allows for"),
    "precision.loss_scale": ("none", "dynamic", "rows with an overflow set it"),
    "router.preset": ("qwen2_moe", "olmoe", "nllb", "their values are of the other presets' kinds"),
}


@cache
def values() -> dict[str, list[Any]]:
    """Return key -> values in the cases. A router's keys have the values of its preset."""
    runs = {str(run): run for run in (case.run() for case in cases(8, kinds=KINDS_HERE))}.values()
    return {key: list({str(v): v for v in (reduce(getattr, key.split("."), run) for run in runs)}.values()) for key in KEYS}


@pytest.mark.parametrize("key", [key for key in KEYS if key not in ELSEWHERE])
def test_every_key_that_changes_numbers_has_telling_values(key: str) -> None:
    """Names: each choice is in some case. Switches: on and off. Numbers: one that is neither the default nor special."""
    found = values()[key]
    names = {name for name in choices(key) if name not in ("preset", *NOT_COMPARED.get(key, ())) and not is_plugin(name)}
    assert names <= {str(one) for value in found for one in (value if isinstance(value, tuple) else (value,))}
    default = flat(Run())[key]
    if isinstance(default, bool):
        assert {True, False} <= set(found)
    elif not names:
        hidden = SPECIAL if any(isinstance(v, float) for v in found) else ()  # a count has no special values
        assert [v for v in found if v not in (*hidden, default, None, ())], f"only {found}"


@pytest.mark.parametrize("model", TELLING)
def test_every_telling_model_is_split_in_each_way(model: str) -> None:
    found = [case for case in cases(2) if case.model == model]
    assert {case.kind for case in found} >= {"ddp", "fsdp"}
    for wide in ("ep", "tp", "sp"):
        assert any(getattr(case, wide) > 1 for case in found), wide
