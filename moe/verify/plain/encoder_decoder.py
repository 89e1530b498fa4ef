"""Computes an encoder-decoder for `moe verify`'s plain twin (a second implementation of training, twin.py): T5 (arXiv 1910.10683) with
Switch's experts (2101.03961).

    s = embedding[source tokens] ; s = s + attention(norm s) ; s = s + ffn-or-experts(norm s) ; ... ; s = norm s
    y = embedding[target tokens] ; y = y + attention(norm y) ; y = y + cross(norm y, s) ; y = y + ffn-or-experts(norm y) ; ...
    logits = embedding (norm y) / sqrt(D), or head (norm y)

D is the width of the model, C the number of channels of a head. All layers of the encoder use the position bias of its first layer, and
likewise in the decoder. Attention scores are not divided by sqrt(C). The other modules are in moe/verify/plain/model.py.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.recipe.sections import Run
from moe.verify.plain.batches import PADDING
from moe.verify.plain.layer import Layer, Weights, product
from moe.verify.plain.model import Note, Passed, Rounding, buckets, dense_or_experts, dropped, norm
from moe.verify.plain.router import Tokens, wide

# B batch, L length, S length of the source, D model, H heads, C channels of a head, T = B*L tokens


def forward(run: Run, weights: Weights, batch: Tensor, *, step: int, cast: Rounding, note: Note) -> Passed:
    """Run the batch of a step, int64 [B, source + target + 1], through the model in training. The encoder reads the source columns.
    note(name, output): called with each module's output, as in moe/verify/plain/model.py."""
    model = run.model
    read, total = model.max_length, model.read_length
    layers: dict[str, Layer] = {}
    documents = documents_of(run, batch[:, :-1].tolist()) if model.document_mask else None
    places = torch.arange(len(batch) * total).view(-1, total)

    def stack(columns: slice, numbers: range, source: Tensor | None) -> tuple[Tensor, Tokens]:
        """Run the encoder, or the decoder if `source` (the encoder's output) is given. columns: the columns of the batch that this half of
        the model reads. numbers: indices of its layers. Return (output [T, D], its tokens)."""
        ids, at = batch[:, :-1][:, columns].flatten(), places[:, columns].flatten()
        tokens = Tokens(ids.tolist(), at, [True] * len(ids), len(ids) // len(batch), run.train.seed, step)

        def noted(name: str, values: Tensor) -> None:
            """Call `note` with a row for each token of the whole batch: `values` for this half's tokens, NaN for the others."""
            everywhere = torch.full((places.numel(), values.shape[1]), torch.nan)
            everywhere[at] = values.detach().float()
            note(name, everywhere)

        x = cast(cast(weights["embedding"])[ids])
        x = dropped(run, x, "embedding", tokens, cast)
        if source is None:
            noted("embedding", x)
        first = f"layers.{numbers[0]}"
        for number in numbers:
            name = f"layers.{number}"
            seen = cast(norm(x, weights[f"{name}.attention_norm.weight"], model))
            noted(f"{name}.attention_norm", seen)
            bias = wide(cast(wide(weights[f"{first}.attention.bias.weight"])))
            same = None if documents is None else same_document(*(documents[source is not None],) * 2)
            out = attention(seen, seen, weights, f"{name}.attention", run, len(batch), bias, source is not None, cast, same)
            noted(f"{name}.attention", out)
            x = cast(x + dropped(run, out, f"{name}.attention", tokens, cast))
            if source is not None:
                seen = cast(norm(x, weights[f"{name}.cross_norm.weight"], model))
                noted(f"{name}.cross_norm", seen)
                same = None if documents is None else same_document(documents[1], documents[0])
                out = attention(seen, source, weights, f"{name}.cross", run, len(batch), None, False, cast, same)
                noted(f"{name}.cross", out)
                x = cast(x + dropped(run, out, f"{name}.cross", tokens, cast))
            seen = cast(norm(x, weights[f"{name}.ffn_norm.weight"], model))
            noted(f"{name}.ffn_norm", seen)
            out = dense_or_experts(seen, weights, number, run, tokens, cast, noted, layers)
            x = cast(x + dropped(run, out, f"{name}.ffn", tokens, cast))
            noted(name, x)
        x = cast(norm(x, weights["encoder_norm.weight" if source is None else "norm.weight"], model))
        if source is not None:
            noted("norm", x)
        return x, tokens

    encoded, tokens = stack(slice(0, read), range(model.decoder_begins), None)
    encoded = dropped(run, encoded, "encoder", tokens, cast)
    x, tokens = stack(slice(read, total), range(model.decoder_begins, model.num_layers), encoded)
    x = dropped(run, x, "decoder", tokens, cast)
    x = cast(x / math.sqrt(model.d_model)) if model.tied_embeddings else x
    logits = wide(cast(x @ cast(weights["embedding" if model.tied_embeddings else "head.weight"]).t()))
    targets = batch[:, read + 1 :].flatten()
    return Passed(F.cross_entropy(logits, targets, reduction="sum", ignore_index=PADDING), layers)


def documents_of(run: Run, rows: list[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """Return (document numbers of the tokens that the encoder reads, of the tokens that the decoder reads), each as [sequence][position].
    rows: token ids of each sequence, the encoder's part first."""
    model, first_sentinel = run.model, run.vocab_size - run.model.spans.num_spans
    found: tuple[list[list[int]], list[list[int]]] = ([], [])
    for row in rows:
        document, spans, of_read, of_written = 0, 0, list[int](), list[int]()
        of_sentinel: dict[int, int] = {}  # number of a sentinel in the encoder's part (from 1) -> its document
        for place, token in enumerate(row[: model.max_length]):
            if token == (model.document_separator or 0) and place < model.max_length - 1:
                document += 1
            of_read.append(document)
            if token >= first_sentinel:
                of_sentinel[len(of_sentinel) + 1] = document
        for token in row[model.max_length :]:
            spans += token >= first_sentinel
            of_written.append(of_sentinel.get(max(spans, 1), document))
        found[0].append(of_read)
        found[1].append(of_written)
    return found


def same_document(queries: list[list[int]], keys: list[list[int]]) -> Tensor:
    """Return bool [B, L, S]: whether query and key belong to the same document. queries, keys: document numbers, as from `documents_of`."""
    return torch.tensor([[[a == b for b in k] for a in q] for q, k in zip(queries, keys, strict=True)])


def attention(
    x: Tensor,
    source: Tensor,
    weights: Weights,
    name: str,
    run: Run,
    sequences: int,
    bias: Tensor | None,
    causal: bool,
    cast: Rounding,
    same: Tensor | None = None,
) -> Tensor:
    """Attention output [T, D] with queries from x [T, D] and keys from source [T', D] of the same sequence. sequences: number of sequences.
    bias [32, H]: added to the scores of each of the 32 `buckets`; None: no bias. causal: keys after the query are masked. same: bool [B, L,
    S], whether a query may attend to a key; None: to all keys."""
    model = run.model
    heads, groups = model.num_heads, model.num_kv_heads or model.num_heads
    size = model.head_size or model.d_model // model.num_heads

    def projected(tokens: Tensor, matrix: str, count: int) -> Tensor:  # [heads, B, L, C]
        flat = product(tokens, weights, f"{name}.{matrix}.weight", cast)
        if model.qkv_bias:
            flat = cast(flat + cast(weights[f"{name}.{matrix}_bias.weight"]))
        if model.qk_norm != "none" and matrix != "v":
            rows = flat if model.qk_norm == "whole" else flat.reshape(-1, size)
            flat = cast(norm(rows, weights[f"{name}.{matrix}_norm.weight"], model, kind="rmsnorm")).reshape(flat.shape)
        return flat.view(sequences, -1, count, size).permute(2, 0, 1, 3)

    q, k, v = projected(x, "q", heads), projected(source, "k", groups), projected(source, "v", groups)
    length, others = q.shape[2], k.shape[2]
    mixed = []
    for head in range(heads):
        group = head // (heads // groups)
        scores = wide(q[head] @ k[group].transpose(1, 2))
        if bias is not None:
            scores = scores + bias[buckets(length, others, both_ways=not causal), head]
        if causal:
            scores = scores.masked_fill(torch.ones(length, others, dtype=torch.bool).triu(1), -math.inf)
        if same is not None:
            scores = scores.masked_fill(~same, -math.inf)
        mixed.append(cast(scores.softmax(2).to(v.dtype) @ v[group]))
    flat = torch.stack(mixed, 2).reshape(-1, heads * size)
    return product(flat, weights, f"{name}.out.weight", cast)
