"""Recompute changes memory and no number: the same loss and gradients, the same decisions, everything counted once.

The second pass is disturbed on purpose in some tests, as another kernel's bits would disturb it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from moe import config
from moe.context import Context
from moe.model.transformer import Output, Transformer
from parallel.recompute import Replay, recomputed

# B sequences, L length, D model, V vocabulary
B, L, D, V = 6, 10, 16, 40

ROUTERS: dict[str, dict[str, Any]] = {
    "switch": {"preset": "switch", "capacity_factor": 1.0, "min_capacity": 1, "jitter": 0.2, "z_weight": 0.01},
    "gshard": {"preset": "gshard", "capacity_factor": 1.0, "min_capacity": 1},
}
KINDS = [("full", 1), ("full", 2), ("selective", 1)]


def model_of(kind: str = "none", every: int = 1, *, router: str = "switch", **values: Any) -> Transformer:
    sizes = {"num_layers": 4, "d_model": D, "num_heads": 2, "d_ff": 48, "moe_every": 2, "max_length": L, "dropout": 0.1} | values
    return Transformer(
        config.Model(**sizes),
        config.Experts(num_experts=4, dropout=0.1),
        config.Router(**ROUTERS[router]),
        vocab_size=V,
        recompute=config.Recompute(kind=kind, every=every),
        seed=3,
    )


def tokens() -> Tensor:
    return (torch.rand(B, L, generator=torch.Generator().manual_seed(1)) ** 2 * V).long()


def passed(model: Transformer) -> tuple[Output, dict[str, Tensor]]:
    """One forward and backward pass; the output and every gradient."""
    output = model(tokens(), Context.of(tokens(), seed=5, step=2, auxiliary_scale=0.5))
    (output.logits_BLV * torch.linspace(-1, 1, V)).sin().sum().backward()
    return output, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize(("kind", "every"), KINDS)
def test_loss_gradients_and_reports_are_those_without_recompute(kind: str, every: int, router: str) -> None:
    plain, want = passed(model_of(router=router))
    again, got = passed(model_of(kind, every, router=router))
    assert torch.equal(again.logits_BLV, plain.logits_BLV)
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)
    for a, b in zip(again.layers, plain.layers, strict=True):
        assert all(torch.equal(torch.as_tensor(x), torch.as_tensor(y)) for x, y in zip(vars(a).values(), vars(b).values(), strict=True))


# --- what is kept -------------------------------------------------------------------------------------------------------


class Alive(TorchDispatchMode):
    """Bytes of what operations made and somebody still holds."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_flatten(out)[0]:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    def bytes(self, *, but: Iterable[Tensor]) -> int:
        theirs = {tensor.untyped_storage()._cdata for tensor in but}
        return sum(size for key, (reference, size) in self.made.items() if key not in theirs and not reference.expired())


def kept_bytes(model: Transformer) -> int:
    """What lies between the forward and the backward pass for the latter's sake."""
    with Alive() as alive:
        output = model(tokens(), Context.of(tokens()))
    kept = alive.bytes(but=model.parameters())
    output.logits_BLV.sum().backward()
    return kept


def test_less_is_kept_the_more_is_computed_again() -> None:
    kept = {kind: kept_bytes(model_of(*kind)) for kind in [("none", 1), ("selective", 1), ("full", 2), ("full", 1)]}
    assert kept["full", 1] < kept["full", 2] < kept["none", 1]
    assert kept["full", 1] < kept["selective", 1] < 0.7 * kept["none", 1]
    assert kept["full", 1] < kept["none", 1] / 3


def test_a_recomputed_block_keeps_its_input_alone() -> None:
    """A dense block more costs tokens * width in fp32; one with experts its routing beside: some numbers a token, none of width."""
    of: Callable[[int, int], int] = lambda layers, every: kept_bytes(model_of("full", num_layers=layers, moe_every=every))  # noqa: E731
    assert of(6, 0) - of(4, 0) == 2 * B * L * D * 4
    assert of(6, 1) - of(4, 1) < 2 * B * L * (D * 4 + 5 * 8)


# --- what is decided once -----------------------------------------------------------------------------------------------


def test_a_decision_is_made_once_and_taken_over() -> None:
    made: list[str] = []

    def decide(name: str) -> str:
        made.append(name)
        return name * 2

    replay = Replay()
    assert [replay.once(n, lambda n=n: decide(n)) for n in ("a", "b", "a", "a")] == ["aa", "bb", "aa", "aa"] and made == ["a", "b"]
    context = Context.of(tokens())
    assert context.once("a", lambda: decide("c")) == "cc" and context.once("a", lambda: decide("d")) == "dd"
    assert context.remembering().replay is not context.remembering().replay


def test_a_part_without_gradient_is_computed_once() -> None:
    calls: list[int] = []

    def part(x: Tensor) -> Tensor:
        calls.append(1)
        return x.exp().sin()

    x = torch.randn(3, requires_grad=True)
    with torch.no_grad():
        recomputed(part, x)
    assert len(calls) == 1
    recomputed(part, x).sum().backward()
    assert len(calls) == 3
    torch.testing.assert_close(x.grad, x.detach().exp().cos() * x.detach().exp())
