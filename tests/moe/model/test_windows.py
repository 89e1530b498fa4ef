"""Sliding windows, attention sinks, and biases of attention's four products: on one process, on ranks, and with a key-value cache.

Only these tests notice a window that starts one token off, a last chunk of queries that is not full, a layer with another layer's window, a
cache that attends beyond the window, or a sink that is counted once for each shard of the keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe.checks.together import check_run
from moe.model.transformer import Transformer
from moe.nn.context import Context
from moe.nn.core import softmax_core
from moe.recipe.load import build_run
from moe.recipe.sections import Model, Run
from moe.train.use.decode import Cached, Recomputed
from moe.verify.cases import Case
from moe.verify.expected import compare
from moe.verify.layouts import compute, run_world
from parallel.errors import BadInput
from tests.support.twins import three_steps_of

# B batch, L length, H heads, K key-value heads, C channels of a head


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [1, 2, 3, 5, 6, 7, 12, 13, None])
def test_softmax_core_with_a_window_equals_a_loop_over_queries(window: int | None, sinks: bool) -> None:
    """softmax_core with a window equals a loop over queries, with gradients. 13 tokens are no multiple of chunks of 2, 3, 5 or 6."""
    generator = torch.Generator().manual_seed(window or 0)
    leaves = [torch.randn(2, heads, 13, 6, generator=generator, dtype=torch.float64).requires_grad_() for heads in (4, 2, 2)]
    q, k, v = leaves
    sink_H = torch.randn(4, generator=generator, dtype=torch.float64).requires_grad_()
    grad, context = torch.randn(q.shape, generator=generator, dtype=torch.float64), Context.of(torch.zeros(2, 13, dtype=torch.int64))
    got = softmax_core(q, k, v, context=context, bias=None, window=window, sink_H=sink_H if sinks else None)
    leaves += [sink_H] * sinks
    rows = []
    for at in range(13):
        seen = slice(max(0, at - (window or 13) + 1), at + 1)
        keys, values = (x[:, :, seen].repeat_interleave(2, dim=1) for x in (k, v))
        weights = (keys @ q[:, :, at].unsqueeze(-1) / math.sqrt(6)).exp()
        total = weights.sum(2, keepdim=True) + sink_H.exp().view(-1, 1, 1) * sinks
        rows.append((weights / total).mT @ values)
    want = torch.cat(rows, dim=2)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    for mine, plain in zip(torch.autograd.grad(got, leaves, grad), torch.autograd.grad(want, leaves, grad), strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-11, atol=1e-12)


@dataclass(frozen=True)
class Windowed(Case):
    """A case of `moe verify` with windows in the layers `only` (None: all). `more`: also sinks, and biases of q, k, v and out."""

    window: int = 3
    only: tuple[int, ...] | None = None
    more: bool = False

    def run(self) -> Run:
        values = super().run().model_dump(mode="json")
        options = {"sliding_window": self.window, "sliding_layers": self.only}
        options |= dict.fromkeys(("attention_sinks", "qkv_bias", "out_bias"), self.more)
        return build_run(values | {"model": values["model"] | options})


def farthest(case: Windowed, ran: Any) -> float:
    """Return the largest error. With sinks and biases, updates are left out: these start at 0, and Adam amplifies rounding errors."""
    assert not isinstance(ran, str), ran
    twin = Windowed(case.model, "ddp", 1, 1, 1, "fp32", window=case.window, only=case.only, length=case.length, more=case.more)
    return max(value for name, value in compare(ran, three_steps_of(twin)).items() if not (case.more and name == "update"))


@pytest.mark.usefixtures("three_steps")
@pytest.mark.parametrize("case", [
    Windowed("dense", "ddp", 1, 1, 1, "fp32", window=4),
    Windowed("dense", "ddp", 1, 1, 1, "fp32", window=7, only=(1,)),
    Windowed("packed", "ddp", 1, 1, 1, "fp32", window=3, only=(0,)),
    Windowed("gshard", "ddp", 1, 1, 2, "fp32", window=3, recompute="full"),
    Windowed("dense", "ddp", 1, 1, 1, "fp32", window=3, only=(0,), more=True),
    Windowed("packed_t5", "ddp", 1, 1, 1, "fp32", window=4, more=True),
])  # fmt: skip
def test_three_steps_of_one_process_are_the_plain_twins(case: Windowed) -> None:
    """Windows computed in chunks of queries and by masks, with documents, and with T5's bias."""
    assert farthest(case, compute(case)) < 1e-5


@pytest.mark.usefixtures("three_steps")
@pytest.mark.parametrize("world", [2, 4])
def test_three_steps_on_ranks_are_the_plain_twins(world: int) -> None:
    """On FSDP, ZeRO-3, ep, pp, tp in 1D and 2D, and with each kind of sequence parallelism."""
    if world == 2:
        plain = Windowed("dense", "ddp", 2, 1, 1, "fp32", only=(0,), more=True)
        cut = replace(plain, sp=2, length=24, window=5)
        cases = [replace(plain, kind=kind) for kind in ("fsdp", "zero3")]
        cases += [Windowed("switch", "ddp", 2, 2, 1, "fp32", more=True), replace(plain, pp=2)]
        cases += [replace(plain, tp=2, tensor=kind) for kind in ("sliced", "dtensor")]
        cases += [replace(cut, attention=kind) for kind in ("zigzag", "lightseq", "colossal", "ulysses")]
    else:
        cases = [
            Windowed("dense", "ddp", 4, 1, 1, "fp32", tp=4, tensor="2d"),
            Windowed("dense", "ddp", 4, 1, 1, "fp32", tp=4, tensor="1d", more=True),
        ]
        cut = Windowed("dense", "ddp", 4, 1, 1, "fp32", sp=4, length=24, more=True)
        cases += [replace(cut, attention="heads2"), replace(cut, sp=2, tp=2, tensor="1d")]
    for case, ran in run_world(list(cases), world):
        assert isinstance(case, Windowed) and not isinstance(ran, str), ran
        assert farthest(case, ran[0]) < 1e-5, case.layout


def test_a_cache_of_keys_gives_the_logits_of_recomputation() -> None:
    """Tokens are read one by one and several at once. The context of 12 tokens is longer than twice the window."""
    model = Transformer(Model(num_layers=3, d_model=24, num_heads=4, num_kv_heads=2, d_ff=20, max_length=12, sliding_window=4,
                              sliding_layers=(0, 2), attention_sinks=True, out_bias=True), vocab_size=31).eval()  # fmt: skip
    tokens_BL = torch.randint(31, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for layer in model.layers:
            layer.attention.sinks.weight.normal_()
    cached, plain = Cached(model, at_once=5), Recomputed(model, 12)
    with torch.no_grad():
        for seen in (3, 4, 5, 8, 9, 12):
            torch.testing.assert_close(cached(tokens_BL[:, :seen], 0), plain(tokens_BL[:, :seen], 0), rtol=1e-4, atol=1e-5)


def changed_by(model: Transformer, place: int, of: int) -> Tensor:
    """Return a mask over a sequence of `of` tokens: True if a token's logits change when token `place` changes."""
    tokens_BL = torch.arange(of).unsqueeze(0)
    other_BL = tokens_BL.clone()
    other_BL[0, place] = 30
    with torch.no_grad():
        return (model(tokens_BL).logits_BLV - model(other_BL).logits_BLV)[0].abs().amax(-1) > 0


def test_information_reaches_as_far_as_the_windows_of_all_layers() -> None:
    """Each layer with a window of 3 passes information on by 2 positions; a layer without a window, to all later positions."""
    sizes: dict[str, Any] = {"num_layers": 2, "d_model": 24, "num_heads": 4, "d_ff": 20, "max_length": 12, "sliding_window": 3}
    assert changed_by(Transformer(Model(**sizes), vocab_size=31), 2, 12).nonzero().flatten().tolist() == [2, 3, 4, 5, 6]
    assert changed_by(Transformer(Model(**sizes, sliding_layers=(0,)), vocab_size=31), 2, 12).nonzero().flatten().tolist() == [
        *range(2, 12)
    ]


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"sliding_window": 0}, "model.sliding_window: got 0"),
        ({"sliding_layers": [0]}, "model.sliding_layers: got .* with model.sliding_window=null"),
        ({"sliding_window": 4, "sliding_layers": []}, r"model.sliding_layers: got \[\], needed different numbers from 0 to 3"),
        ({"sliding_window": 4, "sliding_layers": [0, 4, 0]}, r"model.sliding_layers: got \[0, 4, 0\].*set it to \[0\]"),
        (
            {"sliding_window": 4, "kind": "encoder_decoder", "positions": "t5"},
            "model.sliding_window: got 4 with model.kind=encoder_decoder, needed null",
        ),
        ({"attention_sinks": True, "kind": "encoder_decoder", "positions": "t5"}, "model.attention_sinks: got true.*needed false"),
        (
            {"attention_sinks": True, "kind": "encoder_decoder", "positions": "t5"},
            "model.attention_sinks: got true with model.kind=.*needed false",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(model: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        check_run(build_run({"model": model}), 1)
