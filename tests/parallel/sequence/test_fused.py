"""On a GPU, blocks are computed by torch's flash attention: which operators run there, and that they are called as the kernels demand.

Without a GPU: on fake tensors, and on CPU ranks whose operators are replaced by plain attention that checks what the kernels check.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallel.mesh.mesh import Degrees
from parallel.numerics import fused_attention as fused
from parallel.process import process
from parallel.process.process import World
from parallel.rehearse.stage import rehearsal
from parallel.sequence import softmax
from parallel.sequence.order import Order
from tests.parallel.sequence import test_methods
from tests.parallel.sequence.test_methods import METHODS, close, order_of, plain, work
from tests.support.ranks import run_on_ranks

B, H, K, EACH, SIZE = 2, 8, 4, 64, 4
SEEN_BY_FLASH = [(False, False, False, None), (False, False, True, None)]  # (bias, documents, sinks, window)
FORWARD, BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention, torch.ops.aten._scaled_dot_product_flash_attention_backward


class Seen(TorchDispatchMode):
    """Records the pairs of queries and keys that flash attention computes, products, and the size of the largest tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs, self.products, self.largest = {FORWARD: 0, BACKWARD: 0}, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in self.pairs:
            first = int(func.overloadpacket is BACKWARD)
            q, k, causal = args[first], args[first + 1], args[11] if first else args[4:] == (True,)
            self.pairs[func.overloadpacket] += q.shape[2] * (q.shape[2] + 1) // 2 if causal else q.shape[2] * k.shape[2]
            assert k.shape[1] == K * q.shape[1] // H and q.shape[3] % 8 == 0
        self.products += func._opname in ("mm", "bmm")
        out = func(*args, **(kwargs or {}))
        self.largest = max([self.largest, *(x.numel() for x in tree_leaves(out) if isinstance(x, Tensor))])
        return out


def seen_by(name: str, dtype: torch.dtype, channels: int, window: int | None = None) -> Seen:
    """Return what rank SIZE - 1 of SIZE runs on a GPU for one method."""
    world = World(SIZE - 1, SIZE, place="cuda")
    with rehearsal(world):
        method = METHODS[name](process.connect(Degrees(sp=SIZE), world).axis("sp"), SIZE * EACH, window)
        q, k, v = (torch.empty(B, heads, EACH, channels, dtype=dtype, device="cuda:0", requires_grad=True) for heads in (H, K, K))
        with Seen() as seen:
            method(q, k, v).sum().backward()
    return seen


def visible(name: str) -> int:
    order = order_of(name, SIZE)
    each = Order(order.kind, SIZE, SIZE * EACH)
    return sum(each.seen(SIZE - 1, rank) for rank in range(SIZE))


@pytest.mark.parametrize("name", [name for name in METHODS if name != "colossal ring"])
def test_a_gpu_computes_visible_pairs_by_flash_attention_and_stores_no_scores(name: str) -> None:
    """`balanced` leaves some of the last rank's pairs to other ranks; Ulysses has all pairs of its heads."""
    seen = seen_by(name, torch.bfloat16, 8)
    pairs = {"ulysses": SIZE * EACH * (SIZE * EACH + 1) // 2, "balanced": EACH * (EACH + 1) // 2 + 2 * EACH**2}.get(name, visible(name))
    assert seen.pairs == {FORWARD: pairs, BACKWARD: pairs}
    assert seen.products == 0 and seen.largest <= SIZE * B * H * EACH * 8  # a block of scores would have EACH in place of 8


@pytest.mark.parametrize(
    ("dtype", "channels", "window", "takes"),
    [
        (torch.float16, 12, None, True),
        (torch.bfloat16, 256, None, True),
        (torch.bfloat16, 208, None, False),
        (torch.bfloat16, 264, None, False),
        (torch.float32, 8, None, False),
        (torch.bfloat16, 8, 1, False),
    ],
)
def test_plain_operations_compute_what_flash_attention_does_not_take(
    dtype: torch.dtype, channels: int, window: int | None, takes: bool
) -> None:
    seen = seen_by("ring contiguous", dtype, channels, window)
    assert (min(seen.pairs.values()) > 0, seen.products == 0) == (takes, takes)


class Twin(TorchDispatchMode):
    """Computes the GPU's flash attention on a CPU by plain attention, and checks what the kernel needs of its inputs."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is FORWARD:
            q, k, v, *more = args  # without the last arguments if these have their defaults: no dropout, not causal
            assert more in ([], [0.0, True])
            score, v = self._scores(q, k, bool(more), **kwargs), v.repeat_interleave(q.shape[1] // v.shape[1], 1)
            return score.softmax(-1) @ v, score.logsumexp(-1), None, None, q.shape[2], k.shape[2], None, None, None
        if func.overloadpacket is not BACKWARD:
            return func(*args, **(kwargs or {}))
        grad, q, k, v, out, lse, cum_q, cum_k, queries, keys, dropout, causal, *_ = args
        assert (cum_q, cum_k, queries, keys, dropout) == (None, None, q.shape[2], k.shape[2], 0)
        assert lse.is_contiguous() and lse.shape == q.shape[:3] and out.shape == grad.shape == q.shape  # read by address, without strides
        groups, scale = q.shape[1] // k.shape[1], kwargs["scale"]
        weight = (self._scores(q, k, causal, scale) - lse.unsqueeze(-1)).exp()
        wide_k, wide_v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        dscore = weight * (grad @ wide_v.mT - (grad * out).sum(-1, keepdim=True))
        dk, dv = dscore.mT @ q * scale, weight.mT @ grad
        return dscore @ wide_k * scale, *(x.unflatten(1, (-1, groups)).sum(2) for x in (dk, dv))

    @staticmethod
    def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
        assert all(x.stride(-1) == 1 and x.shape[-1] % 8 == 0 for x in (q, k)) and (not causal or q.shape[2] == k.shape[2])
        score = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * scale
        return score.masked_fill(torch.ones(score.shape[2:]).triu(1).bool(), -torch.inf) if causal else score


def test_each_method_calls_flash_attention_as_its_kernel_demands() -> None:
    """Output and gradients are plain attention's, on three ranks, for heads of 10 channels (padded), also with sinks."""
    cases = [(name, *given) for name in METHODS if name != "colossal ring" for given in SEEN_BY_FLASH]

    def by_flash(rank: int) -> list[dict[str, Tensor]]:
        with mock.patch.object(softmax, "kernel_for", lambda q: fused.FLASH), mock.patch.object(test_methods, "CASES", cases), Twin():
            return work(rank, 3)

    ranks = run_on_ranks(by_flash, 3)
    for number, (name, *given) in enumerate(cases):
        for rank, found in enumerate(ranks):
            places = list(order_of(name, 3).positions(rank))
            for tensor in ("out", "q", "k", "v"):
                close(found[number][tensor], plain(3, *given)[tensor][:, :, places], f"{name}, {tensor}")
