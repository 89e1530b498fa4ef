"""Activation recomputation saves memory, and leaves loss, gradients, routing and counts bitwise unchanged.

Some tests change the router between the first and the recomputed forward pass: the recomputed pass must still route as the first did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.checkpoint import CheckpointError

from moe.experts.dispatch.dispatcher import Exchange
from moe.experts.dispatch.network import Dropout
from moe.experts.dispatch.steps import Steps
from moe.experts.experts import Experts
from moe.model.transformer import Output, Transformer, moe_layers
from moe.nn.context import Context
from moe.parallelize.build import save_memory
from moe.recipe import sections
from moe.recipe.load import build_run
from moe.router.routing import Routing
from parallel.errors import BadInput
from parallel.mesh.mesh import Axis
from parallel.numerics.recompute import Replay, recomputed
from tests.support.ranks import run_on_ranks

# B sequences, L length, D model, V vocabulary
B, L, D, V = 6, 10, 16, 40

ROUTERS: dict[str, dict[str, Any]] = {
    "switch": {"preset": "switch", "capacity_factor": 1.0, "min_capacity": 1, "jitter": 0.2, "z_weight": 0.01},
    "gshard": {"preset": "gshard", "capacity_factor": 1.0, "min_capacity": 1},
}
KINDS = [("full", 1), ("full", 2), ("selective", 1)]


def model_of(kind: str = "none", every: int = 1, *, router: str = "switch", **values: Any) -> Transformer:
    sizes = {"num_layers": 4, "d_model": D, "num_heads": 2, "d_ff": 48, "moe_every": 2, "max_length": L, "dropout": 0.1} | values
    model = Transformer(
        sections.Model(**sizes),
        sections.Experts(num_experts=4, dropout=0.1),
        sections.Router(**ROUTERS[router]),
        vocab_size=V,
        seed=3,
    )
    return save_memory(model, recompute=sections.Recompute(kind=kind, every=every))


def tokens() -> Tensor:
    return (torch.rand(B, L, generator=torch.Generator().manual_seed(1)) ** 2 * V).long()


def passed(model: Transformer) -> tuple[Output, dict[str, Tensor]]:
    """Run one forward and backward pass. Return the output and the gradients by parameter name."""
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


def test_every_nth_block_is_the_recipes_choice() -> None:
    found = [[block.recompute for block in model_of("selective", every).layers] for every in (1, 2, 3)]
    again = "selective"
    assert found == [[again] * 4, [again, "none"] * 2, [again, "none", "none", again]]


@pytest.mark.parametrize(("values", "line"), [({"kind": "ful"}, "recompute.kind: got 'ful'"), ({"every": 0}, "recompute.every: got 0")])
def test_what_does_not_exist_is_refused(values: dict[str, Any], line: str) -> None:
    with pytest.raises(BadInput) as refused:
        build_run({"recompute": values})
    assert str(refused.value).startswith(line), refused.value


# --- bytes of activations kept for the backward pass --------------------------------------------------------------------


class Alive(TorchDispatchMode):
    """A mode that records the tensors that operations make; `bytes` counts the storages that are still alive."""

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
    """Return the bytes of activations that are alive between the forward and the backward pass."""
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
    """Each further dense block keeps its input, B*L*D in fp32. An MoE block keeps its routing too: under 40 bytes a token."""
    of: Callable[[int, int], int] = lambda layers, every: kept_bytes(model_of("full", num_layers=layers, moe_every=every))  # noqa: E731
    assert of(6, 0) - of(4, 0) == 2 * B * L * D * 4
    assert of(6, 1) - of(4, 1) < 2 * B * L * (D * 4 + 5 * 8)


# --- decisions such as routing are made once and replayed ---------------------------------------------------------------


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


# --- a recomputed pass with other router scores -------------------------------------------------------------------------


class Noting:
    """A dispatcher that records the routing of each forward pass, then calls `inner`."""

    def __init__(self, inner: Exchange) -> None:
        self.inner = inner
        self.seen: list[tuple[Tensor, Tensor]] = []

    def run(self, x_TD: Tensor, routing: Routing, experts: Experts, *, dropout: Dropout | None = None) -> Tensor:
        self.seen.append((routing.expert_TK.clone(), routing.kept_TK.clone()))
        return self.inner.run(x_TD, routing, experts, dropout=dropout)


def disturbed(model: Transformer, context: Context, inputs: Tensor) -> list[list[tuple[Tensor, Tensor]]]:
    """Run forward and backward, and negate all router weights between them, so that the order of scores is reversed in the recomputed
    pass. Return, for each MoE layer, the routing (experts, kept) of its first and its recomputed pass."""
    noted = []
    for layer in moe_layers(model):
        layer.dispatcher = Noting(layer.dispatcher)
        noted.append(layer.dispatcher)
    logits = model(inputs, context).logits_BLV
    for layer in moe_layers(model):
        layer.router.weight.data.neg_()
    logits.square().sum().backward()
    return [n.seen for n in noted]


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("kind", ["full", "selective"])
def test_a_recomputed_pass_with_other_scores_routes_as_the_first(kind: str, router: str) -> None:
    for first, second in disturbed(model_of(kind, router=router), Context.of(tokens(), seed=5), tokens()):
        assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


def test_without_replay_the_recomputed_pass_routes_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shows that the tests here can fail: without `Replay`, more than half of the choices change."""
    monkeypatch.setattr(Replay, "once", lambda self, name, decide: decide())
    model = model_of("selective")
    with suppress(CheckpointError):
        disturbed(model, Context.of(tokens(), seed=5), tokens())
    last = list(moe_layers(model))[-1].dispatcher
    assert isinstance(last, Noting)
    first, second = last.seen
    assert (first[0] != second[0]).float().mean() > 0.5


def test_two_passes_in_flight_keep_their_own_decisions() -> None:
    """Each micro-batch replays its own routing if a pipeline runs forward a, forward b, backward b, backward a."""
    model, other = model_of("full"), tokens().flip(0)
    noted = []
    for layer in moe_layers(model):
        layer.dispatcher = Noting(layer.dispatcher)
        noted.append(layer.dispatcher)
    a = model(tokens(), Context.of(tokens(), seed=5))
    b = model(other, Context.of(other, seed=5, first_sequence=B))
    b.logits_BLV.sum().backward()
    a.logits_BLV.sum().backward()
    for layer in noted:
        of_a, of_b, again_b, again_a = layer.seen
        assert torch.equal(of_a[0], again_a[0]) and torch.equal(of_b[0], again_b[0]) and not torch.equal(of_a[0], of_b[0])


def test_ranks_exchange_again_in_the_same_order() -> None:
    """With expert parallelism, recomputed passes do not deadlock although only rank 1's scores change between its two passes."""

    def work(rank: int, kind: str) -> list[Tensor]:
        model = model_of(kind)
        axis = Axis("ep", (0, 1), rank, dist.group.WORLD)
        for layer in moe_layers(model):
            whole = {n: p.data for n, p in layer.experts.named_parameters()}
            layer.experts.hold(range(2 * rank, 2 * rank + 2))
            for n, p in layer.experts.named_parameters():
                p.data.copy_(whole[n].chunk(2)[rank])
            layer.dispatcher = Steps((axis,), kernels=layer.experts.kernels)
        mine = tokens().chunk(2)[rank]
        context = Context.of(mine, seed=5, first_sequence=rank * B // 2)
        if rank == 1 and kind != "none":
            seen = disturbed(model, context, mine)
        else:
            model(mine, context).logits_BLV.square().sum().backward()
            seen = []
        same = all(torch.equal(first[i], second[i]) for first, second in seen for i in (0, 1))
        return [torch.tensor(same), *(p.grad for p in model.parameters() if p.grad is not None)]

    want = run_on_ranks(work, 2, "none", timeout_s=60)
    for kind in ("full", "selective"):
        got = run_on_ranks(work, 2, kind, timeout_s=60)
        assert all(found[0] for found in got) and [len(found) for found in got] == [len(found) for found in want]
