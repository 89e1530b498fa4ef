"""Options of attention and norms: rotary base, scaling and fraction; norms and bounds of queries and keys; norm epsilon; factors of
embedding, residual, attention and head. Training steps equal the plain twin of `moe verify`; rotations equal transformers'.

Only these tests notice a gain of the queries' norm whose gradient is not summed over the ranks that have other heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from moe.checks.together import check_run
from moe.model.transformer import Transformer
from moe.nn.context import Context
from moe.nn.rotary import DEFAULT, rates, rotate
from moe.recipe.load import build_run
from moe.recipe.sections import Model, Rope, Run, Scales
from moe.train.use.decode import Cached, Recomputed
from moe.verify.cases import Case
from moe.verify.expected import compare
from moe.verify.layouts import compute, run_world
from parallel.errors import BadInput
from tests.support.twins import three_steps_of

ROPES: dict[str, dict[str, Any]] = {
    "none": {"base": 400.0},
    "linear": {"scaling": "linear", "factor": 3.0, "fraction": 0.45, "pairs": "neighbours"},  # of 6 channels, 2.7 are rounded down to 2
    "ntk": {"scaling": "ntk", "factor": 3.0, "fraction": 2 / 3},
    # trained_length is below the sequences' 10 tokens
    "dynamic": {"base": 300.0, "scaling": "dynamic", "factor": 2.5, "trained_length": 7, "pairs": "neighbours"},
    "llama3": {"fraction": 2 / 3, "base": 300.0, "scaling": "llama3", "factor": 4.0, "trained_length": 9, "low": 0.25, "high": 0.75},
    "yarn": {"base": 700.0, "scaling": "yarn", "factor": 4.0, "trained_length": 40, "low": 1.0, "high": 3.0},
}


SCALES = {"embedding": 1.3, "residual": 0.7, "attention": 0.3, "head": 1.6}


@dataclass(frozen=True)
class Chosen(Case):
    """A case of `moe verify` with options of the model, heads of 6 channels and sequences of 10 tokens.

    clip_qkv clips about a third of q, k and v. `biased`: adds biases of q, k and v, model.scales and model.logit_cap.
    """

    rope: str = "llama3"
    qk_norm: str = "heads"
    biased: bool = False

    def run(self) -> Run:
        values = super().run().model_dump(mode="json")
        options = {"rope": ROPES[self.rope], "qk_norm": self.qk_norm, "norm_eps": 0.01, "qkv_bias": self.biased, "clip_qkv": 0.9}
        options |= {"scales": SCALES, "logit_cap": 0.7} if self.biased else {}
        return build_run(values | {"model": values["model"] | options})


def farthest(case: Chosen, ran: Any, twin: Case) -> float:
    """Return the largest error. With biases, weight updates are left out: a bias starts at 0, and Adam amplifies rounding errors of tiny
    gradients. The losses of later steps check the updates.
    """
    assert not isinstance(ran, str), ran
    numbers = compare(ran, three_steps_of(twin))
    return max(value for name, value in numbers.items() if not (case.biased and name == "update"))


@pytest.mark.usefixtures("three_steps")
@pytest.mark.parametrize(
    ("rope", "qk_norm"),
    [("none", "heads"), ("linear", "whole"), ("llama3", "none"), ("yarn", "heads"), ("ntk", "whole"), ("dynamic", "none")],
)
def test_three_steps_of_one_process_are_the_plain_twins(rope: str, qk_norm: str) -> None:
    case = Chosen("dense", "ddp", 1, 1, 1, "fp32", rope=rope, qk_norm=qk_norm, biased=rope == "yarn")
    assert farthest(case, compute(case), case) < 1e-5


@pytest.mark.usefixtures("three_steps")
@pytest.mark.parametrize("world", [2, 4])
def test_three_steps_on_ranks_are_the_plain_twins(world: int) -> None:
    """On 2 ranks: tp with sequence parallelism, FSDP, ZeRO-3 and sp. On 4: tp in 1D, where two ranks share a key-value head, and in 2D."""
    twin = Chosen("dense", "ddp", 1, 1, 1, "fp32")
    if world == 2:
        cases: list[Case] = [
            Chosen("dense", "ddp", 2, 1, 1, "fp32", tp=2, tensor="sliced", biased=True),
            Chosen("dense", "fsdp", 2, 1, 1, "fp32", biased=True),
            Chosen("dense", "zero3", 2, 1, 1, "fp32", biased=True),
            Chosen("dense", "ddp", 2, 1, 1, "fp32", sp=2, attention="contiguous"),
            Chosen("dense", "ddp", 2, 1, 1, "fp32", sp=2, attention="contiguous", rope="dynamic"),
        ]
    else:
        cases = [Chosen("dense", "ddp", 4, 1, 1, "fp32", tp=4, tensor=tensor) for tensor in ("1d", "2d")]
    for case, ran in run_world(cases, world):
        assert not isinstance(ran, str), ran
        assert isinstance(case, Chosen)
        assert farthest(case, ran[0], replace(twin, biased=case.biased, rope=case.rope)) < 1e-5, case.layout


@torch.no_grad()
def test_documents_packed_for_an_encoder_and_a_decoder_have_the_logits_of_each_alone() -> None:
    """Spans of each document are written to the decoder's part of it. The last token that the encoder reads begins no document. A decoder
    that writes a sentinel which the encoder lacks sees the last document."""
    sizes = Model(kind="encoder_decoder", positions="t5", d_model=24, num_heads=4, d_ff=20, max_length=72, document_mask=True)
    first, second, third, fourth = range(63, 59, -1)  # sentinels of max_length 72
    model = Transformer(sizes.model_copy(update={"moe_every": 0}), vocab_size=64).eval()
    documents = [
        ([0, 5, 6, first, 7], [0, first, 8, 9]),
        ([0, 10, second, 11, third], [second, 13, 14, third, 16]),
        ([0, 17, 18, 0], [fourth, 19]),
    ]

    def logits(read: list[int], written: list[int]) -> Tensor:
        tokens_BL = torch.tensor([read + written])
        return model(tokens_BL, Context.of(tokens_BL, source=len(read))).logits_BLV[0]

    packed = logits(*([token for document in documents for token in document[half]] for half in (0, 1)))
    alone = torch.cat([logits(read, written) for read, written in documents])
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)


def test_rates_equal_transformers() -> None:
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils", reason="pip install moe-parallel[hf]")
    transformers = pytest.importorskip("transformers")
    names = {"base": "rope_theta", "factor": "factor", "trained_length": "original_max_position_embeddings"}
    lows = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_slow", "beta_fast")}
    for kind, values in ROPES.items():
        if kind in ("ntk", "dynamic"):
            continue  # tested in the next test
        rope = Rope(**values)
        theirs = {"rope_theta": rope.base, "rope_type": "default" if kind == "none" else kind}
        theirs |= {names[key]: value for key, value in values.items() if key in names}
        theirs |= {name: values[key] for name, key in zip(lows.get(kind, ()), ("low", "high"), strict=False)}
        config = transformers.LlamaConfig(head_dim=24, max_position_embeddings=160, rope_parameters=theirs)
        if kind == "none":
            want, size = 1 / rope.base ** (torch.arange(0, 24, 2) / 24), 1.0
        else:
            want, size = rope_utils.ROPE_INIT_FUNCTIONS[kind](config, "cpu")
        torch.testing.assert_close(rates(rope, 24), want, rtol=1e-6, atol=0)
        assert size == pytest.approx(1.1386294 if kind == "yarn" else 1.0)  # yarn: 0.1 ln(factor) + 1


def test_dynamic_scaling_equals_transformers() -> None:
    """rotate equals transformers for lengths below, at and above trained_length. For one length, dynamic equals ntk with a fixed factor."""
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama", reason="pip install moe-parallel[hf]")
    theirs = {"rope_theta": 300.0, "rope_type": "dynamic", "factor": 2.5}
    config = modeling.LlamaConfig(hidden_size=72, num_attention_heads=3, head_dim=24, max_position_embeddings=16, rope_parameters=theirs)
    rope = Rope(base=300.0, scaling="dynamic", factor=2.5, trained_length=16)
    x_BHLC = torch.randn(2, 3, 80, 24, generator=torch.Generator().manual_seed(2))
    for length in (9, 16, 17, 32, 80):
        x = x_BHLC[:, :, :length]
        place_L = torch.arange(length)
        cos, sin = modeling.LlamaRotaryEmbedding(config)(x, place_L[None])
        want, _ = modeling.apply_rotary_pos_emb(x, x, cos, sin)
        torch.testing.assert_close(rotate(x, place_L, rope), want, rtol=1e-4, atol=2e-5)
    fixed = Rope(base=300.0, scaling="ntk", factor=2.5 * 80 / 16 - 1.5)
    torch.testing.assert_close(rotate(x, place_L, fixed), want, rtol=1e-4, atol=2e-5)
    assert torch.equal(rotate(x, place_L, fixed), rotate(x, place_L, Rope(base=fixed.base_of(24))))
    assert rates(Rope(scaling="ntk", factor=8.0), 24)[-1] == pytest.approx(rates(DEFAULT, 24)[-1].item() / 8)


def test_rotated_channels_are_those_of_transformers() -> None:
    """GLM rotates pairs of neighboring channels, GPT-NeoX pairs (i, i + C/2). Channels beyond the fraction stay bitwise equal."""
    transformers = pytest.importorskip("transformers", reason="pip install moe-parallel[hf]")
    x_BHLC = torch.randn(2, 3, 7, 24, generator=torch.Generator().manual_seed(2))
    place_L = torch.tensor([0, 1, 5, 6, 7, 30, 31])
    kinds = (("Glm", "glm", "neighbours"), ("GPTNeoX", "gpt_neox", "halves"))
    # 0.45 of 24 channels: 10.8 are rounded down to 10
    for (kind, name, pairs), (fraction, count) in product(kinds, ((0.25, 6), (0.45, 10))):
        check_run(build_run({"model": {"head_size": 24, "rope": {"fraction": fraction}}}), 1)
        module = getattr(transformers.models, name)
        module = getattr(module, f"modeling_{name}")
        rope = {"rope_theta": 300.0, "rope_type": "default", "partial_rotary_factor": fraction}
        config = getattr(transformers, f"{kind}Config")(hidden_size=72, num_attention_heads=3, head_dim=24, rope_parameters=rope)
        cos, sin = getattr(module, f"{kind}RotaryEmbedding")(config)(x_BHLC, place_L.unsqueeze(0))
        want = module.apply_rotary_pos_emb(x_BHLC, x_BHLC, cos, sin)[0]
        got = rotate(x_BHLC, place_L, Rope(base=300.0, fraction=fraction, pairs=pairs))  # type: ignore[arg-type]
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
        assert torch.equal(got[..., count:], x_BHLC[..., count:]) and not torch.equal(got[..., count - 1], x_BHLC[..., count - 1])


def test_a_cache_of_keys_gives_the_logits_of_recomputation() -> None:
    model = Transformer(Model(num_layers=2, d_model=24, num_heads=4, num_kv_heads=2, d_ff=20, max_length=9, qk_norm="heads", clip_qkv=0.5,
                              rope=Rope(**ROPES["yarn"], fraction=2 / 3), scales=Scales(**SCALES)), vocab_size=31).eval()  # fmt: skip
    tokens_BL = torch.randint(31, (2, 9), generator=torch.Generator().manual_seed(1))
    cached, plain = Cached(model), Recomputed(model, 9)
    with torch.no_grad():
        for seen in (4, 5, 6, 9):
            torch.testing.assert_close(cached(tokens_BL[:, :seen], 0), plain(tokens_BL[:, :seen], 0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"model": {"rope": {"scaling": "yarn"}}}, "model.rope.trained_length: got null"),
        ({"model": {"rope": {"scaling": "dynamic"}}}, "model.rope.trained_length: got null"),
        (
            {"model": {"rope": {"scaling": "dynamic", "trained_length": 8, "low": 2}}},
            "model.rope.low: got 2 .* llama3 or yarn: otherwise this key has no effect",
        ),
        (
            {"model": {"rope": {"scaling": "ntk", "trained_length": 8}}},
            "model.rope.trained_length: got 8 .* dynamic, llama3 or yarn: otherwise this key has no effect",
        ),
        (
            {"model": {"rope": {"scaling": "dynamic", "trained_length": 8}, "latent": {"key_rank": 8}}},
            "model.rope.scaling: got dynamic with model.latent.key_rank=8",
        ),
        ({"model": {"rope": {"factor": 2.0}}}, "model.rope.factor: got 2 with model.rope.scaling=none"),
        ({"model": {"rope": {"base": 9.0}, "positions": "t5"}}, "model.rope.base: got 9 with model.positions=t5"),
        ({"model": {"rope": {"scaling": "llama3", "trained_length": 8, "low": 5.0}}}, "model.rope.high: got 4, needed more than .*low=5"),
        (
            {"model": {"rope": {"fraction": 0.3}}},
            "model.rope.fraction: got 0.3 of 64 channels .*, which is 19, .*set it to 0.32, which is 20",
        ),
        ({"model": {"rope": {"fraction": 0.01}, "head_size": 6}}, "model.rope.fraction: got 0.01 of 6 .*set it to 0.4, which is 2"),
        ({"model": {"rope": {"fraction": 0.58}, "head_size": 100}}, "got 0.58 of 100 .*, which is 57, .*set it to 0.581, which is 58"),
        ({"model": {"rope": {"fraction": 0.5}, "latent": {"key_rank": 8}}}, "model.rope.fraction: got 0.5 with model.latent.key_rank=8"),
        ({"model": {"rope": {"fraction": 0.5}, "positions": "t5"}}, "model.rope.fraction: got 0.5 with model.positions=t5"),
        ({"model": {"clip_qkv": 8.0, "latent": {"key_rank": 8}}}, "model.clip_qkv: got 8.0 with model.latent.key_rank=8, needed null"),
        ({"model": {"clip_qkv": 8.0, "kind": "encoder_decoder", "positions": "t5"}}, "model.clip_qkv: got 8.0 with model.kind=enc"),
        ({"model": {"logit_cap": 30.0, "kind": "encoder_decoder", "positions": "t5"}}, "model.logit_cap: got 30.0 with model.kind=enc"),
        ({"model": {"scales": {"head": 2.0}, "kind": "encoder_decoder", "positions": "t5"}}, "model.scales.head: got 2.0 with model.kind="),
        (
            {"model": {"scales": {"attention": 0.2}, "latent": {"key_rank": 8}}},
            "model.scales.attention: got 0.2 with model.latent.key_rank=8",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        check_run(build_run(values), values.get("degrees", {}).get("tp", 1))
