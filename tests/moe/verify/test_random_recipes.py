"""`moe verify --draws`: recipes are drawn from the schema, refusals are mended by their fixes, and a failure is shrunk to few keys."""

from __future__ import annotations

import random
from datetime import date
from pathlib import Path

import pytest
import torch
import yaml

from moe.recipe.keys import field_of, known_keys
from moe.recipe.load import build_run
from moe.verify import random_recipe, random_runs
from moe.verify.kinds import recipe_cases
from moe.verify.plain import layer, model
from moe.verify.random_recipe import Draw, draw, refused, smaller
from moe.verify.random_runs import main

WEEK = "{}-W{:02}".format(*date.today().isocalendar())  # a new seed each week


def test_twenty_recipes_of_this_week_equal_the_twin(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    assert main(draws=20, seed=WEEK, nproc=3, say=said.append) == 0, "\n".join([f"--draws 20 --nproc 3 --seed {WEEK}", *said])
    assert "0 deviate" in said[20] and len([line for line in said[:20] if line.endswith("pass")]) > 10


def test_equal_seeds_draw_equal_recipes_which_are_accepted() -> None:
    draws = [draw(f"5/{number}", 8) for number in range(10)]
    assert draws == [draw(f"5/{number}", 8) for number in range(10)] and draws != [draw(f"6/{number}", 8) for number in range(10)]
    for one in draws:
        assert refused(one.values, one.world) is None and 1 <= one.world <= 8
        assert all(str(refusal.bad).isprintable() for refusal in one.refusals)


def test_every_key_of_numbers_or_choices_gets_another_legal_value() -> None:
    """Also a key that is added later: its values are drawn by its type."""
    texts = {key for key in known_keys() if field_of(key).annotation in (str, str | None) and key != "pipeline.schedule"}
    for key in set(known_keys()) - texts - {"data.sources"}:
        rng, values = random.Random(key), {random_recipe._value(random.Random(f"{key}{n}"), key, field_of(key).default).__repr__() for n in range(30)}
        legal = [value for value in (random_recipe._value(rng, key, field_of(key).default) for _ in range(30)) if random_recipe._is_legal(key, value)]
        assert any(value != field_of(key).default for value in legal), (key, values)


def test_a_failure_is_shrunk_to_the_key_that_fails_and_its_yaml_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A twin that ignores model.scales.residual deviates. Of five drawn keys only this one stays, with the layout."""
    values = draw("1/0", 2).values | {"degrees": {}, "pipeline": {"microbatches": 2}}
    values["model"] = {"d_model": 24, "num_layers": 2, "d_ff": 20, "max_length": 6, "scales": {"residual": 0.7}, "qk_norm": "heads"}
    values |= {"optimizer": {"eps": 0.1, "beta1": 0.8}, "train": {"global_batch": 4, "eval_sequences": 4}, "recompute": {"kind": "full"}}
    monkeypatch.setattr(random_runs, "draw", lambda seed, most: Draw(values, 1, []))
    said: list[str] = []
    assert main(draws=1, nproc=1, say=said.append) == 0
    monkeypatch.setattr(model, "times", lambda x, factor, cast: x)
    said.clear()
    assert main(draws=1, nproc=1, say=said.append) == 1
    smallest = yaml.safe_load(said[3])
    assert smallest["model"]["scales"] == {"residual": 0.7} and "qk_norm" not in smallest["model"] and "recompute" not in smallest
    assert said[1].startswith("first deviation: layers.0 (forward of step 0")
    (tmp_path / "small.yaml").write_text(said[3])
    (own,) = [case for case in recipe_cases(str(tmp_path / "small.yaml"), 1)[0] if case.values]
    assert own.run().model.scales.residual == 0.7
