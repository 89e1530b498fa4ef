"""`moe verify --draws`: recipes are drawn from the schema, refusals are mended by their fixes, and a failure is shrunk to few keys."""

from __future__ import annotations

import copy
import json
import math
import random
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml

from moe.recipe.keys import field_of, known_keys
from moe.verify import random_recipe, random_runs
from moe.verify.cases import Case, as_written
from moe.verify.expected import compare
from moe.verify.kinds import recipe_cases
from moe.verify.layouts import compute
from moe.verify.plain import model
from moe.verify.random_recipe import Draw, draw, refused
from moe.verify.random_runs import main, recipe_of
from moe.verify.twin import reference
from parallel.errors import BadInput

WEEK = "{}-W{:02}".format(*date.today().isocalendar())  # a new seed each week


def test_ten_recipes_of_this_week_equal_the_twin(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    assert main(draws=10, seed=WEEK, nproc=3, say=said.append) == 0, "\n".join([f"--draws 10 --nproc 3 --seed {WEEK}", *said])
    assert " 0 deviate" in said[10] and any(line.endswith("pass") for line in said[:10])


def test_each_replica_of_dp_sees_its_own_documents() -> None:
    """Found by --draws: a replica had the document limits of all replicas' sequences, and failed."""
    case = Case("packed_t5", "dp", 1, 1, 1, "fp32", batch=4, steps=1)
    assert max(compare(compute(case), reference(case)).values()) < 1e-5


def test_muon_leaves_the_biases_of_experts_to_adamw() -> None:
    """Found by --draws: the twin took the output biases of a layer's experts, which are vectors, for one matrix."""
    values: Any = copy.deepcopy(random_recipe._TINY) | {"optimizer": {"kind": "muon"}, "experts": {"num_experts": 3, "biases": True}}
    values["model"]["moe_every"] = 1
    case = as_written(values, 1, name="drawn")
    assert max(compare(compute(case), reference(case)).values()) < 1e-5


def test_equal_seeds_draw_equal_recipes_which_are_accepted() -> None:
    draws, again, others = ([draw(f"{seed}/{number}", 8) for number in range(10)] for seed in (5, 5, 6))
    assert [one.values for one in draws] == [one.values for one in again] != [one.values for one in others]
    for one in draws:
        assert refused(one.values, one.world) is None and 1 <= one.world <= 8
        assert all(not random_runs._is_wrong(refusal) for refusal in one.refusals)


def test_every_key_of_numbers_or_choices_gets_another_legal_value() -> None:
    """Also a key that is added later: its values are drawn by its type."""
    texts = {key for key in known_keys() if field_of(key).annotation in (str, str | None) and key != "pipeline.schedule"}
    for key in sorted(
        set(known_keys()) - texts - {"data.sources", "train.loss", "router.balance_loss"}
    ):  # the losses: one choice, or a plugin
        rng, default = random.Random(key), field_of(key).default
        found = [value for value in (random_recipe._value(rng, key, default) for _ in range(20)) if random_recipe._is_legal(key, value)]
        assert any(value != default for value in found), key


def test_drawn_values_need_no_object_and_no_gpu_and_weights_are_frozen() -> None:
    """Found by --draws: the twin failed on `optimizer.kind: given` and on Triton's kernels. Frozen weights were never drawn."""
    for key in ("optimizer.kind", "experts.kernels"):
        assert not {"given", "triton", "triton_persistent"} & {str(random_recipe._value(random.Random(n), key, None)) for n in range(60)}
    assert draw("p30c/14", 4).values["model"]["sliding_window"] == 2  # drawn as 1: queries and keys have no gradient
    assert any(draw(f"freeze/{number}", 2).values.get("train", {}).get("freeze") for number in range(40))


def test_a_draw_whose_run_lacks_weights_of_the_twin_is_not_compared_or_fails() -> None:
    """Found by --draws: a run with `lora.base: fp8` keeps no matrix of its experts, and the comparison ended with a KeyError."""
    values: Any = copy.deepcopy(random_recipe._TINY) | {"lora": {"rank": 2, "base": "fp8"}}
    values["model"]["moe_every"] = 1
    assert random_runs.tried(Draw(values, 1, []), None)["lacks"] == "lora.base fp8"
    want = reference(Case("dense", "dp", 1, 1, 1, "fp32", batch=1, steps=1))
    got = replace(want, weights=dict(list(want.weights.items())[1:]))
    assert set(compare(got, want).values()) == {math.inf}


def test_a_failure_is_shrunk_to_the_key_that_fails_and_its_yaml_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A twin that ignores model.scales.residual deviates. Of two drawn keys only this one stays."""
    values: Any = copy.deepcopy(random_recipe._TINY)
    values["model"] |= {"scales": {"residual": 0.7}, "qk_norm": "heads"}
    monkeypatch.setattr(random_runs, "draw", lambda seed, most: Draw(values, 1, []))
    monkeypatch.setattr(model, "times", lambda x, factor, cast: x)
    said: list[str] = []
    assert main(draws=1, nproc=1, say=said.append) == 1
    smallest = yaml.safe_load(said[3])
    assert smallest["model"]["scales"] == {"residual": 0.7} and "qk_norm" not in smallest["model"]
    assert said[1].startswith("first deviation: layers.0.ffn_norm (forward of step 0")
    (tmp_path / "small.yaml").write_text(said[3])
    (own,) = [case for case in recipe_cases(str(tmp_path / "small.yaml"), 1)[0] if case.values]
    assert own.run().model.scales.residual == 0.7


def test_a_printed_dense_recipe_has_no_sections_of_experts() -> None:
    values: Any = copy.deepcopy(random_recipe._TINY) | {"dispatch": {"kind": "padded"}, "experts": {"num_experts": 6}}
    dense = as_written(values | {"model": values["model"] | {"moe_every": 0}}, 1, name="drawn")
    sparse = as_written(values | {"model": values["model"] | {"moe_every": 1}}, 1, name="drawn")
    sections = {"router", "experts", "dispatch"}
    assert not sections & recipe_of(dense).keys() and sections <= recipe_of(sparse).keys()


def test_a_draw_that_is_never_accepted_fails_alone_and_the_others_results_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of three draws is always refused. The file has the row of the first before the second is drawn."""
    table, real, said, before = tmp_path / "table.json", random_recipe.refused, list[str](), list[int]()

    def drawn(seed: str, most: int) -> Draw:
        before.append(len(json.loads(table.read_text())["rows"]) if table.exists() else 0)
        if seed == "0/1":
            bad = BadInput("model.d_ff", got=1, needed="another", fix="--model.d_ff 2")
            monkeypatch.setattr(random_recipe, "refused", lambda values, world: bad)
        else:
            monkeypatch.setattr(random_recipe, "refused", real)
        return draw(seed, most)

    monkeypatch.setattr(random_runs, "draw", drawn)
    monkeypatch.setattr(
        random_runs, "tried", lambda drawn, limit_s: {"layout": "", "kind": "", "precision": "", "lacks": "x", "passed": None}
    )
    assert main(draws=3, json=str(table), say=said.append) == 1
    assert before == [0, 1, 2] and said[1].endswith("FAIL") and "none of 40 fixes led to an accepted recipe" in said[1]
    assert [row["passed"] for row in json.loads(table.read_text())["rows"]] == [None, False, None] and "1 deviate or fail" in said[3]
