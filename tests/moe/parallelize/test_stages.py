"""Pipeline stages of a model: each layer is in a stage, each element has one owner, and a cut that cannot work is refused with a fix that
works.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.checks.advice import applied
from moe.checks.pipeline import check_pipeline
from moe.checks.together import check_together
from moe.model.transformer import Transformer
from moe.parallelize import stages
from moe.parallelize.build import whole_layouts
from moe.parallelize.plan import lay_out
from moe.plan.pipeline import described, layers_of, schedule_of
from moe.recipe.load import build_run
from moe.recipe.sections import Run
from parallel.errors import BadInput
from parallel.mesh.mesh import Mesh
from parallel.pipeline.order_file import write_order
from parallel.pipeline.schedules import SCHEDULES

SIZES = {"num_layers": 8, "d_model": 16, "num_heads": 2, "d_ff": 20, "max_length": 8, "moe_every": 2}


def recipe(**sections: dict[str, Any]) -> Run:
    values: dict[str, dict[str, Any]] = {"model": SIZES, "experts": {"num_experts": 4}, "train": {"global_batch": 48}}
    return build_run({name: values.get(name, {}) | sections.get(name, {}) for name in values | sections})


def staged(name: str, *, pp: int, dp: int = 1, tied: bool = True, **pipeline: Any) -> Run:
    delayed = SCHEDULES[name].continuous
    return recipe(
        model={"tied_embeddings": tied and not delayed},
        degrees={"pp": pp, "dp": dp, "ep": dp},
        pipeline={"schedule": name, "microbatches": 1 if name == "pipedream" else 12} | pipeline,
        optimizer={"clip_norm": None if delayed else 1.0},
    )


def held(run: Run) -> list[dict[str, Any]]:
    """Return for each rank: parameter -> (whether the rank is its owner, the region of the whole that it holds)."""
    found = []
    for rank in range(run.degrees.pp * int(run.degrees.dp)):
        with torch.device("meta"):
            model = Transformer(run.model, run.experts, run.router, vocab_size=run.vocab_size)
        mesh = Mesh.of(run.mesh_degrees(), rank)
        layouts = stages.hold(run, model, lay_out(model), mesh)
        assert set(layouts) == {name for name, _ in model.named_parameters()}
        found.append({name: (layout.is_owner(mesh), layout.region(mesh)) for name, layout in layouts.items()})
    return found


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("pp", "dp"), [(2, 1), (4, 2)])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_element_has_one_owner(name: str, pp: int, dp: int, tied: bool) -> None:
    """Exactly one rank owns each region of each parameter, with replicas of stages, an embedding on two stages, and ep within a stage."""
    check_owners(staged(name, pp=pp, dp=dp, tied=tied))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("name", "layers"), [("1f1b", (0, 3, 5, 0)), ("chimera", (3, 3, 2, 0)), ("zb_v", (0, 2, 0, 2, 1, 1, 2, 0))])
def test_stages_without_layers_hold_the_ends_of_the_model(name: str, layers: tuple[int, ...], tied: bool) -> None:
    """A first or last stage without layers holds the embedding or the head; any other stage without layers holds nothing."""
    run = staged(name, pp=4, dp=2, tied=tied, layers=layers)
    check_pipeline(run)
    check_owners(run)
    last = set(held(run)[-1 if name == "1f1b" else 0])
    ends = {"norm.weight", "embedding" if tied else "head.weight"} | ({"embedding"} if name == "zb_v" else set())
    assert (last == ends) == (name != "chimera")  # in chimera, the last stage's ranks also hold the first stage, which has layers


def check_owners(run: Run) -> None:
    owners: Counter[tuple[str, str]] = Counter()
    for layouts in held(run):
        owners.update((parameter, str(region)) for parameter, (owner, region) in layouts.items() if owner)
    assert set(owners.values()) == {1}
    assert {parameter for parameter, _ in owners} == set(whole_layouts(run))


@given(pp=st.integers(1, 6), name=st.sampled_from(["1f1b", "interleaved", "zb_v", "chimera", "dualpipe"]), layers=st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_stages_are_consecutive_layers_or_refused_with_a_fix_that_works(pp: int, name: str, layers: int) -> None:
    pp += pp % 2 if name in ("chimera", "dualpipe") else 0
    run = recipe(model={"num_layers": layers, "moe_every": 0}, degrees={"pp": pp}, pipeline={"schedule": name, "microbatches": 60})
    schedule = schedule_of(run)
    try:
        cut = layers_of(run, schedule)
    except BadInput as refused:
        assert schedule.num_stages > layers and refused.what == "degrees.pp"
        again = build_run(applied(refused.fix.ways(refused.what)[0], run.model_dump()))
        assert layers < 2 or again.degrees.pp == 1 or layers_of(again, schedule_of(again))
        return
    assert [layer for part in cut for layer in part] == list(range(layers)) and len(cut) == schedule.num_stages and all(cut)


def test_the_cut_by_flops_counts_the_head() -> None:
    """The head costs as much as several of these small layers, so the last stage gets fewer layers."""
    run = recipe(model={"vocab_size": 4096, "tied_embeddings": False}, degrees={"pp": 2})
    first, last = (len(part) for part in layers_of(run, schedule_of(run)))
    assert first > last and described(run).startswith(f"1f1b: stages of {first}, {last} layers, 1 micro-batch, ranks idle")
    alone = staged("1f1b", pp=2, layers=[8, 0])
    assert described(alone).startswith("1f1b: stages of 8, 0 layers")
    listed = staged("1f1b", pp=2, layers=[2, 6])
    assert [len(part) for part in layers_of(listed, schedule_of(listed))] == [2, 6]


REFUSED: dict[str, tuple[dict[str, dict[str, Any]], str, str]] = {
    "stages than layers": ({"degrees": {"pp": 16}}, "degrees.pp", "set degrees.pp to 8"),
    "chunks": (
        {"degrees": {"pp": 4}, "pipeline": {"schedule": "interleaved", "chunks": 3, "microbatches": 4}},
        "degrees.pp",
        "set pipeline.chunks to 2",
    ),
    "a list too short": ({"degrees": {"pp": 4}, "pipeline": {"layers": [4, 4]}}, "pipeline.layers", "set it to [2, 2, 3, 1]"),
    "a list of too many": ({"degrees": {"pp": 2}, "pipeline": {"layers": [4, 5]}}, "pipeline.layers", "for a cut by FLOPs"),
    "below nothing": ({"degrees": {"pp": 2}, "pipeline": {"layers": [9, -1]}}, "pipeline.layers", "set it to [5, 3], or to null"),
    "a rank with nothing": ({"degrees": {"pp": 4}, "pipeline": {"layers": [4, 4, 0, 0]}}, "pipeline.layers", "set it to [2, 2, 3, 1]"),
    "a short list of many": (
        {"degrees": {"pp": 10}, "pipeline": {"layers": [4, 4]}},
        "pipeline.layers",
        "set it to [0, 1, 1, 1, 1, 1, 1, 1, 1, 0]",
    ),
    "chimera odd": (
        {"degrees": {"pp": 3}, "pipeline": {"schedule": "chimera", "microbatches": 6}},
        "degrees.pp",
        "set it to one of [2, 4]",
    ),
    "chimera m": (
        {"degrees": {"pp": 4}, "pipeline": {"schedule": "chimera", "microbatches": 6}},
        "pipeline.microbatches",
        "set it to one of [4, 8]",
    ),
    "zb_v chunks": ({"degrees": {"pp": 2}, "pipeline": {"schedule": "zb_v", "chunks": 3}}, "pipeline.chunks", "set it to 2"),
    "two_bw m": ({"degrees": {"pp": 4}, "pipeline": {"schedule": "two_bw"}}, "pipeline.microbatches", "set it to 4"),
    "no such": ({"degrees": {"pp": 2}, "pipeline": {"schedule": "chimaera"}}, "pipeline.schedule", "did you mean chimera?"),
    "vertical sync": ({"degrees": {"pp": 2}, "pipeline": {"vertical_sync": True}}, "pipeline.vertical_sync", "take schedule pipedream"),
    "pipelines": ({"degrees": {"pp": 2}, "pipeline": {"pipelines": 2}}, "pipeline.pipelines", "take schedule chimera"),
    "dp": ({"degrees": {"pp": 2}, "sharding": {"kind": "dp"}}, "sharding.kind", "set sharding.kind to ddp"),
    "fsdp": (
        {"degrees": {"pp": 2}, "sharding": {"kind": "fsdp"}},
        "sharding.kind",
        "sharding.reshard to false, or sharding.allow_slow to true",
    ),
    "zero 2": ({"degrees": {"pp": 2}, "sharding": {"kind": "zero", "stage": 2}}, "sharding.kind", "stage to 1"),
    "parameters on the host": (
        {"degrees": {"pp": 2}, "sharding": {"kind": "zero", "stage": 3, "allow_slow": True, "offload": {"parameters": "cpu"}}},
        "sharding.offload.parameters",
        "sharding.offload.optimizer to cpu and sharding.offload.parameters to none",
    ),
    "no file": ({"degrees": {"pp": 2}, "pipeline": {"schedule": "nowhere.csv"}}, "schedule", "moe simulate"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_pipeline_cannot_do_is_one_line(case: str) -> None:
    sections, what, fix = REFUSED[case]
    with pytest.raises(BadInput) as refused:
        check_together(recipe(**sections))
    assert refused.value.what == what and fix in str(refused.value.fix) and "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb_v"])
def test_fixes_of_a_list_of_layers_are_accepted(name: str) -> None:
    """Each fix of a refused pipeline.layers passes the check, also with two stages per rank and with fewer layers than stages."""
    for layers, pp, listed in itertools.product(range(1, 6), range(2, 7), ("short", "one behind")):
        stages = pp * (1 if name == "1f1b" else 2)
        numbers = [layers] if listed == "short" else [0] * (stages - 1) + [layers]
        sizes, pipeline = {"num_layers": layers, "moe_every": 0}, {"schedule": name, "microbatches": 12}
        try:
            check_pipeline(recipe(model=sizes, degrees={"pp": pp}, pipeline=pipeline | {"layers": numbers}))
        except BadInput as refused:
            values = recipe(model=sizes, degrees={"pp": pp}, pipeline=pipeline | {"layers": numbers}).model_dump()
            for way in refused.fix.ways(refused.what) if refused.what == "pipeline.layers" else []:
                check_pipeline(build_run(applied(way, values)))


def test_without_stages_the_pipeline_settings_are_not_checked() -> None:
    check_pipeline(recipe(pipeline={"schedule": "chimera", "microbatches": 3}, sharding={"kind": "fsdp"}))


def test_an_order_from_a_file_is_a_schedule_like_any_other(tmp_path: Any) -> None:
    path = tmp_path / "mine.csv"
    write_order(schedule_of(staged("zb_h1", pp=2)), path)
    run = staged("1f1b", pp=2, schedule=str(path))
    check_pipeline(run)
    assert schedule_of(run).orders == schedule_of(staged("zb_h1", pp=2)).orders
    for pipeline, degrees, what in (({"microbatches": 6}, {}, "pipeline.microbatches"), ({}, {"pp": 4}, "degrees.pp")):
        with pytest.raises(BadInput, match=f"^{what}: got"):
            check_pipeline(recipe(degrees={"pp": 2} | degrees, pipeline={"schedule": str(path), "microbatches": 12} | pipeline))
