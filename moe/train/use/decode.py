"""Continues texts token by token: the context that the model reads for each new token, and the choice of that token.

    newest token     0 1 2 3 4 5 6 7     8      9      10     11     12       (a model that reads at most 8 tokens)
    tokens read      all                 4..8   4..9   4..10  4..11  8..12    a full context is cut to its newer half

`Cached` computes each token once, with a key-value cache, and the entire context only after a cut. `Recomputed`, its reference, computes
the entire context for every token. Sampling: top-k, arXiv 1805.04833; nucleus sampling (top_p), arXiv 1904.09751.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moe.model.transformer import Block, Output, Transformer, moe_layers
from moe.nn.cache import KeyValueCache
from moe.nn.context import Context
from moe.nn.latent import LatentAttention
from moe.nn.routing_record import RoutingRecord
from moe.router.methods import method_of
from parallel.errors import BadInput

# B texts, S tokens of a context, V vocabulary


# (context_BS int64: the tokens that the model reads; start: number of each text's tokens before these) -> next token's logits, fp32 [B, V]
Reads = Callable[[Tensor, int], Tensor]


def start_of(length: int, max_length: int) -> int:
    """Return `start`: how many of the first tokens of a text of `length` tokens the model no longer reads. It reads at most `max_length`
    tokens. `start` grows by half a context at a time, so that a cache is rarely filled anew."""
    half = max(1, max_length // 2)
    return max(0, -(-(length - max_length) // half) * half)


class Recomputed:
    """`Reads` that computes the entire context for each token. The context is padded to `max_length`, so that compiled code gets a single
    length."""

    def __init__(self, model: Callable[[Tensor], Output], max_length: int) -> None:
        self.model, self.max_length = model, max_length

    def __call__(self, context_BS: Tensor, start: int) -> Tensor:
        batch, seen = context_BS.shape
        filled_BL = torch.cat([context_BS, context_BS.new_zeros(batch, self.max_length - seen)], dim=1)
        logits_BLV: Tensor = self.model(filled_BL).logits_BLV
        return logits_BLV[:, seen - 1]


class Cached:
    """`Reads` with a key-value cache for contexts of at most `max_length` tokens. The model is unsharded, on one device. source: number of
    leading tokens that an encoder reads; max_length then counts only the decoder's tokens. at_once: number of a prompt's tokens computed
    together. record: stores the experts of each token. Raises BadInput for a record of an encoder-decoder, or of texts longer than a
    context."""

    def __init__(
        self, model: Transformer, *, source: int = 0, max_length: int | None = None, at_once: int = 512, record: RoutingRecord | None = None
    ) -> None:
        if record is not None and source:
            needed = "a decoder-only model, because encoder and decoder each number their positions from 0"
            fix = "record one forward pass over the source and the target instead of a decoding"
            raise BadInput("record", got="a record for an encoder-decoder", needed=needed, fix=fix)
        self.model, self.source, self.record, self.at_once = model, source, record, at_once
        self.max_length = max_length or model.config.max_length
        self.cache, self.start = KeyValueCache(0, 0), -1
        self.source_BSD: Tensor | None = None
        reads = [block for block in model.layers if isinstance(block, Block)][model.config.decoder_begins :]
        self.layers = [block.attention for block in reads]
        self.crosses = [block.cross for block in reads if block.cross is not None]

    def __call__(self, context_BS: Tensor, start: int) -> Tensor:
        read_BS, context_BS = context_BS.tensor_split([self.source], dim=1)
        if start != self.start or len(context_BS) != self.cache.batch or context_BS.shape[1] <= self.cache.seen:
            assert start == 0 or not self.source, "an encoder's text is read whole"
            if start and self.record is not None:
                needed = f"texts of at most {self.max_length} tokens: the context of a longer one is cut, and its tokens are routed twice"
                raise BadInput(
                    "record", got=f"a text whose context is cut to begin at token {start}", needed=needed, fix="ask for fewer tokens"
                )
            self.cache, self.start = KeyValueCache(len(context_BS), self.max_length), start
            self.source_BSD = self.model.encoded(read_BS) if self.source else None
        rope = self.model.config.rope
        if rope.scaling == "dynamic" and context_BS.shape[1] > rope.length:  # a longer text changes the rotation of all cached keys
            self.cache = KeyValueCache(len(context_BS), self.max_length)
        with self._reading():
            for new_BN in context_BS[:, self.cache.seen :].split(self.at_once, dim=1):
                given = new_BN, self.cache.context(new_BN, length=context_BS.shape[1], record=self.record)
                found = self.model(*given) if self.source_BSD is None else self.model.written(*given, self.source_BSD)
                logits_BV: Tensor = found.logits_BLV[:, -1]
                self.cache.seen += new_BN.shape[1]
        return logits_BV

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Return a context manager in which attention layers read and extend the cache."""
        with ExitStack() as stack:

            def replace(owner: nn.Module, name: str, value: Any) -> None:
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, value)

            for layer in self.layers:
                replace(layer, "core", partial(self.cache.attend, layer))
                if isinstance(layer, LatentAttention):
                    replace(layer, "compressed", True)
            for cross in self.crosses:
                replace(cross, "products", partial(self.cache.products, cross))
            replace(self.model, "whole_sequences", self.cache.all_places)
            yield


class Written:
    """`Reads` for an encoder-decoder without a cache: encoder (first `source` tokens) and decoder compute all tokens again for each new
    one. It is the reference for `Cached`, and is used for models that `Cached` does not support (`can_cache`)."""

    def __init__(self, model: Transformer, source: int) -> None:
        self.model, self.source = model, source

    def __call__(self, context_BS: Tensor, start: int) -> Tensor:
        assert start == 0, "an encoder's text is read whole"
        logits_BLV: Tensor = self.model(context_BS, Context.of(context_BS, source=self.source)).logits_BLV
        return logits_BLV[:, -1]


def can_cache(model: Transformer) -> bool:
    """Return whether `Cached` supports the model. It supports neither experts that choose their tokens, because a token's output then
    depends on later tokens, nor model.document_mask in an encoder-decoder."""
    return not (model.halves and model.config.document_mask) and all(
        method_of(layer.router.spec).tokens_choose for layer in moe_layers(model)
    )


def for_continuing(model: Transformer) -> None:
    """Prepare MoE layers for generation: they count no load or loss and, if tokens choose their experts, drop no token."""
    for layer in moe_layers(model):
        layer.reporting = False
        if method_of(layer.router.spec).tokens_choose:
            layer.router.spec = layer.router.spec.model_copy(update={"eval_capacity_factor": None})


@torch.no_grad()
def continued(
    reads: Reads,
    prompts: Sequence[Sequence[int]],
    *,
    num_tokens: int,
    max_length: int,
    vocab_size: int,
    sampling: Sampling,
    seeds: Sequence[int],
    device: torch.device | None = None,
) -> Iterator[list[int]]:
    """Yield `num_tokens` lists, each with the next token of every text. reads: computes the logits of the next token. prompts: lists of
    token ids of equal length; the last `max_length` ids are read. sampling: chooses a token by its logits; only ids below `vocab_size` are
    chosen. seeds: one for each text, so that a text does not depend on the others of its batch."""
    texts = [list(prompt[-max_length:]) for prompt in prompts]
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    for _ in range(num_tokens):
        start = start_of(len(texts[0]), max_length)
        logits_BV = reads(torch.tensor([text[start:] for text in texts], device=device), start)
        chosen = sampling.choose(logits_BV[:, :vocab_size].float().cpu(), generators)
        for text, token in zip(texts, chosen, strict=True):
            text.append(token)
        yield chosen


@dataclass(frozen=True)
class Sampling:
    """Draws the next token from softmax(logits / temperature). Only the `top_k` likeliest tokens are kept (None: all). Of these, the
    likeliest are kept until their total probability reaches `top_p` (None: all). temperature 0: takes the likeliest token. Raises BadInput
    for impossible values."""

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise BadInput("--temperature", got=self.temperature, needed="at least 0, and finite", fix="--temperature 0.8")
        if self.top_k is not None and self.top_k < 1:
            raise BadInput("--top_k", got=self.top_k, needed="at least 1 token", fix="--top_k 40")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise BadInput("--top_p", got=self.top_p, needed="more than 0, at most 1", fix="--top_p 0.9")
        for flag, value in (("--top_k", self.top_k), ("--top_p", self.top_p)):
            if self.temperature == 0 and value is not None:
                needed = "a --temperature above 0, because 0 always takes the likeliest token"
                raise BadInput(flag, got=f"{value} with --temperature 0", needed=needed, fix=f"remove {flag}")

    def choose(self, logits_BV: Tensor, generators: Sequence[torch.Generator]) -> list[int]:
        """Return one token for each row of logits_BV (fp32, on the CPU), drawn with the row's generator. Raises BadInput for NaN or
        infinity."""
        if not logits_BV.isfinite().all():
            fix = "take an earlier checkpoint (--step), or lower optimizer.lr"
            raise BadInput("model", got="logits that are not finite", needed="finite weights", fix=fix)
        if self.temperature == 0:
            return logits_BV.argmax(-1).tolist()
        probs_BV = self._likely(logits_BV / self.temperature).softmax(-1)
        return [int(torch.multinomial(row, 1, generator=g)) for row, g in zip(probs_BV, generators, strict=True)]

    def _likely(self, logits_BV: Tensor) -> Tensor:
        """Return the logits with -inf for excluded tokens. All tokens as likely as the top_k-th are kept."""
        if self.top_k is not None and self.top_k < logits_BV.shape[1]:
            least_B1 = logits_BV.topk(self.top_k, dim=-1).values[:, -1:]
            logits_BV = logits_BV.masked_fill(logits_BV < least_B1, -math.inf)
        if self.top_p is not None and self.top_p < 1:
            sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
            probs_BV = sorted_BV.softmax(-1)
            enough_BV = probs_BV.cumsum(-1) - probs_BV >= self.top_p  # True for a token if the likelier ones already have probability top_p
            logits_BV = logits_BV.masked_fill(torch.zeros_like(enough_BV).scatter(1, order_BV, enough_BV), -math.inf)
        return logits_BV
