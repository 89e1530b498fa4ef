"""train.freeze: on every engine the trained weights move as the plain twin's do and frozen ones stay, bit for bit; frozen weights are in
checkpoints without optimizer states; a part that the model lacks, or a resume with other parts, is refused in one line."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe.checks.together import check_run
from moe.recipe.load import build_run, load
from moe.recipe.sections import Run
from moe.train.start import opening
from moe.verify.cases import Case
from moe.verify.expected import compare
from moe.verify.layouts import compute, run_world
from parallel.errors import BadInput
from parallel.store.stored import Reader
from tests.support import trained
from tests.support.twins import three_steps_of


@dataclass(frozen=True)
class Frozen(Case):
    """A case of `moe verify` in which `freeze` is not trained."""

    freeze: tuple[str, ...] = ("router", "embedding", "layers.0")
    optimizer: str = "adamw"

    def run(self) -> Run:
        values = super().run().model_dump(mode="json")
        more = {"train": values["train"] | {"freeze": self.freeze}, "optimizer": values["optimizer"] | {"kind": self.optimizer}}
        return build_run(values | more)


def farthest(ran: Any, twin: Case) -> float:
    assert not isinstance(ran, str), ran
    return max(compare(ran, three_steps_of(twin)).values())


@pytest.mark.usefixtures("three_steps")
@pytest.mark.parametrize("parts", [("router", "embedding", "layers.0"), ("experts", "norms"), ("attention", "dense", "head")], ids=str)
def test_three_steps_are_the_plain_twins(parts: tuple[str, ...]) -> None:
    model = "deepseek" if "head" in parts else "gshard"  # gshard's head is its embedding
    case = Frozen(model, "ddp", 1, 1, 3, "fp32", "selective", freeze=parts)
    assert farthest(compute(case), case) < 1e-5


@pytest.mark.usefixtures("three_steps")
def test_three_steps_on_ranks_are_the_plain_twins() -> None:
    cases: list[Case] = [
        Frozen("gshard", "ddp", 2, 2, 1, "fp32", "full"),
        Frozen("gshard", "fsdp", 2, 1, 3, "fp32"),
        Frozen("deepseek", "zero1", 2, 2, 1, "fp32", freeze=("experts", "embedding")),
        Frozen("switch", "zero2", 2, 1, 3, "fp32", freeze=("attention", "norms")),
        Frozen("gshard", "zero3", 2, 1, 1, "fp32"),
        Frozen("switch", "ddp", 2, 1, 3, "fp32", pp=2, schedule="zb_h1", freeze=("router", "embedding")),
        Frozen("switch", "ddp", 2, 1, 1, "fp32", tp=2, freeze=("dense", "layers.1")),
    ]
    for case, ran in run_world(cases, 2):
        assert not isinstance(ran, str), (case.layout, ran)
        assert isinstance(case, Frozen)
        assert farthest(ran[0], Frozen(case.model, "ddp", 1, 1, 1, "fp32", freeze=case.freeze)) < 1e-5, case.layout


WHOLE_STAGES = (("embedding", "layers.0"), ("layers.1", "head", "norms"))  # all weights of the first of two stages, or of the last


@pytest.mark.usefixtures("three_steps")
def test_a_stage_without_trained_weights_passes_gradients_on() -> None:
    """The first of two stages has no gradient, or the last only that of its input. Every optimizer makes a step without parameters."""
    cases: list[Case] = [
        Frozen("switch", "ddp", 2, 1, 3, "fp32", pp=2, schedule=schedule, freeze=parts)
        for schedule in ("1f1b", "zb_h1")
        for parts in WHOLE_STAGES
    ]
    cases += [Frozen("switch", "ddp", 2, 1, 3, "fp32", pp=2, freeze=WHOLE_STAGES[0], optimizer=kind) for kind in ("muon", "kfac", "sgd")]
    cases += [Frozen("switch", "ddp", 2, 1, 3, "fp32", pp=2, schedule="zb_v", layers=4, freeze=("embedding", "layers.0-1"))]
    alike = ["kind", "schedule", "pp", "world"]
    for case, ran in run_world(cases, 2):
        assert isinstance(case, Frozen)
        twin = replace(case, **{name: getattr(Frozen("switch", "ddp", 1, 1, 3, "fp32"), name) for name in alike})
        assert not isinstance(ran, str), (case.layout, ran)
        assert max(compare(ran[0], compute(twin)).values()) < 1e-5, case.layout


@pytest.mark.usefixtures("three_steps")
def test_engines_on_a_stage_without_trained_weights() -> None:
    cases: list[Case] = [Frozen("switch", kind, 4, 2, 3, "fp32", pp=2, freeze=parts) for kind in ("ddp", "fsdp") for parts in WHOLE_STAGES]
    for case, ran in run_world(cases, 4):
        assert isinstance(case, Frozen)
        assert farthest(ran[0], Frozen("switch", "ddp", 1, 1, 1, "fp32", freeze=case.freeze)) < 1e-5, case.layout


@pytest.mark.parametrize("parts", [(), ("layers.0",), ("embedding", "layers.0")], ids=str)
def test_a_first_stage_without_layers_trains_the_embedding(parts: tuple[str, ...], home: Path, tmp_path: Path) -> None:
    values: dict[str, Any] = {"train": {"freeze": parts, "steps": 4}, "router": {"jitter": 0.0, "group": "sequence"}}
    staged = values | {"degrees": {"pp": 2}, "pipeline": {"layers": [0, 2], "microbatches": 2}}
    for out, given in (("one", values), ("two", staged)):
        assert isinstance(trained.train(trained.recipe(home, **given), tmp_path / out, ranks=1 + (out == "two"))[0], dict)
    trained.close(tmp_path / "two", tmp_path / "one", rel=1e-6)


@pytest.mark.usefixtures("three_steps")
def test_kfac_on_two_ranks_is_that_of_one_with_frozen_parts() -> None:
    case = Frozen("switch", "ddp", 1, 1, 1, "fp32", freeze=("attention", "experts"), optimizer="kfac")
    alone, adamw = compute(case), compute(replace(case, optimizer="adamw"))
    for _, ran in run_world([replace(case, world=2, ep=2)], 2):
        assert not isinstance(ran, str), ran
        assert max(compare(ran[0], alone).values()) < 1e-5 < compare(adamw, alone)["update"]


@pytest.fixture(scope="module")
def cut(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that froze the router and the embedding, and stopped after 3 of 6 steps."""
    out = tmp_path_factory.mktemp("freeze") / "cut"
    assert isinstance(trained.train(frozen(home, steps=3), out)[0], dict)
    return out


def frozen(home: Path, **train: Any) -> Run:
    return trained.recipe(home, train={"freeze": ["router", "embedding"]} | train)


def test_a_line_says_that_first_values_are_kept(home: Path) -> None:
    given: Any = SimpleNamespace(code={}, allow_changes=())
    for source in (None, "a run"):
        start: Any = SimpleNamespace(found=None, source=source, resumed=SimpleNamespace(unused=lambda _: ()))
        said = [line for line in opening._recipe_lines(frozen(home), given, start) if line.startswith("train.freeze")]
        assert said == ["train.freeze: router, embedding keep their random first values, because there is no --init_from"] * (
            source is None
        )


def test_a_run_keeps_frozen_weights_without_moments_and_continues(cut: Path, home: Path, tmp_path: Path) -> None:
    assert isinstance(trained.train(frozen(home), tmp_path / "whole")[0], dict)
    saved = Reader(tmp_path / "whole/checkpoints/step-6")
    still = {"embedding", "layers.1.router.weight"}
    assert {name for name, kind in saved.entries if kind == "weight"} - {name for name, kind in saved.entries if kind == "exp_avg"} == still
    assert isinstance(trained.train(frozen(home), cut)[0], dict)
    first, last = trained.tensors(cut / "checkpoints/step-3"), trained.tensors(cut / "checkpoints/step-6")
    assert trained.tensors(tmp_path / "whole/checkpoints/step-6") == last
    weights = {key for key in first if key.endswith("/weight")}
    assert {key for key in weights if first[key] == last[key]} == {f"{name}/weight" for name in still}
    refused = trained.train(trained.recipe(home, train={"steps": 8}), cut)[0]
    assert str(refused).startswith("train.freeze: got [], needed [router, embedding], as in step-6, which has optimizer states")


def test_a_run_with_a_frozen_stage_is_that_of_one_process_and_continues(home: Path, tmp_path: Path) -> None:
    run = trained.recipe(home, train={"freeze": ["embedding", "layers.0"], "audit_every": 2}, degrees={"dp": 1, "pp": 2})
    trained.train(frozen(home, freeze=["embedding", "layers.0"]), tmp_path / "one")
    trained.train(run, tmp_path / "whole", ranks=2)
    trained.train(run, tmp_path / "cut", ranks=2, before=trained.stop_at(4))
    assert isinstance(trained.train(run, tmp_path / "cut", ranks=2)[0], dict)
    assert trained.losses(tmp_path / "cut") == trained.losses(tmp_path / "whole")
    name = "checkpoints/step-6"
    assert trained.tensors(tmp_path / "cut" / name) == trained.tensors(tmp_path / "whole" / name)
    one, two = (Reader(tmp_path / out / name) for out in ("one", "whole"))
    assert one.entries.keys() == two.entries.keys()
    for entry, kind in one.entries:
        box = tuple(slice(0, size) for size in one.names(kind)[entry])
        torch.testing.assert_close(two.region(entry, kind, box), one.region(entry, kind, box), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("parts", "others", "said"),
    [
        (["rooter"], {}, "train.freeze: got rooter, needed embedding, .*; fix: set it to \\[router\\]"),
        (["layers.1-2"], {}, "got layers.1-2, needed layers from 0 to 1"),
        (["layers.1-0"], {}, "got layers.1-0, needed layers from 0 to 1"),
        (
            ["head"],
            {"model": {"tied_embeddings": True}},
            "got head, needed a head that is not tied to the embedding.*set it to \\[embedding\\]",
        ),
        (["experts", "norms"], {"model": {"moe_every": 0}}, "got experts, needed layers with experts; fix: set it to \\[norms\\]"),
        (["layers.0-1", "embedding", "norms"], {}, "got all of the model"),
        (["layers.0"], {"degrees": {"pp": 2}, "sharding": {"kind": "zero", "stage": 1}}, "got layers.0 with degrees.pp=2 and zero1"),
    ],
)
def test_bad_parts_are_one_line(parts: list[str], others: dict[str, Any], said: str, home: Path) -> None:
    with pytest.raises(BadInput, match=said):
        check_run(trained.recipe(home, train={"freeze": parts}, **others), others.get("degrees", {}).get("pp", 1))


@pytest.mark.parametrize(
    ("text", "parts"), [("router", ["router"]), ("[router, layers.0-3]", ["router", "layers.0-3"]), ('["norms"]', ["norms"]), ("[]", [])]
)
def test_the_command_line_takes_one_part_or_a_list(text: str, parts: list[str]) -> None:
    assert load("switch_tiny", {"train.freeze": text})[0].train.freeze == tuple(parts)


def test_the_fix_of_a_list_with_a_number_can_be_typed() -> None:
    with pytest.raises(BadInput, match="train.freeze: got 1, needed .*; fix: set train.freeze to a value like \\[\\]$"):
        load("switch_tiny", {"train.freeze": "[1]"})


def test_a_frozen_weight_has_no_gradient_and_no_state() -> None:
    case = Frozen("gshard", "ddp", 1, 1, 1, "fp32", freeze=("attention",))
    ran = compute(case)
    assert not any(".attention." in name for name in ran.gradients) and any(".experts." in name for name in ran.gradients)
    assert all(torch.isfinite(value).all() for value in ran.gradients.values())


def test_names_with_commas_are_a_list() -> None:
    """As on a command line: --train.freeze router,layers.0."""
    run = build_run({"train": {"freeze": "router, layers.0"}, "lora": {"targets": "attention,experts"}})
    assert run.train.freeze == ("router", "layers.0") and run.lora.targets == ("attention", "experts")
