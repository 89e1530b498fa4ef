"""Cross-entropy in chunks of tokens and tiles of the vocabulary: torch's loss and gradients, without the logits of all tokens in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from moe.checks.together import check_run
from moe.model.transformer import Transformer
from moe.nn.vocabulary import PADDING, Rows, look_up, project, summed_loss
from moe.parallelize.build import save_memory
from moe.recipe import sections
from moe.recipe.load import build_run
from moe.verify.cases import Case
from parallel.data.tiling import Tiled
from parallel.errors import BadInput
from tests.support.ranks import run_on_ranks
from tests.support.tiny import start

# B sequences, L length, D model, V vocabulary
B, L, D, V = 3, 7, 8, 26


def matrix_of(tiles: int, whole_VD: Tensor) -> Rows | Tiled:
    whole = Rows(slice(0, len(whole_VD)), whole_VD.shape[1]).to(whole_VD.dtype)
    made = whole.in_tiles(tiles) if tiles > 1 else whole
    parts = list(made.tiles) if isinstance(made, Tiled) else [made]
    for part in parts:
        assert isinstance(part, Rows)
        part.weight.data = whole_VD[part.first : part.first + len(part.weight)].clone()
    return made


def drawn(seed: int, dtype: torch.dtype = torch.float64, *, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Return (x [B, L, D], targets with some padding, matrix [V, D] times `scale`)."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(B, L, D, generator=draw, dtype=torch.float64).to(dtype)
    targets = torch.randint(V, (B, L), generator=draw)
    targets[1, L // 2 :] = PADDING
    return x.requires_grad_(), targets, (scale * torch.randn(V, D, generator=draw, dtype=torch.float64)).to(dtype)


def plain(x_BLD: Tensor, targets_BL: Tensor, weight_VD: Tensor, cap: float | None = None) -> Tensor:
    logits = F.linear(x_BLD, weight_VD.to(x_BLD.dtype))
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = logits if cap is None else cap * (2 * torch.sigmoid(2 * logits / cap) - 1)
    return F.cross_entropy(logits.flatten(0, 1), targets_BL.flatten(), reduction="sum", ignore_index=-100)


@given(st.integers(1, B * L + 4), st.integers(1, V), st.sampled_from([1e-2, 1.0, 30.0]), st.sampled_from([None, 3.0]))
@settings(max_examples=40, deadline=None)
def test_any_chunks_and_tiles_give_the_loss_and_gradients_of_cross_entropy(
    chunks: int, tiles: int, scale: float, cap: float | None
) -> None:
    """In float64, for logits of hundreds, chunks of unequal size, more chunks than tokens, and capped logits."""
    if chunks == tiles == 1:
        return  # compared in test_one_chunk_is_bitwise_cross_entropy
    x, targets, whole = drawn(chunks * 100 + tiles, scale=scale)
    matrix = matrix_of(tiles, whole)
    loss = summed_loss(x, targets, matrix, chunks=chunks, cap=cap)
    (0.3 * loss).backward()
    y, weight = x.detach().clone().requires_grad_(), whole.clone().requires_grad_()
    want = plain(y, targets, weight, cap)
    (0.3 * want).backward()
    grad = torch.cat([p.grad for p in matrix.parameters() if p.grad is not None])
    assert x.grad is not None and weight.grad is not None and y.grad is not None
    torch.testing.assert_close(loss, want, rtol=1e-12, atol=0)
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(grad, weight.grad, rtol=1e-10, atol=1e-12)
    assert not bool(x.grad[1, L // 2 :].any())


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 2**-24), (torch.bfloat16, 2**-9)])
@pytest.mark.parametrize(("chunks", "tiles"), [(4, 1), (1, 3), (2, 2)])
def test_chunks_are_within_rounding_of_the_whole(chunks: int, tiles: int, dtype: torch.dtype, rounding: float) -> None:
    """fp32 is compared with float64, and bf16 with torch's loss in bf16, whose logits are equal.

    A gradient is a sum. Each term may be off by four roundings and, in fp32, by twice the logits' size in roundings (the exponential).
    """
    x, targets, whole = drawn(5, dtype)
    whole = whole.float()
    exact = torch.float64 if dtype == torch.float32 else None  # so that only summed_loss rounds
    y, weight = (t.detach().to(exact or t.dtype, copy=True).requires_grad_() for t in (x, whole))
    matrix = matrix_of(tiles, whole)
    loss, want = summed_loss(x, targets, matrix, chunks=chunks), plain(y, targets, weight)
    loss.backward()
    want.backward()
    grad = torch.cat([p.grad for p in matrix.parameters() if p.grad is not None])
    assert x.grad is not None and weight.grad is not None and y.grad is not None
    assert loss.dtype == torch.float32 and x.grad.dtype == dtype and grad.dtype == torch.float32
    torch.testing.assert_close(loss, want.to(loss.dtype), rtol=1e-6, atol=0)
    valid = (targets != PADDING).flatten()
    x_ND = x.detach().flatten(0, 1).double()
    logits = x_ND @ whole.double().t()
    bound = rounding * (4 + (2 * logits.abs().max() if dtype == torch.float32 else 0))
    g_NV = (logits.softmax(-1) - F.one_hot(targets.flatten().clamp(min=0), V)).abs() * valid.unsqueeze(1)
    assert bool(((grad - weight.grad).abs() <= bound * (g_NV.t() @ x_ND.abs())).all())
    assert bool(((x.grad - y.grad).flatten(0, 1).abs() <= bound * (g_NV @ whole.double().abs())).all())


def test_one_chunk_is_bitwise_cross_entropy() -> None:
    x, targets, whole = drawn(6, torch.float32)
    weight = whole.clone().requires_grad_()
    loss = summed_loss(x, targets, weight, chunks=1)
    loss.backward()
    y, other = x.detach().clone().requires_grad_(), whole.clone().requires_grad_()
    want = plain(y, targets, other)
    want.backward()
    assert torch.equal(loss, want) and torch.equal(x.grad, y.grad) and torch.equal(weight.grad, other.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("tiles", [1, 2, 5])
def test_tiles_look_up_and_project_as_the_whole(tiles: int) -> None:
    """Look-up, its gradient and the projection to logits are equal for any number of tiles."""
    _, tokens, whole = drawn(7)
    tokens = tokens.clamp(min=0)
    matrix, weight = matrix_of(tiles, whole), whole.clone().requires_grad_()
    found = look_up(tokens, matrix)
    assert torch.equal(found, whole[tokens])
    found.sin().sum().backward()
    F.embedding(tokens, weight).sin().sum().backward()
    assert torch.equal(torch.cat([p.grad for p in matrix.parameters() if p.grad is not None]), weight.grad)  # type: ignore[arg-type]
    torch.testing.assert_close(project(found, matrix), F.linear(found, whole))


class Largest(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(t.numel() for t in tree_flatten(out)[0] if isinstance(t, Tensor))])
        return out


@pytest.mark.parametrize(("chunks", "tiles"), [(1, 1), (3, 1), (1, 2), (3, 2)])
def test_logits_exist_for_one_chunk_and_one_tile_at_a_time(chunks: int, tiles: int) -> None:
    """In forward and backward pass, the largest tensor has tokens / chunks * V / tiles elements. All other tensors are smaller by choice of
    sizes.
    """
    vocabulary, length = 120, 60
    model = Transformer(
        sections.Model(num_layers=1, d_model=4, num_heads=2, d_ff=6, max_length=length, tied_embeddings=False), vocab_size=vocabulary
    )
    save_memory(model, recompute=sections.Recompute(loss_chunks=chunks), tiling=sections.Tiling(head=tiles))
    tokens = torch.randint(vocabulary, (B, length + 1), generator=torch.Generator().manual_seed(0))
    with Largest() as seen:
        model(tokens[:, :-1], None, tokens[:, 1:]).loss.backward()
    assert seen.elements == B * length // chunks * vocabulary // tiles


def test_the_model_gives_a_loss_or_logits() -> None:
    model = Transformer(sections.Model(num_layers=1, d_model=8, num_heads=2, d_ff=6), vocab_size=V)
    save_memory(model, recompute=sections.Recompute(loss_chunks=2))
    _, targets, _ = drawn(8)
    tokens = targets.clamp(min=0)
    logits, loss = model(tokens), model(tokens, None, targets)
    assert logits.logits_BLV.shape == (B, L, V) and logits.loss.numel() == 0 and loss.logits_BLV.numel() == 0
    want = F.cross_entropy(logits.logits_BLV.flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(loss.loss, want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["ddp", "zero1"])
def test_a_step_on_two_ranks_is_the_same_in_chunks(kind: str) -> None:
    """Losses, norms and weights of two steps do not depend on the number of chunks, with micro-batches and a tied embedding."""
    if kind == "zero1":
        from parallel.data.deepspeed import load_deepspeed

        load_deepspeed()

    def work(rank: int, chunks: int) -> list[Any]:
        tiny = start(Case("gshard", kind, 2, 2, 3, "fp32"), rank)
        tiny.model.loss_chunks = chunks
        found = []
        for step in range(2):
            loss = tiny.accumulate(step).loss
            found += [loss, tiny.finish().total]
        return [found, tiny.engine.state("embedding")["weight"].clone()]

    for (want, weight), (got, other) in zip(run_on_ranks(work, 2, 1, timeout_s=60), run_on_ranks(work, 2, 5, timeout_s=60), strict=True):
        assert got == pytest.approx(want, rel=1e-6)
        torch.testing.assert_close(other, weight, rtol=1e-4, atol=1e-6)


def test_more_chunks_than_tokens_of_a_micro_batch_are_refused() -> None:
    values = {"model": {"max_length": 16}, "train": {"global_batch": 8}, "recompute": {"loss_chunks": 65}, "pipeline": {"microbatches": 2}}
    with pytest.raises(BadInput, match=r"recompute.loss_chunks: got 65, needed at most the 64 tokens of a micro-batch"):
        check_run(build_run(values), 1)
    check_run(build_run(values | {"recompute": {"loss_chunks": 64}}), 1)
