"""Laws of a recipe's schema: every key is a typed field, which states the settings under which it is read and the effect of a change."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from mypy import api
from pydantic import TypeAdapter, ValidationError

from moe.recipe.idle import check_settings
from moe.recipe.keys import ABOVE_0, choices, facts, field_at, field_of, in_words, known_keys, section_of, settings
from moe.recipe.load import build_run, load
from moe.recipe.section import TokenizerFile
from moe.recipe.sections import Run
from parallel.errors import BadInput

ROOT = Path(__file__).resolve().parents[2]
SNIPPET = """
from moe.recipe.section import TokenizerFile
from moe.recipe.sections import Run
run = Run()
reveal_type(run.router.num_choices)
reveal_type(run.router.capacity_factor)
reveal_type(run.optimizer.kfac.damping)
reveal_type(run.degrees.ep)
run.router.num_choice
run.router.num_choices = 2
"""
# mypy reads only the recipe's modules and pydantic: with torch it takes a minute without a cache
ONLY_RECIPE = """
[mypy]
plugins = pydantic.mypy
follow_imports = skip
ignore_missing_imports = True
[mypy-moe,moe.recipe,moe.recipe.*,pydantic,pydantic.*]
follow_imports = silent
"""


def test_the_schema_is_written_out() -> None:
    """No code in moe/recipe creates fields or attributes at run time, so editors and mypy see every key."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "moe/recipe").rglob("*.py")}
    names = {(path.name, getattr(node, "name", None) or getattr(node, "id", "")) for path, tree in trees.items() for node in ast.walk(tree)}
    assert {(path, name) for path, name in names if name in ("create_model", "__getattr__", "__getattribute__", "setattr")} == set()


def test_mypy_knows_every_keys_type(tmp_path: Path) -> None:
    (tmp_path / "snippet.py").write_text(SNIPPET)
    (tmp_path / "mypy.ini").write_text(ONLY_RECIPE)
    told, _, _ = api.run(
        [*(f"--{name}={tmp_path / at}" for name, at in (("config-file", "mypy.ini"), ("cache-dir", "cache"))), str(tmp_path / "snippet.py")]
    )
    assert re.findall(r'type is "([^"]*)"', told) == ["int", "float | None", "float", 'int | Literal["auto"]'.replace('"', "'")], told
    assert 'has no attribute "num_choice"' in told and "read-only" in told


@pytest.mark.parametrize("key", known_keys())
def test_a_key_is_typed_and_says_what_changing_it_alters(key: str) -> None:
    *sections, name = key.split(".")
    section = section_of(field_at(sections))
    assert section is not None and facts(key).alters is not None
    hint = get_type_hints(section, include_extras=True)[name]
    assert hint is not Any
    default = field_of(key).default
    assert TypeAdapter(hint).validate_python(default) == default
    for condition in (*facts(key).of, *facts(key).off_without):
        for reader, names in settings(condition):
            there = [
                *choices(reader),
                *(["true"] if field_of(reader).annotation is bool else [ABOVE_0]),
                *(["null"] if field_of(reader).default is None else []),
                *(["*.json"] if TokenizerFile in get_args(field_of(reader).annotation) else []),
            ]
            assert reader in known_keys() and set(names) <= set(there), condition


def another(key: str) -> Any:
    """Return a legal value of the key other than its default."""
    *sections, name = key.split(".")
    section = section_of(field_at(sections))
    assert section is not None
    for value in (True, False, 0.5, 0.25, 2, 3, [1], *choices(key), ["dense"], "/tmp", "module:name"):
        try:
            if getattr(section.model_validate({name: value}), name) != field_of(key).default:
                return value
        except (ValidationError, BadInput):
            continue
    raise AssertionError(key)


@pytest.mark.parametrize("key", [key for key in known_keys() if facts(key).of])
def test_a_value_without_its_reader_is_refused_wherever_it_comes_from(key: str) -> None:
    values: Any = another(key)
    for name in reversed(key.split(".")):
        values = {name: values}
    if key.startswith("model.rope."):
        values["model"] |= {"positions": "t5"}
    with pytest.raises(BadInput, match=rf"^{key}: got .* otherwise this key has no effect; fix: .*remove {key}$") as refused:
        check_settings(build_run(values))
    assert any(in_words(condition) in str(refused.value) for condition in facts(key).of)


@pytest.mark.parametrize("key", [key for key in known_keys() if facts(key).off_without and not facts(key).of])
def test_a_value_next_to_the_setting_that_switches_it_off_is_refused(key: str) -> None:
    """In a dense recipe with SGD, a constant learning rate and epochs, `load` refuses a key that no code would read. Fix: remove it."""
    off = {"optimizer.kind": "sgd", "optimizer.schedule": "constant", "train.epochs": "2"}
    with pytest.raises(BadInput, match=f"^{key}: got .*remove {key}$"):
        load("dense_tiny", off | {key: another(key)})


def test_a_key_that_is_gone_may_have_the_value_that_is_built_in(tmp_path: Path) -> None:
    """Recipes and checkpoints of earlier versions contain keys that were removed since. They load if the value is the one that is now
    fixed; otherwise the key is refused."""
    old: Any = {
        "optimizer": {
            "kind": "muon",
            "muon": {"momentum": 0.9, "nesterov": True, "iterations": 5},
            "adafactor": {"clip": 1.0, "eps": "1e-30"},
        }
    }
    new: Any = {"optimizer": {"kind": "muon", "muon": {"momentum": 0.9}}}
    assert build_run(old) == build_run(new)
    (tmp_path / "old.yaml").write_text("extends: dense_tiny\noptimizer: {kind: muon, muon: {iterations: 4}}\n")
    with pytest.raises(BadInput, match="^optimizer.muon.iterations: got a key that does not exist.*fix: remove it: it is always 5$"):
        load(tmp_path / "old.yaml")


def test_settings_without_conditions_pass() -> None:
    check_settings(Run())
