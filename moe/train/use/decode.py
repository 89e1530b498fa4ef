"""Texts continued token by token: which context is read for the next token, and where a full context begins anew.

    tokens so far    0 1 2 3 4 5 6 7     8      9      10     11     12       (a model of at most 8)
    context          all                 4..8   4..9   4..10  4..11  8..12    a full one begins anew with its newer half

With a key-value cache a token costs the work of one token, and of a whole context only once per half context. `Recomputed` reads the whole
context for every token. It works with any callable model, and is the reference for `Cached`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from moe.model.transformer import Block, Output, Transformer, moe_layers
from moe.nn.cache import KeyValueCache
from moe.nn.context import Context
from moe.nn.latent import LatentAttention
from moe.nn.routing_record import RoutingRecord
from moe.router.methods.catalog import method_of
from moe.train.use.sampling import Sampling
from parallel.errors import BadInput

# B texts, S tokens of a context, V vocabulary


class Reads(Protocol):
    """Function that returns logits, fp32 [B, V], after contexts int64 [B, S] of one length, which begin at token `start` of their texts."""

    def __call__(self, context_BS: Tensor, start: int) -> Tensor: ...


def start_of(length: int, max_length: int) -> int:
    """Return the first token of the context of a text with `length` tokens."""
    half = max(1, max_length // 2)
    return max(0, -(-(length - max_length) // half) * half)


class Recomputed:
    """Reads every context whole, padded to `max_length`. One length avoids new code for each length; a causal model does not see the
    padding."""

    def __init__(self, model: Callable[[Tensor], Output], max_length: int) -> None:
        self.model, self.max_length = model, max_length

    def __call__(self, context_BS: Tensor, start: int) -> Tensor:
        batch, seen = context_BS.shape
        filled_BL = torch.cat([context_BS, context_BS.new_zeros(batch, self.max_length - seen)], dim=1)
        logits_BLV: Tensor = self.model(filled_BL).logits_BLV
        return logits_BLV[:, seen - 1]


class Cached:
    """A whole model on one device, with a key-value cache for the context of at most `max_length` tokens.

    `source`: number of leading tokens that an encoder reads once; `max_length` then limits the other tokens. `record`: receives the experts
    of each token that is read. It is refused for an encoder-decoder, and for texts longer than a context.
    """

    def __init__(
        self, model: Transformer, *, source: int = 0, max_length: int | None = None, at_once: int = 512, record: RoutingRecord | None = None
    ) -> None:
        if record is not None and source:
            needed = "a decoder alone: an encoder-decoder's halves have places of their own"
            raise BadInput(
                "record", got="one of an encoder-decoder", needed=needed, fix="record a pass over encoder's and decoder's tokens"
            )
        self.record = record
        self.model, self.source, self.max_length = model, source, max_length or model.config.max_length
        self.at_once = at_once  # tokens: bounds the memory of logits for a long prompt
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
                needed = f"texts of at most {self.max_length} tokens: a longer one begins anew, and its tokens are routed twice"
                raise BadInput("record", got=f"a text that begins anew with token {start}", needed=needed, fix="ask for fewer tokens")
            self.cache, self.start = KeyValueCache(len(context_BS), self.max_length), start
            self.source_BSD = self.model.encoded(read_BS) if self.source else None
        if self._turned_anew(context_BS.shape[1]):
            self.cache = KeyValueCache(len(context_BS), self.max_length)
        with self._reading():
            for new_BN in context_BS[:, self.cache.seen :].split(self.at_once, dim=1):
                given = new_BN, self.cache.context(new_BN, length=context_BS.shape[1], record=self.record)
                found = self.model(*given) if self.source_BSD is None else self.model.written(*given, self.source_BSD)
                logits_BV: Tensor = found.logits_BLV[:, -1]
                self.cache.seen += new_BN.shape[1]
        return logits_BV

    def _turned_anew(self, length: int) -> bool:
        """Return True if all positions rotate differently in a text of this length than in a shorter one: the cache is then invalid."""
        rope = self.model.config.rope
        return rope.scaling == "dynamic" and length > rope.length

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Let attention layers read from and write to the cache until the context exits."""
        cores, whole = [layer.core for layer in self.layers], self.model.whole_sequences
        products = [cross.products for cross in self.crosses]
        for layer in self.layers:
            layer.core = partial(self.cache.attend, layer)
            if isinstance(layer, LatentAttention):
                layer.compressed = True
        for cross in self.crosses:
            cross.products = partial(self.cache.products, cross)  # type: ignore[assignment]
        self.model.whole_sequences = self.cache.all_places
        try:
            yield
        finally:
            for layer, core in zip(self.layers, cores, strict=True):
                layer.core = core
                if isinstance(layer, LatentAttention):
                    layer.compressed = False
            for cross, before in zip(self.crosses, products, strict=True):
                cross.products = before  # type: ignore[method-assign]
            self.model.whole_sequences = whole


class Written:
    """Encoder-decoder without a cache: the encoder reads the first `source` tokens of a context. Both halves are computed again for every
    token. It is the reference for `Cached`, and is needed for routers whose experts choose their tokens."""

    def __init__(self, model: Transformer, source: int) -> None:
        self.model, self.source = model, source

    def __call__(self, context_BS: Tensor, start: int) -> Tensor:
        assert start == 0, "an encoder's text is read whole"
        logits_BLV: Tensor = self.model(context_BS, Context.of(context_BS, source=self.source)).logits_BLV
        return logits_BLV[:, -1]


def can_cache(model: Transformer) -> bool:
    """Return whether every token depends on earlier tokens alone. Experts that choose their tokens also see later ones."""
    return all(method_of(layer.router.spec).tokens_choose for layer in moe_layers(model))


def for_continuing(model: Transformer) -> None:
    """Set MoE layers to count no loads or losses and, if tokens choose their experts, to drop no token in evaluation."""
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
    """Yield the next token of every text, `num_tokens` times. Prompts have one length of at least 1; the last max_length tokens count.

    Each text draws by its own seed, so other texts of the batch change nothing. Tokens from `vocab_size` on are never chosen.
    """
    texts = [list(prompt[-max_length:]) for prompt in prompts]
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    for _ in range(num_tokens):
        start = start_of(len(texts[0]), max_length)
        logits_BV = reads(torch.tensor([text[start:] for text in texts], device=device), start)
        chosen = sampling.choose(logits_BV[:, :vocab_size].float().cpu(), generators)
        for text, token in zip(texts, chosen, strict=True):
            text.append(token)
        yield chosen
