"""Ring attention of ring-attention-pytorch (the peer) and of this project, on the same gloo ranks, have the same output and gradients.

Compared are causal attention with contiguous and with striped positions; with zigzag positions the peer gathers all keys, which is no ring.
The peer's layout is [B, L, H, C], and its key-value head h serves heads h, h + K, ...; here key-value heads serve neighboring heads.
In versions 0.2.9 to 0.5.20 the peer returns the sum of the gradients of keys and values as the gradient of keys, because it unpacks a pair
of messages wrongly after the last hop. So its result is compared with the sum of both gradients here. tests/parallel/sequence compares each
gradient with plain attention.
"""

from __future__ import annotations

import pytest
import torch
from einops import rearrange
from torch import Tensor

from parallel.mesh.mesh import Degrees
from parallel.process import process
from parallel.process.process import World
from parallel.sequence.order import Order
from parallel.sequence.ring import Ring
from tests.support.ranks import run_on_ranks

peer = pytest.importorskip("ring_attention_pytorch.ring_flash_attention", reason="pip install moe-parallel[dev]")

B, H, K, C, EACH = 2, 6, 2, 8, 12
NAMES = ("output", "gradient of q", "gradients of k and v together")


def given(length: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(B, heads, length, C, generator=generator) for name, heads in (("q", H), ("k", K), ("v", K), ("out", H))}


def work(rank: int, size: int, kind: str) -> list[tuple[Tensor, Tensor]]:
    axis, order = process.connect(Degrees(sp=size), World(rank, size)).axis("sp"), Order(kind, size, size * EACH)
    mine = {name: x[:, :, list(order.positions(rank))] for name, x in given(size * EACH).items()}

    ours = {name: mine[name].clone().requires_grad_() for name in "qkv"}
    out = Ring(axis, order)(ours["q"], ours["k"], ours["v"])
    out.backward(mine["out"])

    theirs = {name: mine[name].clone().requires_grad_() for name in "qkv"}
    q = rearrange(theirs["q"], "b (k g) l c -> b l (g k) c", k=K)
    k, v = (rearrange(theirs[name], "b k l c -> b l k c") for name in "kv")
    striped = kind == "striped"
    found = peer.ring_flash_attn(q, k, v, None, True, EACH if striped else 4, True, striped, None, size)
    found = rearrange(found, "b l (g k) c -> b (k g) l c", k=K)
    found.backward(mine["out"])

    grads = {name: (ours[name].grad, theirs[name].grad) for name in "qkv"}
    (dq, peers_dq), (dk, peers_both), (dv, _) = grads["q"], grads["k"], grads["v"]
    assert dq is not None and dk is not None and dv is not None and peers_dq is not None and peers_both is not None
    return [(out.detach(), found.detach()), (dq, peers_dq), (dk + dv, peers_both)]


@pytest.mark.parametrize(("size", "kind"), [(3, "contiguous"), (4, "striped")])
def test_output_and_gradients_are_those_of_the_peer(size: int, kind: str) -> None:
    for pairs in run_on_ranks(work, size, size, kind):
        for name, (ours, theirs) in zip(NAMES, pairs, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, msg=lambda said, name=name: f"{name}: {said}")
