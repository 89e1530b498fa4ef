"""Every method of sequence parallelism equals plain attention on one process: output, gradients of q, k, v and bias table, sent bytes.

With three and four ranks too, because with two a wrong direction around the ring has no effect. In fp64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel.mesh.mesh import Axis, Degrees
from parallel.numerics.position_bias import Bias
from parallel.numerics.recompute import Replay
from parallel.process import process
from parallel.process.process import World
from parallel.sequence.balanced import Balanced
from parallel.sequence.colossal_ring import ColossalRing
from parallel.sequence.kinds import SEQUENCES, Attention
from parallel.sequence.method import Known, Method
from parallel.sequence.order import ORDERS, Order
from parallel.sequence.ring import Ring
from parallel.sequence.softmax import Tokens
from parallel.sequence.ulysses import Ulysses
from tests.support.ranks import run_on_ranks

B, H, K, C, EACH = 2, 12, 3, 10, 8  # batch, heads, key-value heads, channels, positions a rank
METHODS: dict[str, Callable[[Axis, int, int | None], Any]] = {
    "ring contiguous": lambda axis, length, window: Ring(axis, Order("contiguous", axis.size, length), window),
    "ring striped": lambda axis, length, window: Ring(axis, Order("striped", axis.size, length), window),
    "ring zigzag": lambda axis, length, window: Ring(axis, Order("zigzag", axis.size, length), window),
    "balanced": lambda axis, length, window: Balanced(axis, Order("contiguous", axis.size, length), window),
    "colossal ring": lambda axis, length, window: ColossalRing(axis, Order("contiguous", axis.size, length), window),
    "ulysses": lambda axis, length, window: Ulysses(axis, Ring(Axis("alone"), Order("contiguous", 1, length), window)),
}
# (bias, documents, sinks, window). Windows: within a rank's positions, over more than one rank's, a token's own position only
GIVEN = [(*given, False, None) for given in product((False, True), repeat=2)]
GIVEN += [(False, False, False, 5), (False, False, True, EACH + 3), (True, True, True, 1), (False, False, True, None)]
CASES = [(name, *given) for name in METHODS for given in GIVEN]


def bucket(distance: Tensor) -> Tensor:
    return distance.clamp(0, 6)


@cache
def given(size: int) -> dict[str, Tensor]:
    generator, length = torch.Generator().manual_seed(size), size * EACH
    made = {
        name: torch.randn(B, heads, length, C, dtype=torch.float64, generator=generator)
        for name, heads in zip("qkvg", (H, K, K, H), strict=True)
    }
    made["sinks"] = torch.randn(H, dtype=torch.float64, generator=generator)
    made["table"] = torch.randn(7, H, dtype=torch.float64, generator=generator)
    made["documents"] = (torch.rand(B, length, generator=generator) < 0.15).cumsum(1)
    return made


@cache
def plain(size: int, biased: bool, documents: bool, sinks: bool, window: int | None) -> dict[str, Tensor]:
    """Return output and gradients of plain attention: scores of all pairs, mask, softmax, differentiated by autograd."""
    g = given(size)
    leaf = {name: g[name].clone().requires_grad_() for name in ("q", "k", "v", "table", "sinks")}
    k, v = (leaf[name].repeat_interleave(H // K, dim=1) for name in "kv")
    score, place = leaf["q"] @ k.mT / C**0.5, torch.arange(size * EACH)
    score = score + leaf["table"][bucket(place.unsqueeze(1) - place)].permute(2, 0, 1) * biased
    unseen = (place > place.unsqueeze(1)).expand(B, -1, -1)
    if documents:
        unseen = unseen | (g["documents"].unsqueeze(1) != g["documents"].unsqueeze(2))
    if window is not None:
        unseen = unseen | (place <= place.unsqueeze(1) - window)
    score = score.masked_fill(unseen.unsqueeze(1), -torch.inf)
    if sinks:
        score = torch.cat([score, leaf["sinks"].view(-1, 1, 1).expand(*score.shape[:3], 1)], dim=3)
    out = score.softmax(-1)[..., : len(place)] @ v
    out.backward(g["g"])
    return {"out": out.detach()} | {name: x.grad for name, x in leaf.items() if x.grad is not None}


def work(rank: int, size: int) -> list[dict[str, Tensor]]:
    axis, g = process.connect(Degrees(sp=size), World(rank, size)).axis("sp"), given(size)
    found = []
    for name, biased, documents, sinks, window in CASES:
        method = METHODS[name](axis, size * EACH, window)
        places = list(order_of(name, size).positions(rank))
        leaf = {n: g[n][:, :, places].clone().requires_grad_() for n in "qkv"} | {
            n: g[n].clone().requires_grad_() for n in ("table", "sinks")
        }
        bias = Bias(leaf["table"], bucket) if biased else None
        axis.communicator.reset_counts()
        out = method(
            leaf["q"],
            leaf["k"],
            leaf["v"],
            bias=bias,
            sink_H=leaf["sinks"] if sinks else None,
            document_BS=g["documents"] if documents else None,
        )
        out.backward(g["g"][:, :, places])
        sent = torch.tensor(sum(count.sent for count in axis.communicator.counts().values()))
        found.append({"out": out.detach(), "sent": sent} | {n: x.grad for n, x in leaf.items() if x.grad is not None})
    return found


@cache
def on_ranks(size: int) -> list[list[dict[str, Tensor]]]:
    return run_on_ranks(work, size, size)


def order_of(name: str, size: int) -> Order:
    kind = name.partition(" ")[2] if name.startswith("ring") else "contiguous"
    return Order(kind, size, size * EACH)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_each_method_is_plain_attention(size: int) -> None:
    ranks = on_ranks(size)
    for number, (name, biased, documents, sinks, window) in enumerate(CASES):
        expected, got = plain(size, biased, documents, sinks, window), [rank[number] for rank in ranks]
        for rank, found in enumerate(got):
            places = list(order_of(name, size).positions(rank))
            for tensor in ("out", "q", "k", "v"):
                close(found[tensor], expected[tensor][:, :, places], f"{name}, window {window}, {tensor}")
        if sinks:
            close(sum(found["sinks"] for found in got), expected["sinks"], f"{name}, sinks")
        if biased:
            close(sum(found["table"] for found in got), expected["table"], f"{name}, table")


def close(got: Any, expected: Tensor, what: str) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12, msg=lambda said: f"{what}: {said}")


OPEN: dict[str, Callable[[Axis, Order], Any]] = {
    "ring": Ring,
    "colossal": ColossalRing,
    "ulysses": lambda axis, order: Ulysses(axis, Ring(Axis("alone"), replace(order, size=1))),
}


def open_work(rank: int, size: int) -> list[list[Tensor]]:
    """Return, for each method, the gradients of q, k and v, the output, and the table's gradient: self-attention, then cross attention."""
    axis, g, found = process.connect(Degrees(sp=size), World(rank, size)).axis("sp"), given(size), []
    order = Order("contiguous", size, size * EACH, causal=False)
    for make, keys in product(OPEN.values(), (EACH, 3)):
        sizes = zip("qkv", (EACH, keys, keys), strict=True)
        q, k, v = (g[n][:, :, rank * each : (rank + 1) * each].clone().requires_grad_() for n, each in sizes)
        table = g["table"].clone().requires_grad_()
        out = make(axis, order)(q, k, v, bias=Bias(table, both_ways) if keys == EACH else None)
        out.backward(g["g"][:, :, rank * EACH : (rank + 1) * EACH])
        found.append([x for x in (out.detach(), q.grad, k.grad, v.grad, table.grad) if x is not None])
    return found


def both_ways(distance: Tensor) -> Tensor:
    return distance.clamp(-3, 3) + 3


@pytest.mark.parametrize("size", [2, 3])
def test_attention_to_all_keys_is_plain_attention(size: int) -> None:
    """Encoders' attention, with a bias for keys before and after the query; and cross attention, whose keys are fewer than its queries."""
    ranks, g = run_on_ranks(open_work, size, size), given(size)
    for number, (name, keys) in enumerate(product(OPEN, (EACH, 3))):
        q, k, v = (g[n][:, :, : size * each].clone().requires_grad_() for n, each in zip("qkv", (EACH, keys, keys), strict=True))
        table, place = g["table"].clone().requires_grad_(), torch.arange(size * EACH)
        score = q @ k.repeat_interleave(H // K, dim=1).mT / C**0.5
        if keys == EACH:
            score = score + table[both_ways(place.unsqueeze(1) - place)].permute(2, 0, 1)
        out = score.softmax(-1) @ v.repeat_interleave(H // K, dim=1)
        out.backward(g["g"])
        got = [rank[number] for rank in ranks]
        for which, expected in enumerate((out.detach(), q.grad, k.grad, v.grad)):
            close(torch.cat([found[which] for found in got], dim=2), expected, f"{name}, {keys} keys a rank, {which}")
        if keys == EACH:
            close(sum(found[4] for found in got), table.grad, f"{name}, table")


@pytest.mark.parametrize("size", [3, 4])
def test_bytes_are_those_of_the_formulas(size: int) -> None:
    """Bytes that all ranks send forward and backward equal `SequenceKind.cost`, also if Ulysses repeats 3 key-value heads for 4 ranks."""
    ranks = on_ranks(size)
    of = Attention(B, size * EACH, H, K, C, itemsize=8)
    for number, (name, *_) in enumerate(CASES):
        kind = {"balanced": "lightseq", "colossal": "colossal_ring"}.get(name.split()[0], name.split()[0])
        expected = SEQUENCES[kind].cost(size, of)
        assert sum(int(rank[number]["sent"]) for rank in ranks) == expected.forward + expected.backward, name


@pytest.mark.parametrize("kind", ORDERS)
def test_tokens_are_those_of_the_places_and_so_is_a_part_of_them(kind: str) -> None:
    order, document_BS = Order(kind, 3, 3 * EACH), given(3)["documents"]
    for rank in range(3):
        tokens, places = Known(order, None, document_BS).tokens(rank, document_BS), list(order.positions(rank))
        for part in (slice(None), slice(1, None), slice(None, -1), slice(3, 7)):
            assert tokens[part].place_L.tolist() == places[part]
            assert torch.equal(tokens[part].document_BL, document_BS[:, places[part]])


@pytest.mark.parametrize("name", ["ring zigzag", "ring striped", "balanced"])
def test_without_a_bias_and_documents_no_positions_are_built(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of positions would cost time in every layer, so they are made only for a bias or documents."""
    monkeypatch.setattr(Tokens, "place_L", property(lambda tokens: pytest.fail("places are built")))
    q, k, v = (given(2)[name].clone().requires_grad_() for name in "qkv")
    out = METHODS[name](Axis("alone"), 2 * EACH, None)(q, k, v)
    out.backward(given(2)["g"])
    close(out, plain(2, False, False, False, None)["out"], "out")


def test_a_method_has_both_its_passes() -> None:
    class Half(Method):
        def forward(self, q_BHLC: Tensor, k_BKLC: Tensor, v_BKLC: Tensor, known: Known) -> tuple[Tensor, ...]:
            return (q_BHLC,)

    with pytest.raises(TypeError, match="abstract method '?backward"):
        Half(Axis("alone"), Order("contiguous", 1, EACH))  # type: ignore[abstract]


@pytest.mark.parametrize("kind", ["lightseq", "ring"])
def test_a_pass_that_is_computed_again_attends_once_where_its_output_is_kept(kind: str) -> None:
    """With `once`, a recomputed pass returns the stored output of the first pass, and sends nothing."""

    def passes(rank: int) -> list[tuple[int, Tensor]]:
        axis, g = process.connect(Degrees(sp=3), World(rank, 3)).axis("sp"), given(3)
        method = (Balanced if kind == "lightseq" else Ring)(axis, Order("contiguous", 3, 3 * EACH))
        places, replay, found = list(method.order.positions(rank)), Replay(), []
        for _ in range(2):
            axis.communicator.reset_counts()
            q, k, v = (g[name][:, :, places].clone().requires_grad_() for name in "qkv")
            out = method(q, k, v, once=lambda attend: replay.once("attention", attend))
            found.append((sum(count.sent for count in axis.communicator.counts().values()), out.detach().clone()))
            out.detach().zero_()  # a changed output must not change the stored one
        out.backward(g["g"][:, :, places])
        assert q.grad is not None
        return [*found, (0, q.grad)]

    for rank, ((first, out), (again, same), (_, dq)) in enumerate(run_on_ranks(passes, 3)):
        assert first > 0 and again == 0 and torch.equal(out, same)
        close(dq, plain(3, False, False, False, None)["q"][:, :, rank * EACH : (rank + 1) * EACH], "q")
