"""Bytes of optimizer states per parameter, without a model: means over dense parameters and over experts.

    adamw, kfac   8     two moments; a user's own optimizer counts the same
    sgd           4     a momentum
    muon          4     of matrices, 8 of embedding, head, gates and norms
    adafactor     4 (n + m) / (n m)     of an n x m matrix; 4 of a vector

In fp32. K-FAC's factors are extra (docs/parallel/kfac.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from moe.plan.job.flops import expert_size, size
from moe.recipe.sections import Model, Run
from moe.recipe.shapes import GATED, T5_BUCKETS


class Matrices(NamedTuple):
    """`num` matrices of `rows` times `columns`. inner: matrices that Muon steps; outer: vocabulary's tables and gates."""

    kind: Literal["inner", "outer", "expert"]
    num: int
    rows: int
    columns: int

    @property
    def elements(self) -> int:
        return self.num * self.rows * self.columns


def optimizer_bytes(run: Run) -> tuple[float, float]:
    """Return the bytes of states per (dense parameter, expert's parameter), means over all of them."""
    kind, found = run.optimizer.kind, list(_matrices(run))
    if kind in ("adamw", "kfac") or run.optimizer.is_own:
        return 8.0, 8.0
    if kind == "sgd":
        return 4.0, 4.0
    total = size(run.model, run.experts, run.router, vocab_size=run.vocab_size).total
    experts = sum(m.elements for m in found if m.kind == "expert")
    dense = total - experts
    if kind == "muon":
        return 8.0 - 4.0 * sum(m.elements for m in found if m.kind == "inner") / dense, 4.0
    factored = {kind: sum(4.0 * m.num * (m.rows + m.columns) for m in found if (m.kind == "expert") == kind) for kind in (False, True)}
    vectors = dense - sum(m.elements for m in found if m.kind != "expert")
    return (factored[False] + 4.0 * vectors) / dense, factored[True] / experts if experts else 0.0


def _matrices(run: Run) -> Iterator[Matrices]:
    m, x, width = run.model, run.experts, run.model.d_model
    head = m.head_size or width // m.num_heads
    yield Matrices("outer", 1 if m.tied_embeddings else 2, run.vocab_size, width)
    if m.latent.key_rank is not None:
        yield from _latents(m)
    else:
        attentions = m.num_layers + (0 if m.kind == "decoder" else m.num_layers - m.decoder_begins)  # cross attention, too
        yield Matrices("inner", 2 * attentions, m.num_heads * head, width)
        yield Matrices("inner", 2 * attentions, (m.num_kv_heads or m.num_heads) * head, width)
    if m.positions == "t5":
        yield Matrices("outer", m.num_layers if m.kind == "decoder" else 2, T5_BUCKETS, m.num_heads)
    sparse = m.layers_with_experts()
    yield _network("inner", m.num_layers - len(sparse), width, m.d_ff, m.ffn)
    ffn, hidden = x.ffn or m.ffn, x.d_ff or m.d_ff
    for nth in range(len(sparse)):
        yield _network("expert", x.of_layer(nth), width, hidden, ffn)
        yield Matrices("outer", 2 if run.router.noise == "noisy_top_k" else 1, x.of_layer(nth) + x.free, width)
        yield _network("inner", 1 if x.shared else 0, width, (x.shared_d_ff or hidden) * x.shared, ffn)
        yield Matrices("outer", int(x.shared_gate), 1, width)
        yield _network("inner", int(x.residual), width, expert_size(m, x) // (width * (3 if ffn in GATED else 2)), ffn)
        yield Matrices("outer", int(x.residual), 2, width)


def _latents(m: Model) -> Iterator[Matrices]:
    """Yield the matrices of latent attention (moe/nn/latent.py)."""
    size, rank = m.latent_sizes, m.latent.query_rank
    if rank is not None:
        yield Matrices("inner", m.num_layers, rank, m.d_model)
    yield Matrices("inner", m.num_layers, m.num_heads * size.key, m.d_model if rank is None else rank)
    yield Matrices("inner", m.num_layers, size.rank + size.rotary, m.d_model)
    yield Matrices("inner", m.num_layers, m.num_heads * (size.content + size.value), size.rank)
    yield Matrices("inner", m.num_layers, m.d_model, m.num_heads * size.value)


def _network(kind: Literal["inner", "expert"], count: int, width: int, hidden: int, ffn: str) -> Matrices:
    return Matrices(kind, count * (3 if ffn in GATED else 2), hidden, width)
