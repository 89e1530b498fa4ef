"""Splits a rank's sequences into micro-batches, each with the context that the model's forward pass needs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from moe.data.token_shard import TokenShard
from moe.model.transformer import Transformer
from moe.nn.context import Context
from moe.nn.vocabulary import PADDING as PADDING
from moe.nn.vocabulary import as_inputs
from moe.recipe.shapes import begins
from parallel.errors import BadInput, counted
from parallel.mesh.collectives import sum_over_all
from parallel.mesh.host import read_later

# N sequences of this rank, B sequences of a micro-batch, L tokens of each sequence that this rank reads


@dataclass(frozen=True)
class Tokens:
    """Token counts. inputs, targets: numbers of tokens that the model reads and predicts in the global batch, at least 1. read_N: number of
    tokens in each of this rank's sequences, if the batch has padding; else None. packed: whether a sequence may have several chats."""

    inputs: int
    targets: int
    read_N: list[int] | None
    packed: bool = False


@dataclass(frozen=True)
class Pass:
    """One micro-batch of this rank. targets_BL: ids to predict, negative for tokens that are not predicted (moe/nn/vocabulary.py); None:
    the model returns logits instead of a loss. share: tokens of the micro-batch / tokens of the global batch."""

    inputs_BL: Tensor
    targets_BL: Tensor | None
    context: Context
    share: float


def count_tokens(sequences_NL: Tensor, shard: TokenShard) -> Tokens:
    """Count the tokens of the global batch. Collective over the ranks that share the batch. Raises BadInput on all these ranks for padding
    before a token, and for any padding in an encoder-decoder."""
    assert tuple(sequences_NL.shape) == shard.shape, f"{tuple(sequences_NL.shape)} is not {shard.shape}"
    valid_NL = sequences_NL != PADDING
    reads_NL, predicted_NL = shard.inputs(valid_NL), shard.targets(sequences_NL >= 0)
    gaps = (shard.targets(valid_NL) & ~reads_NL[:, shard.source :]).sum()
    begun = begins(shard.inputs(sequences_NL)).sum()
    sums = sum_over_all(torch.stack((reads_NL.sum(), predicted_NL.sum(), gaps, begun)), shard.axes)
    (inputs, targets, gaps, begun), read_N = read_later(sums, reads_NL.sum(1))()
    if gaps:
        got = f"a token after padding ({PADDING}) in {counted(gaps, 'place')}"
        needed = "padding only at the end of a sequence, because attention would read other padding"
        raise BadInput("sequences", got=got, needed=needed, fix="move the padding behind the tokens")
    padded = inputs < shard.num_tokens
    if padded and shard.source:
        needed = "sequences without padding: an encoder would read it"
        raise BadInput("sequences", got=f"padding ({PADDING})", needed=needed, fix="fill them with tokens")
    return Tokens(max(1, inputs), max(1, targets), read_N if padded else None, begun > 0)


def num_losses(model: Transformer, tokens: Tokens, shard: TokenShard) -> int:
    """Return the divisor of the sum of losses in the global batch: the number of predicted tokens. If the user's own loss function
    (train.loss) is used, it is the number of sequences."""
    return tokens.targets if model.own_loss is None else shard.num_sequences


def passes_of(
    parts: Iterable[Tensor], tokens: Tokens, shard: TokenShard, *, seed: int = 0, step: int = 0, loss_scale: float = 1.0
) -> list[Pass]:
    """Return one Pass for each micro-batch, in order. parts: the micro-batches' tokens, each int64 [B, shard.shape[1]]. tokens: from
    `count_tokens`. loss_scale: multiplies the auxiliary losses."""
    passes, first = [], 0
    for part in parts:
        read_BL, targets_BL, valid_BL = shard.inputs(part), shard.targets(part), None
        inputs_BL = as_inputs(read_BL)
        held = inputs_BL.numel()
        if tokens.read_N is not None:
            valid_BL = inputs_BL != PADDING
            inputs_BL = inputs_BL.masked_fill(~valid_BL, 0)
            held = sum(tokens.read_N[first : first + len(part)])
        share = held / tokens.inputs
        context = Context.of(
            inputs_BL,
            seed=seed,
            step=step,
            first_sequence=shard.sequences.start + first,
            auxiliary_scale=share * loss_scale,
            valid_BL=valid_BL,
            begins_BL=begins(read_BL) if tokens.packed else None,
            positions=shard.position_array,
            length=shard.length,
            source=shard.source,
        )
        if tokens.packed:  # no token predicts the first token of the next chat, so multi-token prediction also ends at the chat's end
            targets_BL = targets_BL.masked_fill(begins(targets_BL), PADDING)
        passes.append(Pass(inputs_BL, targets_BL, context, share))
        first += len(part)
    return passes
