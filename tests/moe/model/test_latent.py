"""Latent attention: training steps on one process and on ranks equal the plain twin, which makes keys and values of every head. Its
key-value cache holds latents only.

Only these tests notice values of one head used as keys of another, a rotary key that heads do not share, or cached attention without YaRN's
factor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from moe.checks.together import check_run
from moe.model.transformer import Transformer
from moe.recipe.load import build_run
from moe.recipe.sections import Latent, Model, Rope, Run
from moe.train.use.decode import Cached, Recomputed
from moe.verify.cases import Case
from moe.verify.expected import compare
from moe.verify.layouts import compute, run_world
from parallel.errors import BadInput
from tests.support.twins import three_steps_of

YARN = {"base": 700.0, "scaling": "yarn", "factor": 4.0, "trained_length": 40, "high": 3.0, "mscale": 0.7, "mscale_all": 1.3}
SIZES = {"head_size": 6, "num_kv_heads": None, "latent": {"key_rank": 10, "query_rank": 14, "rotary_size": 4, "value_size": 5}}


@dataclass(frozen=True)
class Low(Case):
    """A case of `moe verify` with latent attention. `full`: queries without a latent, and rotary channels paired in halves."""

    full: bool = False

    def run(self) -> Run:
        values = super().run().model_dump(mode="json")
        options: dict[str, Any] = SIZES | {"rope": YARN | {"pairs": "neighbours"}, "out_bias": False}
        if self.full:
            options |= {"latent": {"key_rank": 9, "rotary_size": 6}, "attention_sinks": True}
            options |= {"rope": YARN | {"whole_pairs": False, "mscale_all": 0.0}}
        return build_run(values | {"model": values["model"] | options})


def farthest(case: Low, ran: Any) -> float:
    """Return the largest error. With sinks, weight updates are left out: sinks start at 0, and Adam amplifies rounding errors of tiny
    gradients.
    """
    assert not isinstance(ran, str), ran
    numbers = compare(ran, three_steps_of(Low(case.model, "ddp", 1, 1, 1, "fp32", length=case.length, full=case.full)))
    return max(value for name, value in numbers.items() if not (case.full and name == "update"))


@pytest.mark.usefixtures("three_steps")
@pytest.mark.parametrize("case", [
    Low("dense", "ddp", 1, 1, 1, "fp32"),
    Low("deepseek", "ddp", 1, 1, 2, "fp32", recompute="full"),
    Low("dense", "ddp", 1, 1, 1, "fp32", full=True),
])  # fmt: skip
def test_three_steps_of_one_process_are_the_plain_twins(case: Low) -> None:
    assert farthest(case, compute(case)) < 1e-5


@pytest.mark.usefixtures("three_steps")
def test_three_steps_on_ranks_are_the_plain_twins() -> None:
    plain = Low("dense", "ddp", 2, 1, 1, "fp32")
    cases = [replace(plain, kind=kind) for kind in ("fsdp", "zero3")] + [replace(plain, pp=2), Low("deepseek", "ddp", 2, 2, 1, "fp32")]
    cases += [replace(plain, sp=2, length=24, attention=kind) for kind in ("zigzag", "ulysses")]
    for case, ran in run_world(list(cases), 2):
        assert isinstance(case, Low) and not isinstance(ran, str), ran
        assert farthest(case, ran[0]) < 1e-5, case.layout


@pytest.mark.parametrize("window", [None, 4])
def test_a_cache_of_latents_gives_the_logits_of_recomputation(window: int | None) -> None:
    """Logits equal those without a cache. The cache holds key_rank + rotary_size numbers per token and layer, for any number of heads."""
    model = Transformer(
        Model(num_layers=2, d_model=24, num_heads=4, d_ff=20, max_length=9, head_size=6, rope=Rope(**YARN), sliding_window=window,
              latent=Latent(**SIZES["latent"]), attention_sinks=window is not None), vocab_size=31,
    ).eval()  # fmt: skip
    tokens_BL = torch.randint(31, (2, 9), generator=torch.Generator().manual_seed(1))
    cached, plain = Cached(model), Recomputed(model, 9)
    with torch.no_grad():
        for seen in (4, 5, 6, 9):
            torch.testing.assert_close(cached(tokens_BL[:, :seen], 0), plain(tokens_BL[:, :seen], 0), rtol=1e-4, atol=1e-5)
    held = {tensor.untyped_storage().data_ptr(): tensor.numel() for pair in cached.cache._kept.values() for tensor in pair}
    assert sum(held.values()) == 2 * 2 * 9 * (10 + 4)  # layers * sequences * positions * (key_rank + rotary_size)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"latent": {"query_rank": 8}}, "model.latent.query_rank: got 8 with model.latent.key_rank=null"),
        ({"num_kv_heads": 2}, "model.num_kv_heads: got 2 with model.latent.key_rank=8, needed null"),
        ({"qk_norm": "heads"}, "model.qk_norm: got heads with .*, needed none"),
        ({"qkv_bias": True}, "model.qkv_bias: got true with"),
        ({"positions": "t5"}, "model.positions: got t5 with .*, needed rotary"),
        ({"latent": {"key_rank": 8, "rotary_size": 3}}, "model.latent.rotary_size: got 3, needed an even number"),
        ({"latent": {"key_rank": 8, "value_size": 200}}, "model.latent.value_size: got 200, needed at most the 96 channels"),
        ({"rope": {"mscale": 0.7}}, "model.rope.mscale: got 0.7 with model.rope.scaling=none, needed model.rope.scaling yarn"),
        ({"latent": {}, "rope": YARN}, "model.rope.mscale_all: got 1.3 with model.latent.key_rank=null, needed latent attention"),
        ({"tp": 4}, "tensor.kind: got 2d with model.latent.key_rank=8, needed 1d"),
    ],
)
def test_what_does_not_go_together_is_refused(values: dict[str, Any], said: str) -> None:
    tp = values.get("tp", 1)
    model = {"latent": {"key_rank": 8}} | {key: value for key, value in values.items() if key != "tp"}
    with pytest.raises(BadInput, match=said):
        check_run(build_run({"model": model, "degrees": {"tp": tp}, "tensor": {"kind": "2d"}}), tp)
