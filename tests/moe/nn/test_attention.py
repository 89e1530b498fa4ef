"""Attention of a rank that has some of the heads or some of the tokens, and attention with a replaced core."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from moe.nn.attention import Attention
from moe.nn.context import Context
from moe.nn.core import attend, repeated, softmax_core
from moe.recipe import sections
from parallel.numerics.position_bias import Bias

# B batch, L length, D model, H heads, K key-value heads, C channels of a head

B, L, D, C = 2, 7, 20, 6
CASES = [("rotary", 4, 4), ("rotary", 4, 2), ("t5", 4, 4), ("t5", 6, 2)]


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).float()


def attention_of(positions: str, heads: int, kv_heads: int) -> Attention:
    made = Attention(sections.Model(d_model=D, num_heads=heads, head_size=C, num_kv_heads=kv_heads, positions=positions))
    for i, p in enumerate(made.parameters()):
        p.data.copy_(random(*p.shape, seed=i) / 3)
    return made


def half_of(whole: Attention, positions: str, heads: int, kv_heads: int, half: int) -> Attention:
    """Return the attention of a rank that holds half of the heads: its slices of the whole attention's weights."""
    part = attention_of(positions, heads, kv_heads)
    for name, dim in (("q", 0), ("k", 0), ("v", 0), ("out", 1), ("bias", 1)):
        if getattr(whole, name) is not None:
            getattr(part, name).weight = nn.Parameter(getattr(whole, name).weight.detach().chunk(2, dim)[half].clone())
    return part


@pytest.mark.parametrize(("positions", "heads", "kv_heads"), CASES)
def test_two_halves_of_the_heads_add_up_to_the_whole(positions: str, heads: int, kv_heads: int) -> None:
    """The outputs of two halves of the heads, and their gradients of the input, sum to the whole's. Each half's weights get their slice of
    the whole's gradients.
    """
    whole = attention_of(positions, heads, kv_heads)
    halves = [half_of(whole, positions, heads, kv_heads, half) for half in (0, 1)]
    grad, outputs, inputs = random(B, L, D, seed=9), [], []
    for modules in ([whole], halves):
        x_BLD = random(B, L, D, seed=8).requires_grad_()
        y_BLD = sum((m(x_BLD, Context.of(x_BLD[..., 0])) for m in modules), start=torch.zeros(()))
        y_BLD.backward(grad)
        outputs.append(y_BLD.detach())
        inputs.append(x_BLD.grad)
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(inputs[1], inputs[0], rtol=1e-5, atol=1e-5)
    for name, parameter in whole.named_parameters():
        parts = [half.get_parameter(name).grad for half in halves]
        assert parameter.grad is not None and all(part is not None for part in parts)
        torch.testing.assert_close(torch.cat(parts, int(name.startswith(("out", "bias")))), parameter.grad, rtol=1e-5, atol=1e-5)  # type: ignore[arg-type]


class Whole:
    """A core that has keys and values of all tokens. Queries may be of any tokens, whose positions the context gives."""

    def __init__(self, k_BKLC: Tensor, v_BKLC: Tensor) -> None:
        self.k_BKLC, self.v_BKLC = k_BKLC, v_BKLC

    def __call__(
        self, q_BHLC: Tensor, k_BKLC: Tensor, v_BKLC: Tensor, *, context: Context, bias: Bias | None, sink_H: Tensor | None = None
    ) -> Tensor:
        k_BHSC, v_BHSC = (repeated(t, q_BHLC.shape[1]) for t in (self.k_BKLC, self.v_BKLC))
        rows, place_L = [], context.place_L
        for i, place in enumerate(place_L.tolist()):
            seen = torch.arange(place + 1)
            logits_BHS = torch.einsum("bhc,bhsc->bhs", q_BHLC[:, :, i], k_BHSC[:, :, seen]) / math.sqrt(C)
            if bias is not None:
                logits_BHS = logits_BHS + bias.of(range(place, place + 1), range(place + 1))[:, 0]
            rows.append(torch.einsum("bhs,bhsc->bhc", logits_BHS.softmax(-1), v_BHSC[:, :, seen]))
        return torch.stack(rows, 2)


@pytest.mark.parametrize(("positions", "heads", "kv_heads"), CASES)
def test_attention_of_some_tokens_equals_their_rows_of_the_whole(positions: str, heads: int, kv_heads: int) -> None:
    """Attention of some tokens, with a core that has all keys, equals those rows of the whole output."""
    attention, x_BLD, seen = attention_of(positions, heads, kv_heads), random(B, L, D, seed=8), []

    def watching(
        q_BHLC: Tensor, k_BKLC: Tensor, v_BKLC: Tensor, *, context: Context, bias: Bias | None, sink_H: Tensor | None = None
    ) -> Tensor:
        seen.append((k_BKLC, v_BKLC))
        assert q_BHLC.shape == (B, heads, L, C) and k_BKLC.shape == v_BKLC.shape == (B, kv_heads, L, C)
        assert context.place_L.tolist() == list(range(L)) and (bias is None) == (positions == "rotary")
        return softmax_core(q_BHLC, k_BKLC, v_BKLC, context=context, bias=bias)

    attention.core = watching
    want_BLD = attention(x_BLD, Context.of(x_BLD[..., 0]))
    attention.core = Whole(*seen[0])
    for places in ([0, 1, 2], [3, 4, 5, 6], [0, 6], [5]):
        place_L = torch.tensor(places)
        context = replace(Context.of(x_BLD[:, places, 0]), place_L=place_L)
        torch.testing.assert_close(attention(x_BLD[:, places], context), want_BLD[:, places], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("window", "documents", "sinks"), [(None, False, False), (None, True, False), (3, False, True), (None, False, True)]
)
def test_grouped_heads_are_heads_with_repeated_keys_and_values(window: int | None, documents: bool, sinks: bool) -> None:
    """Output and gradients, with a mask, in chunks of a window, and with sinks."""
    q, k, v, grad, sink_H = (x.double() for x in (*(random(B, n, L, C, seed=n) for n in (6, 2, 3, 12)), random(6, seed=7)))
    context = replace(Context.of(torch.zeros(B, L)), document_BS=random(B, L, seed=5).gt(1).cumsum(1) if documents else None)
    settings = {"context": context, "bias": None, "window": window, "sink_H": sink_H if sinks else None}
    found = []
    for repeats in (1, 3):
        leaves = [x.clone().requires_grad_() for x in (q, k, v[:, :2])]
        keys, values = (repeated(x, 2 * repeats) for x in leaves[1:])
        out = softmax_core(leaves[0], keys, values, **settings)  # type: ignore[arg-type]
        out.backward(grad[:, :6])
        found.append([out.detach(), *(x.grad for x in leaves)])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_a_gpu_repeats_keys_and_values_only_if_flash_attention_does_not_take_them() -> None:
    from parallel.process.process import World
    from parallel.rehearse.stage import rehearsal

    def kernels(dtype: torch.dtype, mask: Tensor | None) -> int:
        q, k = (torch.empty(B, heads, 8, 16, dtype=dtype, device="cuda:0") for heads in (4, 2))
        pretended.work.begin()
        attend(q, k, k, scale=None, sink_H=None, mask=mask)
        return pretended.work.now.kernels

    with rehearsal(World(0, 1, place="cuda")) as pretended:
        mask = torch.ones(8, 8, dtype=torch.bool, device="cuda:0")
        alone = kernels(torch.bfloat16, None)
        assert alone < kernels(torch.float32, None) and alone < kernels(torch.bfloat16, mask)
