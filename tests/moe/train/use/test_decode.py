"""Decoding with a key-value cache has the logits of recomputing the whole context; sampling draws only from top-k and top-p tokens."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from moe.model.transformer import Transformer
from moe.nn.context import Context
from moe.nn.core import softmax_core
from moe.nn.routing_record import RoutingRecord
from moe.recipe import sections
from moe.train.use.decode import Cached, Recomputed, Sampling, Written, can_cache, continued, for_continuing, start_of
from parallel.data.tiling import one_by_one
from parallel.errors import BadInput

LENGTH, VOCABULARY = 14, 37
MODEL: dict[str, Any] = {"num_layers": 3, "d_model": 24, "num_heads": 6, "d_ff": 20, "max_length": LENGTH, "moe_every": 2}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "switch, few slots": ({}, {}, {"num_choices": 1, "eval_capacity_factor": 0.5}),
    "glam, key-value heads": ({"num_kv_heads": 2}, {}, {"num_choices": 2, "second": "random"}),
    "t5 places": ({"positions": "t5"}, {"shared": 1, "shared_gate": True}, {"num_choices": 2, "group": "rank"}),
    "documents": ({"document_mask": True, "num_kv_heads": 3}, {"residual": True}, {"select": "hash", "balance_weight": 0.0}),
    "t5 places, documents": (
        {"document_mask": True, "document_separator": 5, "positions": "t5"},
        {},
        {"select": "group_limited", "expert_groups": 2, "num_choices": 2},
    ),
    "longer than trained": ({"rope": {"scaling": "dynamic", "factor": 3.0, "trained_length": 7}}, {}, {"num_choices": 2}),
    "dense, bf16": ({"moe_every": 0}, {}, {}),
}
HALVES: dict[str, Any] = {"kind": "encoder_decoder", "positions": "t5", "num_layers": 5, "encoder_layers": 2}


def made(name: str) -> Transformer:
    model, experts, router = CASES[name]
    compute = torch.bfloat16 if "bf16" in name else torch.float32
    router = {"top_groups": 1} | router if "expert_groups" in router else router
    parts = sections.Model(**MODEL | model), sections.Experts(num_experts=4, **experts), sections.Router(**router)
    return Transformer(*parts, vocab_size=VOCABULARY, compute=compute, seed=5).eval()


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_cached_decoding_has_the_logits_of_the_whole_context(name: str) -> None:
    model = made(name)
    for_continuing(model)
    context_BS = torch.randint(VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    context_BS[:, [4, 9]] = 0  # separators of documents
    reads = Cached(model, at_once=4)
    for seen in (6, 7, 8, 13, LENGTH):  # new tokens, in chunks of at most 4: 4 + 2, 1, 1, 4 + 1, ...
        want_BV = model(context_BS[:, :seen]).logits_BLV[:, -1]
        bound = 1e-5 if model.compute == torch.float32 else 3e-2
        assert (reads(context_BS[:, :seen], 0) - want_BV).abs().max() < bound * want_BV.abs().max()
    again_BV = reads(context_BS[:, 7:10], 7)  # another start of the context empties the cache
    want_BV = model(context_BS[:, 7:10]).logits_BLV[:, -1]
    assert (again_BV - want_BV).abs().max() < bound * want_BV.abs().max()
    assert all(layer.attention.core.func is softmax_core for layer in model.layers)  # the attention layers are restored


@pytest.mark.parametrize("name", ["glam, key-value heads", "documents", "longer than trained"])
def test_recorded_experts_of_decoding_equal_one_pass_over_the_text(name: str) -> None:
    """The last token has no experts in the record (-1), because the model has not read it."""
    model = made(name)
    for_continuing(model)
    written, whole = RoutingRecord(2, LENGTH - 1), RoutingRecord(2, LENGTH - 1)
    prompts = [[3, 1, 4], [1, 5, 9]]
    options: dict[str, Any] = {"num_tokens": LENGTH - 4, "max_length": LENGTH, "vocab_size": VOCABULARY, "seeds": [0, 1]}
    steps = list(continued(Cached(model, at_once=2, record=written), prompts, sampling=Sampling(), **options))
    texts_BL = torch.cat([torch.tensor(prompts), torch.tensor(steps).T], dim=1)
    model(texts_BL, Context.of(texts_BL, record_routing=whole))
    for layer, experts in whole.experts.items():
        assert (written.experts[layer][:, :-1] == experts[:, :-1]).all() and (written.experts[layer][:, -1] == -1).all()


def test_a_record_of_texts_longer_than_a_context_is_refused() -> None:
    model = made("documents")
    cached = Cached(model, record=RoutingRecord(1, 20))
    with pytest.raises(BadInput, match="record: got a text whose context is cut to begin at token 7, needed texts of at most 14 tokens"):
        list(continued(cached, [[3]], num_tokens=20, max_length=LENGTH, vocab_size=VOCABULARY, sampling=Sampling(), seeds=[0]))
    with pytest.raises(BadInput, match="record: got a record for an encoder-decoder"):
        Cached(model, source=3, record=RoutingRecord(1, 20))


@pytest.mark.parametrize("name", ["switch, few slots", "t5 places, documents"])
def test_a_full_context_is_cut_to_its_newer_half(name: str) -> None:
    model = made(name)
    for_continuing(model)
    prompts, options = [[3, 1, 4], [1, 5, 9]], {"num_tokens": 40, "max_length": LENGTH, "vocab_size": VOCABULARY}
    sampling, seeds = Sampling(temperature=0), [0, 0]
    got = list(continued(Cached(model), prompts, sampling=sampling, seeds=seeds, **options))
    assert got == list(continued(Recomputed(model, LENGTH), prompts, sampling=sampling, seeds=seeds, **options))
    for row, prompt in enumerate(prompts):
        text, context = list(prompt), list(prompt)
        for _ in range(40):
            if len(context) > LENGTH:
                context = context[LENGTH // 2 :]  # a full context is cut to its newer half
            with torch.no_grad():
                text.append(int(model(torch.tensor([context])).logits_BLV[0, -1].argmax()))
            context.append(text[-1])
        assert [chosen[row] for chosen in got] == text[3:]


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2, "qkv_bias": True, "qk_norm": "heads", "tied_embeddings": False}], ids=str)
@torch.no_grad()
def test_an_encoder_decoder_with_a_cache_has_the_logits_of_recomputing_all(options: dict[str, Any]) -> None:
    """The encoder runs once for each source text, and the cache holds no keys of an earlier source."""
    parts = sections.Model(**MODEL | HALVES | options), sections.Experts(num_experts=4), sections.Router(num_choices=2, group="rank")
    model = Transformer(*parts, vocab_size=VOCABULARY, seed=5).eval()
    for_continuing(model)
    generator, calls = torch.Generator().manual_seed(1), 0
    cached, plain = Cached(model, source=9, max_length=12, at_once=3), Written(model, 9)

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    handle = model.layers[0].register_forward_hook(count)
    for batch in (3, 2, 2):  # a new source text each time
        calls, text_BS = 0, torch.randint(VOCABULARY, (batch, 9 + 12), generator=generator)
        for written in (1, 2, 7, 8, 12):
            got = cached(text_BS[:, : 9 + written], 0)
            assert calls == 1
            handle.remove()
            want = plain(text_BS[:, : 9 + written], 0)
            handle = model.layers[0].register_forward_hook(count)
            assert (got - want).abs().max() < 1e-5 * want.abs().max()
    assert all(block.cross.products is one_by_one for block in model.layers[2:])  # type: ignore[union-attr]


@pytest.mark.parametrize("length", [1, 2, 5, 8])
def test_a_context_is_never_empty_or_too_long_and_begins_anew_as_rarely_as_it_may(length: int) -> None:
    starts = [start_of(n, length) for n in range(1, 50)]
    assert all(1 <= n - start <= length for n, start in enumerate(starts, 1))
    moves = [n for n, (a, b) in enumerate(itertools.pairwise(starts), 1) if a != b]
    assert all(b - a == max(1, length // 2) for a, b in itertools.pairwise(moves))


def test_experts_that_choose_their_tokens_are_not_cached_and_keep_their_capacity() -> None:
    router = sections.Router(select="expert_choice", balance_weight=0.0, capacity_factor=1.0, eval_capacity_factor=1.0)
    model = Transformer(sections.Model(**MODEL), sections.Experts(num_experts=4), router, vocab_size=VOCABULARY)
    assert not can_cache(model) and can_cache(made("documents"))
    for_continuing(model)
    assert model.router_spec.eval_capacity_factor == 1.0


@pytest.mark.parametrize(("top_k", "top_p"), [(None, None), (1, None), (4, None), (None, 0.6), (None, 1e-9), (5, 0.5)])
def test_what_may_be_drawn_is_what_the_definition_lists(top_k: int | None, top_p: float | None) -> None:
    logits_V = torch.randn(11, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    allowed = sorted(range(11), key=lambda i: -logits_V[i])[: top_k or 11]
    if top_p is not None:
        total, nucleus = sum(math.exp(logits_V[i]) for i in allowed), 0.0
        count = next(n for n, i in enumerate(allowed, 1) if (nucleus := nucleus + math.exp(logits_V[i]) / total) >= top_p)
        allowed = allowed[:count]
    draws = 1500
    generator = torch.Generator().manual_seed(0)
    sampling = Sampling(1.0, top_k, top_p)
    drawn = [sampling.choose(logits_V[None].float(), [generator])[0] for _ in range(draws)]
    assert set(drawn) <= set(allowed)
    total = sum(math.exp(logits_V[i]) for i in allowed)
    for i in allowed:
        p = math.exp(logits_V[i]) / total
        assert abs(drawn.count(i) - p * draws) < 5 * math.sqrt(p * (1 - p) * draws) + 1


@pytest.mark.parametrize("options", [{"temperature": -1.0}, {"temperature": math.nan}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_numbers_that_cannot_be_are_refused_with_one_that_can(options: dict[str, float]) -> None:
    with pytest.raises(BadInput, match="fix: --t"):
        Sampling(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("option", ["top_k", "top_p"])
def test_the_likeliest_token_is_not_one_of_several(option: str) -> None:
    """Temperature 0 takes the likeliest token, so top_k and top_p would be ignored."""
    with pytest.raises(BadInput, match=f"^--{option}: got 1 with --temperature 0, .* fix: remove --{option}$"):
        Sampling(0.0, **{option: 1})  # type: ignore[arg-type]
