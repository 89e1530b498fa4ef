"""The layouts of all parameters, compared with a table made by hand; the units that engines gather; and the parameters that are read in
fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from moe.experts.dispatch.steps import Steps
from moe.model.transformer import StageLayers, Transformer, embedding_as_module
from moe.parallelize.build import build, save_memory
from moe.parallelize.engines import read_in_fp32, units_of
from moe.parallelize.plan import FAMILIES, lay_out, plan_of
from moe.recipe import sections
from moe.recipe.load import build_run
from moe.recipe.sections import Run
from parallel.mesh.layout import Tile
from parallel.mesh.mesh import DENSE, EXPERT, Degrees, Mesh

MODEL = {
    "num_layers": 2, "d_model": 24, "num_heads": 4, "num_kv_heads": 2, "d_ff": 40, "ffn": "geglu", "positions": "t5", "moe_every": 2,
    "tied_embeddings": False, "vocab_size": 90,
}  # fmt: skip
VALUES = {
    "model": MODEL,
    "experts": {"num_experts": 8, "d_ff": 32, "shared": 1, "shared_gate": True},
    "router": {"preset": "mixtral", "noise": "noisy_top_k"},
}
SPLIT_1, SPLIT_2 = {0: "ep", 2: "etp"}, {0: "ep", 1: "etp"}


def layer(number: int) -> dict[str, tuple[Any, ...]]:
    """Return name -> (shape, split, family) for the parameters that every layer has."""
    attention = {"q": (24, 24), "k": (12, 24), "v": (12, 24), "out": (24, 24), "bias": (32, 4)}
    found = {f"layers.{number}.attention.{name}.weight": (shape, {}, "dense") for name, shape in attention.items()}
    return found | {f"layers.{number}.{name}.weight": ((24,), {}, "dense") for name in ("attention_norm", "ffn_norm")}


TABLE = layer(0) | layer(1) | {
    "embedding": ((90, 24), {}, "dense"),
    "head.weight": ((90, 24), {}, "dense"),
    "norm.weight": ((24,), {}, "dense"),
    "layers.0.ffn.w1.weight": ((40, 24), {}, "dense"),
    "layers.0.ffn.w2.weight": ((24, 40), {}, "dense"),
    "layers.0.ffn.w3.weight": ((40, 24), {}, "dense"),
    "layers.1.moe.router.weight": ((8, 24), {}, "router"),
    "layers.1.moe.router.noise_weight": ((8, 24), {}, "router"),
    "layers.1.moe.experts.w1": ((8, 24, 32), SPLIT_1, "expert"),
    "layers.1.moe.experts.w2": ((8, 32, 24), SPLIT_2, "expert"),
    "layers.1.moe.experts.w3": ((8, 24, 32), SPLIT_1, "expert"),
    "layers.1.moe.shared.w1.weight": ((32, 24), {}, "dense"),
    "layers.1.moe.shared.w2.weight": ((24, 32), {}, "dense"),
    "layers.1.moe.shared.w3.weight": ((32, 24), {}, "dense"),
    "layers.1.moe.shared_gate.weight": ((1, 24), {}, "dense"),
}  # fmt: skip


def on_meta(values: Mapping[str, Any], **more: Any) -> tuple[Run, Transformer]:
    run = build_run(dict(values) | more)
    with torch.device("meta"):
        model = Transformer(run.model, run.experts, run.router, vocab_size=run.vocab_size, compute=torch.bfloat16)
    return run, save_memory(model, tiling=run.tiling)


def test_layouts_equal_the_table() -> None:
    layouts = lay_out(on_meta(VALUES)[1])
    assert {name: (layout.shape, dict(layout.split), layout.family) for name, layout in layouts.items()} == TABLE
    for name, layout in layouts.items():
        expert = ".experts." in name
        assert expert or layout.alike == (() if ".moe." in name else ("tp",))  # in a MoE layer, each token is on one rank of tp
        assert layout.view == (EXPERT if expert else DENSE) and layout.family in FAMILIES and layout.tile is None
        assert layout.unstack == (name.replace(".moe.", ".").replace("experts.", "experts.{}.") if expert else None)


def test_a_tile_has_the_layout_of_the_whole_matrix() -> None:
    """Tiles split the hidden units of networks and experts, and the rows of embedding and head. Otherwise a tile has the layout of the
    whole.
    """
    tiled = lay_out(on_meta(VALUES, tiling={"ffn": 2, "head": 3})[1])
    found = {name: (layout.tile, layout.shape, dict(layout.split)) for name, layout in tiled.items() if layout.tile is not None}
    want: dict[str, tuple[Any, ...]] = {}
    for i in range(2):
        for path in ("layers.0.ffn", "layers.1.moe.shared"):
            for matrix, dim in (("w1", 0), ("w2", 1), ("w3", 0)):
                want[f"{path}.tiles.{i}.{matrix}.weight"] = (Tile(dim, i, 2), TABLE[f"{path}.{matrix}.weight"][0], {})
        for matrix, dim in (("w1", 2), ("w2", 1), ("w3", 2)):
            shape, split, _ = TABLE[f"layers.1.moe.experts.{matrix}"]
            want[f"layers.1.moe.experts.tiles.{i}.{matrix}"] = (Tile(dim, i, 2), shape, split)
    for i in range(3):
        want |= {f"{name}.tiles.{i}.weight": (Tile(0, i, 3), (90, 24), {}) for name in ("embedding", "head")}
    assert found == want


@pytest.mark.parametrize("tiles", [1, 2])
def test_a_rank_holds_shards_of_some_experts(tiles: int) -> None:
    """Rank 6 of dp 8, ep 2, etp 2 has index 1 on ep and 0 on etp, so it holds experts 4 to 7 and hidden units 0 to 15."""
    run = build_run(VALUES | {"degrees": {"dp": 8, "ep": 2, "etp": 2}, "tiling": {"ffn": tiles}})
    model, layouts = build(run, Mesh.of(Degrees(dp=8, ep=2, etp=2), 6), device=torch.device("cpu"))
    moe = model.layers[1].moe
    assert moe is not None and moe.experts.held == (4, 5, 6, 7) and moe.experts.hidden == slice(0, 16)
    assert type(moe.dispatcher) is Steps and moe.dispatcher.axis.label == moe.dispatcher.etp.label == "layers.1"
    parts = [p for name, p in model.named_parameters() if name.endswith(".w1") and ".experts." in name]
    assert [tuple(p.shape) for p in parts] == [(4, 24, 16 // tiles)] * tiles and layouts.keys() == dict(model.named_parameters()).keys()


def test_units_are_gathered_in_the_order_in_which_they_run() -> None:
    """Each parameter is in one unit, except those that are read in fp32. A tile is a unit of its own, and is never prefetched."""
    for tiling, paths in (
        ({}, ["embedding", "layers.0", "layers.1", "layers.1.moe", "layers.1.moe.shared", "head"]),
        (
            {"ffn": 2, "head": 2},
            ["embedding.tiles.0", "embedding.tiles.1", "layers.0", "layers.0.ffn.tiles.0", "layers.0.ffn.tiles.1", "layers.1"]
            + ["layers.1.moe.shared.tiles.0", "layers.1.moe.shared.tiles.1", "layers.1.moe.experts.tiles.0", "layers.1.moe.experts.tiles.1"]
            + ["head.tiles.0", "head.tiles.1"],
        ),
    ):
        _, model = on_meta(VALUES, tiling=tiling)
        embedding_as_module(model)
        units, small = units_of(model), read_in_fp32(model)
        assert [unit.path for unit in units] == paths
        every = [*small, *(name for unit in units for name in unit.parameters)]
        assert sorted(every) == sorted(name for name, _ in model.named_parameters())
        assert all(unit.ahead != ("tiles" in unit.path) and unit.backward != unit.path.startswith("embedding") for unit in units)
    norms = {f"layers.{i}.{name}.weight" for i in (0, 1) for name in ("attention_norm", "ffn_norm", "attention.bias")}
    router = {f"layers.1.moe.{name}" for name in ("router.weight", "router.noise_weight", "shared_gate.weight")}
    assert small == norms | router | {"norm.weight"}


def test_a_position_bias_without_its_layer_is_in_no_unit() -> None:
    """A rank with the last layer of a decoder holds the position bias of the decoder's first layer, and nothing else of that layer."""
    _, model = on_meta({"model": MODEL | {"num_layers": 4, "kind": "encoder_decoder"}, "data": {"objective": "span_corruption"}})
    model.hold({3: StageLayers(range(3, 4), begins=False, ends=True)})
    assert "layers.2.attention.bias.weight" in dict(model.named_parameters())
    assert [unit.path for unit in units_of(model)] == ["layers.3", "layers.3.moe", "head"]


def test_sinks_are_read_in_fp32() -> None:
    for latent in ({}, {"key_rank": 8}):
        model = {"num_layers": 1, "d_model": 24, "num_heads": 4, "attention_sinks": True, "ahead": 1, "latent": latent}
        sinks = {f"{block}.attention.sinks.weight" for block in ("layers.0", "ahead.0.block")}
        assert sinks <= read_in_fp32(on_meta({"model": model})[1])


def test_the_plan_can_be_printed() -> None:
    lines = str(plan_of(sections.Dispatch(kind="padded"))).splitlines()
    assert [line.split()[0] for line in lines] == ["layers.*.moe.experts.*", "layers.*.moe.router.**", "layers.*.moe.**", "**"]
    assert "kind='padded'" in lines[0] and "hidden='etp'" in lines[0] and lines[3].endswith("Copied(family='dense', alike=('tp',))")
