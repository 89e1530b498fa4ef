"""`moe verify --recipe`: the small version keeps the recipe's settings, correct layouts pass, and a faulty plugin fails."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe.recipe.load import load
from moe.verify.cases import as_written
from moe.verify.expected import Expected, twin_of
from moe.verify.kinds import recipe_cases
from moe.verify.small import known
from moe.verify.verify import _sums, main

PARTS = """
from moe.experts.dispatch.all_to_all import AllToAll
from moe.experts.dispatch.steps import Steps


class Rows(AllToAll):
    pass


class Doubled(Steps):
    \"\"\"Doubles the output of the last token.\"\"\"

    def run(self, x_TD, routing, experts, *, dropout=None):
        y_TD = super().run(x_TD, routing, experts, dropout=dropout).clone()
        y_TD[-1] *= 2
        return y_TD


class Loses(AllToAll):
    def open(self, mesh, sizes):
        return Doubled.over(("ep",), mesh, sizes)
"""


@pytest.mark.parametrize("name", ["dense_tiny", "glam_tiny", "pr_moe_tiny", "switch_t5_tiny", "published/deepseek_v3"])
def test_a_small_recipe_keeps_all_settings_that_are_no_sizes(name: str) -> None:
    run, _ = load(name)
    cases, _ = recipe_cases(name, 2)
    made = cases[0].run()
    assert known(made) and {case.world for case in cases} == {1, 2}
    assert (made.model.ffn, made.model.positions, made.model.kind) == (run.model.ffn, run.model.positions, run.model.kind)
    assert bool(made.model.layers_with_experts()) == bool(run.model.layers_with_experts())
    if made.model.layers_with_experts():
        for key in ("num_choices", "score", "select", "gates", "capacity_factor", "balance_weight", "bias_rate", "drop"):
            assert getattr(made.router, key) == getattr(run.router, key), key
        assert (made.experts.shared, made.experts.residual) == (run.experts.shared, run.experts.residual)


def test_a_small_recipe_keeps_windows_and_adapters(tmp_path: Path) -> None:
    path = tmp_path / "windows.yaml"
    for slides, kept in (("null", None), ("[1, 3]", (1,)), ("[0, 1, 2]", (0,)), ("[0, 1, 2, 3]", None)):
        path.write_text(f"extends: dense_tiny\nmodel: {{sliding_window: 64, sliding_layers: {slides}}}\nlora: {{rank: 4}}\n")
        cases, said = recipe_cases(str(path), 2)
        model = cases[0].run().model
        assert model.sliding_window is not None and model.sliding_window < model.max_length and model.sliding_layers == kept
        assert (cases[0].run().lora.rank, cases[0].run().lora.scale) == (3, 16 / 4) and any(case.tp > 1 for case in cases) and not said


def test_biases_that_begin_at_zero_pass(tmp_path: Path) -> None:
    """Biases of queries, keys and values, as in Qwen2. With Adam's usual eps, rounding alone changed their first update by 3e-5."""
    path = tmp_path / "biases.yaml"
    path.write_text("model: {qkv_bias: true}\n")
    assert main(nproc=1, recipe=str(path)) == 0


def test_a_recipe_as_it_is_in_bf16_prints_the_limits_that_its_rows_have() -> None:
    """Its tolerances were printed as inf, because only the bound to the twin in fp32 limits such a row."""
    model = {"num_layers": 2, "d_model": 24, "num_heads": 4, "d_ff": 20, "max_length": 12, "moe_every": 0}
    train = {"freeze": ["attention"], "global_batch": 4, "eval_sequences": 4}
    values = {"model": model, "train": train, "precision": {"compute": "bf16"}, "degrees": {"dp": 1, "ep": 1}}
    case = as_written(values, 1, name="as-it-is")
    expected = Expected.of(twin_of(case))
    assert expected.bound is not None
    expected.bound.draw()
    limits = list(_sums([], {twin_of(case): expected}, 1, 0.0))[-1]
    assert limits.startswith("  as-it-is bf16") and "update" in limits and "inf" not in limits and "nan" not in limits, limits


def test_a_small_recipe_rotates_an_even_number_of_a_heads_6_channels(tmp_path: Path) -> None:
    for given, kept in ((0.03125, 2), (0.25, 2), (0.5, 4), (0.96875, 4), (1.0, 6)):
        (tmp_path / "mine.yaml").write_text(f"extends: dense_tiny\nmodel: {{head_size: 64, rope: {{fraction: {given}}}}}\n")
        assert recipe_cases(str(tmp_path / "mine.yaml"), 1)[0][0].run().model.rope.turning(6) == kept, given


def test_a_small_recipe_has_small_sizes_of_latent_attention_and_multi_token_prediction(tmp_path: Path) -> None:
    latent = "latent: {key_rank: 512, query_rank: 1536, rotary_size: 64, value_size: 128}"
    (tmp_path / "mine.yaml").write_text(f"extends: published/deepseek_v3\nmodel: {{num_kv_heads: null, ahead: 16, {latent}}}\n")
    model = recipe_cases(str(tmp_path / "mine.yaml"), 1)[0][0].run().model
    assert (model.latent.key_rank, model.latent.query_rank, model.latent.rotary_size, model.latent.value_size) == (10, 14, 4, None)
    assert model.latent_sizes.content == 6 and model.ahead == 2


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "rows_xq.py").write_text(PARTS)
    yield tmp_path
    sys.modules.pop("rows_xq", None)


def test_a_correct_plug_in_dispatcher_passes_and_a_faulty_one_fails(folder: Path) -> None:
    said: list[str] = []
    for name, wrong in (("Rows", 0), ("Loses", 1)):
        (folder / f"{name}.yaml").write_text(f"extends: switch_tiny\ndispatch: {{kind: 'rows_xq:{name}'}}\n")
        assert main(nproc=2, recipe=f"{name}.yaml", only="dp2 ep2 m1 ddp", say=said.append) == wrong
    assert sum("1 passed, 0 failed" in line for line in said) == 1 == sum("0 passed, 1 failed" in line for line in said)


def test_the_dpo_of_the_docs_passes_on_packed_pairs(folder: Path) -> None:
    """Two ranks with pairs in packed sequences compute the loss of docs/use/dpo.py as one does."""
    (folder / "dpo.py").write_text((Path(__file__).resolve().parents[3] / "docs/use/dpo.py").read_text(encoding="utf-8"))
    (folder / "preferences.yaml").write_text("extends: switch_tiny\ntrain: {loss: 'dpo:without_reference'}\n")
    said: list[str] = []
    assert main(nproc=2, recipe="preferences.yaml", only="dp2 ep2 m1 packed ddp", say=said.append) == 0
    assert any("1 passed, 0 failed" in line for line in said)
    sys.modules.pop("dpo", None)


def test_an_encoder_decoder_with_normed_queries_and_biases_passes_under_tp(tmp_path: Path) -> None:
    """Its encoder would read padding, so it has no padded batch. Under tp, cross attention's norms over all heads need sums over ranks."""
    path = tmp_path / "mine.yaml"
    path.write_text("extends: switch_t5_tiny\nmodel: {qk_norm: whole, qkv_bias: true, num_kv_heads: 2}\n")
    said: list[str] = []
    assert main(nproc=2, recipe=str(path), only="tp2", say=said.append) == 0, said
    assert any("tp2-1d" in line and "pass" in line for line in said)
    assert not any(case.padded for case in recipe_cases(str(path), 2)[0])
