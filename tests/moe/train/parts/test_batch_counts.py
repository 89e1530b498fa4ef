"""Router losses over the global batch, and padding: numbers and gradients are equal for all layouts, micro-batches and recompute kinds.

Model and step are those of `moe verify`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moe.data.token_shard import TokenShard
from moe.model.initialize import global_name
from moe.nn.context import Context
from moe.train.loop.step import accumulate, validation_loss
from moe.train.parts.numbers import LayerNumbers
from moe.train.parts.passes import PADDING
from moe.verify.cases import BATCH, LENGTH, Case
from moe.verify.plain.batches import batch
from parallel.data.deepspeed import load_deepspeed
from parallel.errors import BadInput
from parallel.store.checkpoint import pieces
from tests.support.ranks import each_case, run_on_ranks
from tests.support.tiny import Tiny, start


@dataclass(frozen=True)
class Layout:
    world: int = 1
    microbatches: int = 1
    recompute: str = "none"
    kind: str = "ddp"


PLAIN = Layout()
LAYOUTS = [Layout(1, 3), Layout(2, 3), Layout(2, 3, "selective"), Layout(2, 1, "full", "zero1")]
ONE_OF_ALL = {"importance_weight": 0.05, "balance_weight": 0.3, "z_weight": 0.01}
Found = tuple[float, list[LayerNumbers], dict[str, Tensor]]


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    load_deepspeed()  # imported once, before ranks are forked


def lengthened(lengths: list[int]) -> Tensor:
    """Return the batch of step 0 with sequence i padded after lengths[i] tokens."""
    tokens = batch(0)[: len(lengths)].clone()
    for row, n in zip(tokens, lengths, strict=True):
        row[n:] = PADDING
    return tokens


def _on_rank(rank: int, layout: Layout, tokens: Tensor | None, sections: dict[str, Any]) -> tuple[float, list[Any], dict[str, Tensor]]:
    case = Case("gshard", layout.kind, layout.world, layout.world, layout.microbatches, "fp32")
    tiny = start(case, rank, recompute={"kind": layout.recompute}, **sections)
    whole = batch(0) if tokens is None else tokens
    shard = TokenShard.of(tiny.mesh, num_sequences=len(whole), length=LENGTH)
    numbers = accumulate(tiny.executor, shard.of_batch(whole), shard=shard, microbatches=layout.microbatches, seed=7, step=0)
    return numbers.loss, [vars(layer) for layer in numbers.layers], dict(owned(tiny))


def each_computed(cases: Sequence[tuple[Layout, Tensor | None, dict[str, Any]]]) -> list[Found]:
    """Run forward and backward of one step for each case (layout, tokens or None, sections of the recipe); cases with equally many ranks
    run on the same ranks. Return (loss, numbers of each MoE layer, whole gradients by global parameter name) of each case."""
    found: dict[int, Found] = {}
    for world in sorted({layout.world for layout, *_ in cases}):
        chosen = [number for number, (layout, *_) in enumerate(cases) if layout.world == world]
        alone = world == 1 and all(cases[number][0].kind == "ddp" for number in chosen)  # needs no process group
        of_each = [[_on_rank(0, *cases[n])] for n in chosen] if alone else each_case(_on_rank, world, [cases[n] for n in chosen])
        for number, ranks in zip(chosen, of_each, strict=True):
            gradients: dict[str, Tensor] = {}
            for loss, layers, mine in ranks:
                assert (loss, layers) == ranks[0][:2]  # every rank gets the numbers of all ranks
                gradients |= mine
            found[number] = ranks[0][0], [LayerNumbers(**layer) for layer in ranks[0][1]], gradients
    return [found[number] for number in range(len(cases))]


def computed(layout: Layout, *, tokens: Tensor | None = None, **sections: dict[str, Any]) -> Found:
    return each_computed([(layout, tokens, sections)])[0]


def owned(tiny: Tiny) -> Iterator[tuple[str, Tensor]]:
    for name, layout in tiny.engine.layouts.items():
        tensor = tiny.engine.gradient(name)
        if layout.is_owner(tiny.mesh):
            yield from ((p.name, p.tensor.clone()) for p in pieces(global_name(name), layout, tiny.mesh, tensor))


def assert_same(got: Found, want: Found) -> None:
    assert got[0] == pytest.approx(want[0], rel=1e-6)
    for a, b in zip(got[1], want[1], strict=True):
        assert (a.choices, a.kept, a.dropped) == (b.choices, b.kept, b.dropped)
        for what in ("balance_loss", "importance_loss", "z_loss", "entropy"):
            assert getattr(a, what) == pytest.approx(getattr(b, what), rel=1e-5), what
    assert got[2].keys() == want[2].keys()
    largest = max(g.abs().max().item() for g in want[2].values())
    for name, gradient in want[2].items():
        torch.testing.assert_close(got[2][name], gradient, rtol=1e-5, atol=1e-5 * max(1e-3 * largest, gradient.abs().max().item()))


@pytest.mark.parametrize("scope", ["sequence", "global_batch"])
def test_a_scope_gives_the_same_on_every_layout(scope: str) -> None:
    """Balance, importance and z losses over the scope, and all gradients, are equal for all layouts, with drops, noise and dropout."""
    router = ONE_OF_ALL | {"balance_scope": scope}
    want, *others = each_computed([(layout, None, {"router": router}) for layout in (PLAIN, *LAYOUTS)])
    assert want[1][0].importance_loss > 0 and want[1][0].dropped > 0
    for found in others:
        assert_same(found, want)


def test_recompute_with_every_dispatch_kind() -> None:
    """Losses over the global batch and gradients stay equal if recomputation repeats the dispatch of tokens to experts."""
    router = ONE_OF_ALL | {"balance_scope": "global_batch"}
    want = computed(PLAIN, router=router)
    kinds: list[dict[str, Any]] = [{"kind": "padded"}, {"kind": "all_gather"}, {"kind": "all_to_all", "overlap_chunks": 2}]
    cases = [(Layout(2, 3, "selective"), None, {"router": router, "dispatch": dispatch}) for dispatch in kinds]
    cases.append((Layout(4, 3, "full"), None, {"router": router, "dispatch": {"kind": "hierarchical", "node_size": 2}}))
    for found in each_computed(cases):
        assert_same(found, want)


def test_first_choices_alone_count_over_the_global_batch_too() -> None:
    router = ONE_OF_ALL | {"balance_scope": "global_batch", "balance_counts": "first"}
    want = computed(PLAIN, router=router)
    assert want[1][0].balance_loss != computed(PLAIN, router=router | {"balance_counts": "all"})[1][0].balance_loss
    assert_same(computed(Layout(2, 3), router=router), want)


def test_one_pass_over_the_batch_is_its_own_whole_step() -> None:
    """With one process and one micro-batch, the scopes global_batch and micro_batch give the same balance loss; with three they differ."""
    of = lambda scope, layout: computed(layout, router=ONE_OF_ALL | {"balance_scope": scope})[1][0].balance_loss  # noqa: E731
    assert of("global_batch", PLAIN) == of("micro_batch", PLAIN) == pytest.approx(of("global_batch", Layout(1, 3)), rel=1e-5)
    assert abs(of("micro_batch", Layout(1, 3)) - of("micro_batch", PLAIN)) > 1e-3  # so moe verify does not compare this scope


# --- padding ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["sequence", "global_batch"])
def test_sequences_of_padding_change_nothing(scope: str) -> None:
    """If half of the sequences are only padding, losses, loads and gradients equal those of the other half alone, on any layout."""
    router = ONE_OF_ALL | {"balance_scope": scope}
    lengths = [LENGTH + 1, 4, 11, 1, 0, 7]
    want = computed(PLAIN, tokens=lengthened(lengths), router=router)
    full = torch.cat((lengthened(lengths), torch.full((BATCH - 6, LENGTH + 1), PADDING)))
    for found in each_computed([(layout, full, {"router": router}) for layout in (PLAIN, *LAYOUTS)]):
        assert_same(found, want)


def test_padding_at_the_end_of_sequences_changes_nothing() -> None:
    """Loss, loads and gradients equal a reference that computes each sequence alone, cut to its own length."""
    quiet = {
        "router": {"capacity_factor": None, "second": "always", "z_weight": 0.02},
        "experts": {"dropout": 0.0},
        "model": {"dropout": 0.0},
    }
    lengths = [LENGTH + 1, 4, 11, 2, 9, 7, 3, 3, 10, 5, 6, 8]
    loss, (layer,), gradients = computed(Layout(2, 3), tokens=lengthened(lengths), **quiet)

    def one_by_one(rank: int) -> tuple[float, float, Tensor, dict[str, Tensor]]:
        tiny = start(Case("gshard", "ddp", 1, 1, 1, "fp32"), rank, **quiet)
        inputs, targets = sum(min(n, LENGTH) for n in lengths), sum(n - 1 for n in lengths)
        total, balance, choices = 0.0, 0.0, torch.zeros(4, dtype=torch.int64)
        for i, n in enumerate(lengths):
            tokens = batch(0)[i : i + 1, : min(n, LENGTH)]
            share = tokens.numel() / inputs
            output = tiny.model(tokens, Context.of(tokens, seed=7, auxiliary_scale=share))
            entropy = F.cross_entropy(output.logits_BLV[0, : n - 1], batch(0)[i, 1:n], reduction="sum") / targets
            entropy.backward()
            total, balance = total + entropy.item(), balance + share * output.layers[0].balance_loss.item()
            choices += output.layers[0].load_E
        return total, balance, choices, dict(owned(tiny))

    ((total, balance, choices, want),) = run_on_ranks(one_by_one, 1)
    assert loss == pytest.approx(total, rel=1e-6) and layer.balance_loss == pytest.approx(balance, rel=1e-5)
    assert layer.choices == choices.tolist() and layer.dropped == 0
    assert layer.kept == 2 * sum(min(n, LENGTH) for n in lengths)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, want[name], rtol=1e-4, atol=1e-6)


def test_evaluation_leaves_padding_out() -> None:
    """`validation_loss` is the mean over all ranks' predicted tokens, for any number `at_once` of sequences in a micro-batch."""
    lengths = [LENGTH + 1, 4, 11, 2, 9, 0, 1, 3, 10, 5, 6, 8]

    def work(rank: int, world: int, at_once: int) -> float:
        tiny = start(Case("gshard", "ddp", world, world, 1, "fp32"), rank)
        return validation_loss(tiny.executor, tiny.shard.of_batch(lengthened(lengths)), shard=tiny.shard, at_once=at_once)

    def plain(rank: int) -> float:
        tiny = start(Case("gshard", "ddp", 1, 1, 1, "fp32"), rank)
        tiny.model.eval()
        total = 0.0
        for i, n in enumerate(lengths):
            if n > 1:
                logits = tiny.model(batch(0)[i : i + 1, : n - 1]).logits_BLV[0]
                total += F.cross_entropy(logits, batch(0)[i, 1:n], reduction="sum").item()
        return total / sum(max(0, n - 1) for n in lengths)

    (want,) = run_on_ranks(plain, 1)
    for world, at_once in [(1, 12), (1, 5), (2, 2)]:
        assert run_on_ranks(work, world, world, at_once) == [pytest.approx(want, rel=1e-6)] * world


def test_a_token_after_padding_is_refused_on_every_rank() -> None:
    def work(rank: int) -> str:
        tiny = start(Case("switch", "ddp", 2, 2, 1, "fp32"), rank)
        tokens = batch(0).chunk(2)[rank].clone()
        if rank == 1:
            tokens[2, 3] = PADDING
        with pytest.raises(BadInput, match="padding only at the end") as refused:
            accumulate(tiny.executor, tokens, shard=tiny.shard, microbatches=1, seed=7, step=0)
        return str(refused.value)

    first, second = run_on_ranks(work, 2, timeout_s=60)
    assert first == second and "in 1 place," in first
