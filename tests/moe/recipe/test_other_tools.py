"""For a name of another tool, the error's fix has the right key or flag, and is accepted as a recipe or command line."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from moe.checks.advice import applied
from moe.cli.flags import read_words
from moe.cli.verbs import RECIPE_VERBS, VERBS
from moe.recipe import other_tools
from moe.recipe.keys import flat, known_keys
from moe.recipe.load import build_run, load, read_recipe, recipe_path
from moe.recipe.other_names import FLAGS, KEYS, NEEDLESS, OTHER_UNITS, SWITCHES, WITH_OTHERS, WORDS
from moe.recipe.overrides import take_overrides
from moe.recipe.sections import Run
from parallel.errors import BadInput


def rows(table: dict[str, str]) -> list[tuple[str, str, str]]:
    """Return (name in another tool, value there, name here) for each entry of a table in other_tools.py. Switches have the value "true"."""
    return [(name.partition("=")[0], name.partition("=")[2] or "true", here) for here, names in table.items() for name in names.split()]


WITH_VALUES = [row for table in (KEYS, SWITCHES, WITH_OTHERS) for row in rows(table)]


def keys_of(here: str) -> list[str]:
    return [pair.partition("=")[0] for pair in here.split()]


def refused(overrides: dict[str, Any]) -> str:
    with pytest.raises(BadInput) as bad:
        load("switch_tiny", overrides)
    return str(bad.value.fix)


def accepted(fix: str) -> Run:
    """Apply a fix of the form "did you mean --key VALUE?" to switch_tiny, and return the recipe."""
    words, overrides = take_overrides(shlex.split(fix.removeprefix("did you mean ").removesuffix("?")))
    assert words == [], fix
    return load("switch_tiny", overrides)[0]


@pytest.mark.parametrize(("name", "value", "here"), WITH_VALUES, ids=[row[0] for row in WITH_VALUES])
def test_the_fix_for_a_name_with_its_value_is_a_recipe(name: str, value: str, here: str) -> None:
    """The fix is the same for a key on the command line, for a flag (a name without a dot) and for a key in a file: it sets the right keys
    to the right values."""
    fix = refused({name if "." in name else f"section.{name}": value})
    run = accepted(fix)
    assert all(f"--{key} " in fix for key in keys_of(here))
    if "." not in name:
        with pytest.raises(BadInput) as bad:
            read_words("train", VERBS["train"], ["switch_tiny", f"--{name.replace('_', '-')}", value])
        assert str(bad.value.fix) == fix
    values, _ = read_recipe(recipe_path("switch_tiny"))
    outer, _, last = name.rpartition(".")
    written: dict[str, Any] = {last: value}
    for section in reversed(outer.split(".") if outer else ["train"]):
        written = {section: written}
    for section, fields in written.items():
        values[section] = values.get(section, {}) | fields
    with pytest.raises(BadInput) as bad:
        build_run(values)
    (proposed,) = bad.value.fix.ways(bad.value.what)
    mended = applied(proposed, values)
    if outer and outer.partition(".")[0] not in Run.model_fields:
        del mended[outer.partition(".")[0]]
    assert flat(build_run(mended)) == flat(run)


def test_most_names_lead_to_a_key() -> None:
    names = {name for table in (KEYS, SWITCHES, WITH_OTHERS, OTHER_UNITS, FLAGS, NEEDLESS) for name, _, _ in rows(table)}
    assert len(names) >= 120
    assert len({name for name, _, _ in WITH_VALUES}) >= 110
    assert not names & set(known_keys())
    # names of keys that few recipes set, but users of other tools mean others by them; pp is the number of stages to moe simulate
    assert names & {key.rpartition(".")[2] for key in known_keys()} == {"step", "depth", "pp"}


def test_names_here_are_keys_and_flags_and_no_fix_sets_anything_aside() -> None:
    keys = {key for table in (KEYS, SWITCHES, WITH_OTHERS) for here in table for key in keys_of(here)}
    assert keys | {unit.partition(",")[0] for unit in OTHER_UNITS} | set(WORDS) <= set(known_keys())
    assert not {"--fresh", "--force"} & set(FLAGS)
    for flag, names in FLAGS.items():
        verbs = [verb for verb, kind in VERBS.items() if flag[2:] in kind.__dataclass_fields__]
        assert verbs
        for name, value, _ in rows({flag: names}):
            if "." in name:
                assert refused({name: value}) == f"remove it, and give moe train {flag}"
                continue
            with pytest.raises(BadInput) as bad:
                words = ["word"] * sum(field.metadata["word"] for field in VERBS[verbs[0]].__dataclass_fields__.values())
                read_words(verbs[0], VERBS[verbs[0]], [*words, f"--{name}", value])
            fixed = shlex.split(str(bad.value.fix).removeprefix("did you mean ").removesuffix("?"))
            assert fixed[0] == flag
            read_words(verbs[0], VERBS[verbs[0]], [*words, *fixed])


@pytest.mark.parametrize("verb", RECIPE_VERBS)
def test_no_verb_proposes_a_flag_that_sets_aside_or_overrules(verb: str) -> None:
    for name in ("resume", "nodes", "fres", "forse", "frsh", "reset", "force_train", "overwrite_output_dir"):
        with pytest.raises(BadInput) as bad:
            read_words(verb, VERBS[verb], [f"--{name}"])
        assert "--fresh" not in str(bad.value.fix) and "--force" not in str(bad.value.fix) and "--order" not in str(bad.value.fix)


# name that users of other tools tried -> key that the fix must name; by similar spelling alone only 4 were found
TRIED = {
    "hidden_size": "model.d_model", "max_steps": "train.steps", "num_local_experts": "experts.num_experts", "learning_rate": "optimizer.lr",
    "batch_size": "train.global_batch", "tp_size": "degrees.tp", "num_experts_per_tok": "router.num_choices",
    "top_k": "router.num_choices", "gradient_accumulation_steps": "pipeline.microbatches", "seq_len": "model.max_length",
    "zero_stage": "sharding.stage", "bf16": "precision.compute", "moe_intermediate_size": "experts.d_ff",
}  # fmt: skip


def test_names_that_users_tried() -> None:
    values = {"bf16": "true"}
    for name, key in TRIED.items():
        assert f"--{key} " in refused({f"train.{name}": values.get(name, "2")})
    for section in ("train", "optimizer", "model"):
        assert refused({f"{section}.output_dir": "runs/a"}) == "remove it, and give moe train --out"
    with pytest.raises(BadInput, match=r"remove it \(moe train continues from the newest checkpoint"):
        read_words("train", VERBS["train"], ["switch_tiny", "--resume"])
    with pytest.raises(BadInput, match="fix: did you mean --precision.compute bf16"):
        read_words("train", VERBS["train"], ["--bf16", "switch_tiny"])
    for name, value in (("--optimizer", "AdamW"), ("--optimizer", "muon"), ("--sharding", "fsdp2"), ("--dispatch", "padded")):
        with pytest.raises(BadInput, match=f"fix: did you mean {name}.kind (adamw|muon|fsdp|padded)"):
            read_words("train", VERBS["train"], ["switch_tiny", name, value])
    with pytest.raises(BadInput, match="fix: remove it"):
        read_words("train", VERBS["train"], ["switch_tiny", "--bf16", "false"])


@pytest.mark.parametrize(("key", "words"), WORDS.items(), ids=list(WORDS))
def test_words_of_other_tools_for_a_value(key: str, words: dict[str, str]) -> None:
    for there, here in words.items():
        assert other_tools.in_our_words(key, there.upper()) == here
        load("switch_tiny", {key: here})
    if key in ("precision.compute", "model.ffn", "optimizer.kind"):
        there, here = next((there, here) for there, here in words.items() if there.isidentifier())
        assert refused({key: there}) == f"did you mean {here}?"


def test_a_whole_number_may_have_an_exponent() -> None:
    run = load("switch_tiny", {"train.steps": "1e3", "experts.num_experts": "[4, 1e1]", "model.moe_layers": "[1, 3]"})[0]
    assert (run.train.steps, run.experts.num_experts) == (1000, (4, 10))
    assert read_words("train", VERBS["train"], ["switch_tiny", "--nproc", "1e1"]).nproc == 10
    for wrong in ("1e-3", "1.5e0", "1e"):
        with pytest.raises(BadInput, match="train.steps"):
            load("switch_tiny", {"train.steps": wrong})


def test_keys_in_a_wrong_section_are_found_in_a_file_and_by_their_value() -> None:
    """Sections of other tools in a recipe, a key's name that several sections have, and flags of `moe train` written into a recipe."""
    values, _ = read_recipe(recipe_path("switch_tiny"))
    for section, fields, fix in (
        ("lr_scheduler", {"warmup_steps": 7}, "did you mean optimizer.warmup_steps?"),
        ("fp16", {"loss_scale": 128}, "did you mean precision.loss_scale?"),
        ("optimizer", {"params": {"lr": 0.1}}, "did you mean optimizer.lr?"),
        ("zero_optimization", {"elastic_checkpoint": True}, "remove it, or see: moe show --keys all"),
        ("train", {"nproc": 2}, "remove it, and give moe train --nproc"),
        ("train", {"max_new_tokens": 2}, "remove it, and give moe generate --tokens"),
        ("train", {"path": "a.txt"}, "did you mean data.path?"),
        ("train", {"schedule": "cosine"}, "did you mean optimizer.schedule?"),
        ("tensor", {"dept": 2}, "did you mean tensor.depth?"),
        ("optimizer", {"step": "absolute"}, "did you mean optimizer.adafactor.step?"),
    ):
        with pytest.raises(BadInput) as bad:
            build_run(values | {section: values.get(section, {}) | fields})
        assert str(bad.value.fix) == fix
    for flag, value, key in (
        ("--path", "a.txt", "data.path"),
        ("--schedule", "gpipe", "pipeline.schedule"),
        ("--kind", "muon", "optimizer.kind"),
    ):
        with pytest.raises(BadInput, match=f"fix: did you mean --{key} {value}"):
            read_words("train", VERBS["train"], ["switch_tiny", flag, value])


def test_a_name_that_is_nearly_another_tools_is_taken_for_it_unless_one_here_is_nearer() -> None:
    for name, key in (("n_embed", "model.d_model"), ("num_hidden_layer", "model.num_layers"), ("val_interval", "train.eval_every")):
        assert refused({f"train.{name}": "2"}) == f"did you mean --{key} 2?"
    for name, flag in (("--profil", "--profile"), ("--from_stp", "--from_step")):
        with pytest.raises(BadInput, match=f"fix: did you mean {flag}"):
            read_words("train", VERBS["train"], ["switch_tiny", name, "2"])
    assert refused({"model.num_layer": "2"}) == "did you mean model.num_layers?"


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("generate a --temp 0.5", "did you mean --temperature 0.5?"),
        ("generate a --do_sample", "remove it (moe generate draws tokens; --temperature 0 takes the likeliest)"),
        ("eval a --num_samples 8", "did you mean --sequences 8?"),
        ("eval a --batch_size 8", "remove it, or see: moe eval --help"),
        ("simulate 1f1b --num_microbatches 8", "did you mean --microbatches 8?"),
        ("plan a --gpus 8", "name the devices in --cluster: h100-8x4 has 4 nodes of 8, and h100-2 two devices of one node"),
        ("rehearse a --gpus 8", "did you mean --world 8?"),
        ("train a --sequence-parallel", "did you mean --tensor.sequence_parallel true?"),
        ("train a --cp 2", "did you mean --degrees.sp 2?"),
        ("train a --hidden 64", "did you mean --model.d_model 64?"),
        ("convert a b --dtype float16", "did you mean --dtype fp16?"),
        ("train a --step 5", "did you mean --train.steps 5?"),
        ("train a --norm_type batchnorm", "did you mean --model.norm, one of rmsnorm, layernorm?"),
        ("train a --restart", "remove it (moe train continues from the newest checkpoint of its run folder; --out names another folder)"),
    ],
)
def test_a_name_leads_to_what_its_verb_takes(words: str, fix: str) -> None:
    verb, *rest = words.split()
    with pytest.raises(BadInput) as bad:
        read_words(verb, VERBS[verb], rest)
    assert str(bad.value.fix) == fix
