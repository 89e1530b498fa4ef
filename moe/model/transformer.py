"""A Transformer with pre-norm residual blocks. Some blocks may have a MoE layer as their feed-forward network.

    tokens -> embedding -> [ x + attention(norm x) ; x + ffn-or-experts(norm x) ] * layers -> norm -> logits

An encoder-decoder (T5, arXiv 1910.10683) has the encoder's blocks first. A sequence is the encoder's tokens, then the decoder's:

    x = embedding of the encoder's tokens  -> encoder's blocks -> norm -> s          encoder and decoder: one position bias each
    y = embedding of the decoder's tokens  -> [ y + attention ; y + cross(norm y, s) ; y + ffn-or-experts ] -> norm / sqrt(D) -> logits

The division by sqrt(D) is only for tied embeddings. Pipeline stages send one tensor, which has x (or s), then y. If sequences are
sharded, a rank has a shard of the encoder's tokens, then a shard of the decoder's.

`Transformer(config)(tokens)` works without a process group; all parallelism is applied from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from moe.experts.layer import LayerReport, MoELayer
from moe.model.ahead import PredictionDepth, multi_token_loss
from moe.model.initialize import FirstValues, alone, initialize
from moe.model.kept import Kept, keeping
from moe.nn.attention import Attention
from moe.nn.context import Context
from moe.nn.latent import LatentAttention
from moe.nn.linear import FeedForward, Norm, drop, scaled
from moe.nn.own_loss import OwnLoss
from moe.nn.vocabulary import CrossEntropy, OfTokens, Rows, TiledRows, as_targets, capped, cross_entropy, look_up, project, summed_loss
from moe.recipe import sections
from moe.recipe.shapes import SEPARATOR
from moe.router.losses import join
from parallel.data.tiling import Tiled
from parallel.mesh.mesh import Axis
from parallel.mesh.regions import in_region
from parallel.numerics.position_bias import Bias
from parallel.numerics.precision import sum_dtype
from parallel.numerics.recompute import recomputed

# B batch, L length, D model, V vocabulary

Reports = tuple[LayerReport, ...]  # one for each MoE layer, in order


class Output(NamedTuple):
    """Result of a forward pass: `logits_BLV` fp32 or, with targets, `loss`, the cross-entropy summed over tokens, fp32 []. The one that is
    not computed is an empty tensor. `layers`: reports of the MoE layers. A pipeline stage before the last returns only `hidden_BLD` and
    reports. `kept`: values that the argument `keep` names. Output is a tuple, because engines that hook the backward pass find tensors only
    in tuples."""

    logits_BLV: Tensor
    loss: Tensor
    layers: Reports
    hidden_BLD: Tensor | None = None
    kept: Kept | None = None


class StageLayers(NamedTuple):
    """Consecutive layers that form a pipeline stage. `begins`: the stage has the embedding. `ends`: it has the last norm and the head."""

    layers: range
    begins: bool
    ends: bool


class Block(nn.Module):
    """Attention, optional cross attention, and a feed-forward network or MoE layer, each with norm and residual connection.
    `recompute`: activations that the backward pass recomputes: `none`, `full` (of the block), or `selective` (of its feed-forward network
    or MoE layer)."""

    def __init__(self, model: sections.Model, experts: sections.Experts, router: sections.Router, layer: int) -> None:
        super().__init__()
        self.layer, self.dropout, self.scale = layer, model.dropout, model.scales.residual
        self.recompute: Literal["none", "full", "selective"] = "none"
        self.columns: Callable[[int], slice] | None = None  # sequence length -> positions held by this rank between layers; None: all
        self.first_channel = 0  # index of the first channel that this rank holds between layers
        self.attention_norm = Norm(model.d_model, model.norm, eps=model.norm_eps)
        halves, begins = model.kind == "encoder_decoder", model.decoder_begins
        first = layer == model.half_of(layer).start or not halves  # all layers of a half (encoder, decoder) share its first layer's bias
        self.attention: Attention | LatentAttention
        if model.latent.key_rank is None:
            self.attention = Attention(model, of="encoder" if layer < begins else "decoder", biased=first, window=model.window_of(layer))
        else:
            self.attention = LatentAttention(model, window=model.window_of(layer))
        crosses = halves and layer >= begins
        self.cross_norm = Norm(model.d_model, model.norm, eps=model.norm_eps) if crosses else None
        self.cross = Attention(model, of="cross", biased=False) if crosses else None
        self.ffn_norm = Norm(model.d_model, model.norm, eps=model.norm_eps)
        self.ffn: FeedForward | Tiled | None = None
        self.moe: MoELayer | None = None
        if layer in model.layers_with_experts():
            nth, ffn, d_ff = model.layers_with_experts().index(layer), experts.ffn or model.ffn, experts.d_ff or model.d_ff
            width = (experts.shared_d_ff or d_ff) * experts.shared
            shared = FeedForward(model.d_model, width, ffn, swiglu=model.gating) if experts.shared else None
            sizes = {"d_model": model.d_model, "d_ff": model.d_ff}
            form = {"ffn": model.ffn, "swiglu": model.gating, "norm_eps": model.norm_eps, "layer": layer, "nth": nth, "shared": shared}
            self.moe = MoELayer(experts, router, **sizes, **form)  # type: ignore[arg-type]
        else:
            self.ffn = FeedForward(model.d_model, model.d_ff, model.ffn, swiglu=model.gating)

    def forward(
        self, x_BLD: Tensor, context: Context, bias: Bias | None = None, source_BSD: Tensor | None = None
    ) -> tuple[Tensor, LayerReport | None]:
        """Return [B, L, D] in x's dtype, and a report if the block has a MoE layer. `bias`: position bias that all blocks of the encoder,
        or of the decoder, share. `source_BSD`: the encoder's output."""
        given = (x_BLD, context, bias, source_BSD)
        return recomputed(self._whole, *given) if self.recompute == "full" else self._whole(*given)

    def _whole(self, x_BLD: Tensor, context: Context, bias: Bias | None, source_BSD: Tensor | None) -> tuple[Tensor, LayerReport | None]:
        x_BLD = x_BLD + self._drop(self.attention(self.attention_norm(x_BLD), context, shared=bias), "attention", context)
        if self.cross is not None and self.cross_norm is not None:
            crossed_BLD = self.cross(self.cross_norm(x_BLD), context, source_BSD=source_BSD)
            x_BLD = x_BLD + self._drop(crossed_BLD, "cross", context)
        return recomputed(self._second, x_BLD, context) if self.recompute == "selective" else self._second(x_BLD, context)

    def _second(self, x_BLD: Tensor, context: Context) -> tuple[Tensor, LayerReport | None]:
        normed_BLD = self.ffn_norm(x_BLD)
        if self.moe is not None:
            y_BLD, report = self.moe(normed_BLD, context)
        else:
            assert self.ffn is not None
            y_BLD, report = self.ffn(normed_BLD), None
        return x_BLD + self._drop(y_BLD, "ffn", context), report

    def _drop(self, x_BLD: Tensor, part: str, context: Context) -> Tensor:
        """Multiply the output of a sublayer (`part`: attention, cross or ffn) by the residual scale, and apply dropout."""
        return _dropped(self, scaled(x_BLD, self.scale), f"layers.{self.layer}.{part}", context)


class SharedBias(nn.Module):
    """The position bias that all blocks of the encoder, or of the decoder, share. On a pipeline stage that has only later blocks, it takes
    the place of the first block, which owns the bias."""

    def __init__(self, first: Block) -> None:
        super().__init__()
        assert first.attention.bias is not None
        self.attention = nn.ModuleDict({"bias": first.attention.bias})


class Transformer(nn.Module):
    """The model. `model(tokens_BL)`, tokens int64, returns an Output with logits; with `targets_BL`, an Output with the loss.

    Negative targets do not count in the loss: PADDING, and marks of ids that are not predicted (moe/recipe/shapes.py). An encoder-decoder
    gets Context.of(tokens_BL, source=number of encoder tokens); its logits and targets are of the decoder's tokens. `model(x, context,
    targets, part)` runs only the layers `part`: x is tokens if `part` begins the model, else the output of the layer before `part`.
    `keep=("hidden", "routing")`: the Output also has these intermediate values (moe/model/kept.py)."""

    def __init__(
        self,
        model: sections.Model | None = None,
        experts: sections.Experts | None = None,
        router: sections.Router | None = None,
        *,
        vocab_size: int = 256,
        compute: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.config, self.compute, self.vocab_size = model or sections.Model(), compute, vocab_size
        self.dropout, self.first_channel = self.config.dropout, 0  # as in Block
        self.columns: Callable[[int], slice] | None = None
        self.slices = 1  # number of ranks among which sequences are sharded between layers (tensor.sequence_parallel)
        experts, router, width = experts or sections.Experts(), router or sections.Router(), self.config.d_model
        self.adapted = False  # whether some parameters of the model, here or on another pipeline stage, are LoRA adapters (moe/nn/lora.py)
        self.own_loss: OwnLoss | None = None  # set for training with train.loss: module:name
        self.loss_chunks, self.recast = 1, False  # recast: the head casts its weight again in the backward pass and keeps no copy
        # used for logits that are neither sharded nor chunked; a compiled function can replace it
        self.cross_entropy: CrossEntropy = cross_entropy
        self.embedding: nn.Parameter | Rows | TiledRows | None = nn.Parameter(torch.empty(vocab_size, width))
        self.layers = nn.ModuleList(Block(self.config, experts, router, i) for i in range(self.config.num_layers))
        self.norm: Norm | None = Norm(width, self.config.norm, eps=self.config.norm_eps)
        self.halves = self.config.kind == "encoder_decoder"
        self.encoder_norm = Norm(width, self.config.norm, eps=self.config.norm_eps) if self.halves else None
        layers = self.config.num_layers
        depths = (Block(self.config, experts, router, layers + depth) for depth in range(self.config.ahead))
        self.ahead = nn.ModuleList(PredictionDepth(self.config, block) for block in depths)  # multi-token prediction: moe/model/ahead.py
        self.parts = {0: StageLayers(range(self.config.num_layers), begins=True, ends=True)}
        # Functions that parallelism replaces. whole_sequences: gathers sequences (of an encoder-decoder, the decoder's) from the ranks'
        # shards. whole_rows: the same for sequences that consist of the encoder's tokens and then the decoder's. inner_sequences: returns
        # the sequences that this rank's attention computes.
        self.whole_sequences: Callable[[Tensor], Tensor] = lambda x_BL: x_BL
        self.whole_rows = self.whole_sequences
        self.inner_sequences: Callable[[Tensor], Tensor] = lambda x_BL: x_BL
        self.router_spec = router
        self.expert_counts = {moe.layer: moe.router.num_experts for moe in moe_layers(self)}  # must be made before `hold` removes layers
        self.head: Rows | TiledRows | None = None if self.config.tied_embeddings else Rows(slice(0, vocab_size), width)
        if not next(self.parameters()).is_meta:
            initialize(self, FirstValues(self.config, *alone(self), seed=seed))

    def hold(self, parts: Mapping[int, StageLayers]) -> None:
        """Keep only the layers of `parts`, stage index -> layers of that stage. Call it before weights are initialized."""
        self.parts = dict(parts)
        held = {layer for part in parts.values() for layer in part.layers}
        for layer in range(self.config.num_layers):
            if layer not in held:
                half = self.config.half_of(layer)
                shares = self.halves and layer == half.start and held & {*half}
                self.layers[layer] = SharedBias(self.layers[layer]) if shares else None  # type: ignore[arg-type, assignment]
        if self.config.decoder_begins - 1 not in held:
            self.encoder_norm = None
        if not any(part.ends for part in parts.values()):
            self.norm, self.head, self.ahead = None, None, nn.ModuleList()
        if not any(part.begins or (part.ends and self.config.ends_read_embedding) for part in parts.values()):
            self.embedding = None

    def forward(
        self,
        tokens_BL: Tensor,
        context: Context | None = None,
        targets_BL: Tensor | None = None,
        part: StageLayers | None = None,
        *,
        keep: Collection[str] = (),
    ) -> Output:
        part = part or self.parts[0]
        if keep:
            with keeping([self.layers[layer] for layer in part.layers], keep, batch=len(tokens_BL)) as kept:
                return self(tokens_BL, context, targets_BL, part)._replace(kept=kept)  # type: ignore[no-any-return]
        context = context or (Context.fresh(tokens_BL) if self.training else Context.of(tokens_BL))
        blocks = [self.layers[layer] for layer in part.layers]
        if any(block.recompute != "none" for block in blocks):
            context = context.remembering()  # so that a recomputed layer repeats its routing
        if not self.halves and (self.config.document_mask or context.begins_T is not None):
            separator = self._separator if self.config.document_mask else None
            context = context.with_documents(separator, self._whole_inner_sequences)
        if self.halves:
            x_BLD, reports, context = self._encode_and_decode(blocks, tokens_BL, context, part)
        else:
            x_BLD, reports = _through(blocks, self._look_up(tokens_BL) if part.begins else tokens_BL, context)
        if not part.ends:
            none = torch.empty(0, device=x_BLD.device)
            return Output(none, none, reports, x_BLD)
        return self._end(x_BLD, targets_BL, context, reports)

    @property
    def _separator(self) -> int:
        return SEPARATOR if self.config.document_separator is None else self.config.document_separator

    def _whole_inner_sequences(self, x_BL: Tensor) -> Tensor:
        return self.inner_sequences((self.whole_rows if self.halves else self.whole_sequences)(x_BL))

    def encoded(self, tokens_BS: Tensor) -> Tensor:
        """Return the encoder's output [B, S, D], which `written` takes as `source_BSD`. The tokens are not sharded over ranks."""
        blocks = list(self.layers[: self.config.decoder_begins])
        return self._encode(blocks, self._look_up(tokens_BS), Context.of(tokens_BS))[0]

    def written(self, tokens_BN: Tensor, context: Context, source_BSD: Tensor) -> Output:
        """Run the decoder on the encoder's output `source_BSD`. Return an Output with logits. `context` describes the decoder's tokens."""
        blocks = list(self.layers[self.config.decoder_begins :])
        y_BND, reports = _through(blocks, self._look_up(tokens_BN), context, self._bias(blocks), source_BSD)
        return self._end(y_BND, None, context, reports)

    def _encode_and_decode(
        self, blocks: Sequence[nn.Module], x_BLD: Tensor, context: Context, part: StageLayers
    ) -> tuple[Tensor, Reports, Context]:
        """Return (hidden states, reports, context of the decoder's tokens). Hidden states: on the last stage the decoder's, on others the
        encoder's followed by the decoder's. `x_BLD`: tokens, or the previous stage's hidden states. `part`: this stage's layers."""
        begins, sentinels = self.config.decoder_begins, self.vocab_size - self.config.spans.num_spans
        if self.config.document_mask:
            read, written = context.halves_with_documents(self._separator, sentinels, self._whole_inner_sequences)
        else:
            read, written = context.halves()
        if part.begins:
            x_BLD = self._look_up(_in_slices(x_BLD, context.source, self.slices))
        x_BSD, y_BLD = x_BLD.tensor_split([context.source // self.slices], dim=1)
        if part.begins:
            x_BSD, y_BLD = _dropped(self, x_BSD, "embedding", read), _dropped(self, y_BLD, "embedding", written)
        first, second = ([block for block in blocks if block.layer in half] for half in (range(begins), range(begins, len(self.layers))))
        x_BSD, of_encoder = self._encode(first, x_BSD, read, ends=begins - 1 in part.layers)
        y_BLD, of_decoder = _through(second, y_BLD, written, self._bias(second), x_BSD)
        return y_BLD if part.ends else torch.cat([x_BSD, y_BLD], dim=1), of_encoder + of_decoder, written

    def _encode(self, blocks: Sequence[nn.Module], x_BSD: Tensor, context: Context, *, ends: bool = True) -> tuple[Tensor, Reports]:
        x_BSD, reports = _through(blocks, x_BSD, context, self._bias(blocks))
        if ends:
            assert self.encoder_norm is not None
            x_BSD = _dropped(self, self.encoder_norm(x_BSD), "encoder", context)
        return x_BSD, reports

    def _bias(self, blocks: Sequence[nn.Module]) -> Bias | None:
        """Return the position bias that these blocks share, or None without one. All blocks belong to the encoder, or all to the
        decoder."""
        if not blocks:
            return None
        first = self.layers[self.config.half_of(cast(Block, blocks[0]).layer).start]
        own = first.attention["bias"] if isinstance(first, SharedBias) else cast(Block, first).attention.bias
        return None if own is None else own()

    @in_region("embedding")
    def _look_up(self, tokens_BL: Tensor) -> Tensor:
        assert self.embedding is not None
        return scaled(look_up(tokens_BL, self.embedding, dtype=self.compute), self.config.scales.embedding)

    @in_region("head")
    def _end(self, x_BLD: Tensor, targets_BL: Tensor | None, context: Context, reports: Reports) -> Output:
        matrix, none = self.embedding if self.head is None else self.head, torch.empty(0, device=x_BLD.device)
        assert self.norm is not None and matrix is not None
        if self.training and targets_BL is not None and len(self.ahead):
            x_BLD = self._join_ahead(x_BLD, targets_BL, matrix, context)
        x_BLD = self.norm(x_BLD)
        if self.halves:
            x_BLD = _dropped(self, x_BLD, "decoder", context)
            x_BLD = x_BLD * self.config.d_model**-0.5 if self.config.tied_embeddings else x_BLD
        x_BLD = scaled(x_BLD, 1 / self.config.scales.head)
        if targets_BL is None:
            logits_BLV = project(x_BLD, matrix, recast=self.recast)
            return Output(capped(logits_BLV.to(sum_dtype(logits_BLV.dtype)), self.config.logit_cap), none, reports)
        own, whole = self.own_loss, self.whole_sequences
        of_tokens = None if own is None else partial(own, targets_BL=targets_BL, context=context, whole=whole)
        return Output(none, self._summed_loss(x_BLD, targets_BL, matrix, of_tokens), reports)

    def _join_ahead(self, x_BLD: Tensor, targets_BL: Tensor, matrix: Tensor | Rows | TiledRows, context: Context) -> Tensor:
        """Return x unchanged. In the backward pass, the gradient of the multi-token prediction loss is added to x's gradient. `matrix`: the
        head's weights."""

        def summed(x_BLD: Tensor, targets_BL: Tensor) -> Tensor:
            return self._summed_loss(scaled(x_BLD, 1 / self.config.scales.head), targets_BL, matrix)

        loss = multi_token_loss(
            self.ahead, x_BLD, targets_BL, context, look_up=self._look_up, summed_loss=summed, whole_sequences=self.whole_sequences
        )
        return join(x_BLD, self.config.ahead_weight * loss, scale=context.auxiliary_scale)

    def _summed_loss(self, x_BLD: Tensor, targets_BL: Tensor, matrix: Tensor | Rows | TiledRows, own: OfTokens | None = None) -> Tensor:
        cap, whole, chunks, recast = self.config.logit_cap, self.cross_entropy, self.loss_chunks, self.recast
        return summed_loss(x_BLD, as_targets(targets_BL), matrix, chunks=chunks, recast=recast, cap=cap, whole=whole, own=own)


def _through(
    blocks: Sequence[nn.Module], x_BLD: Tensor, context: Context, bias: Bias | None = None, source_BSD: Tensor | None = None
) -> tuple[Tensor, Reports]:
    reports = []
    for block in blocks:
        x_BLD, report = block(x_BLD, context, bias, source_BSD)
        reports += [] if report is None else [report]
    return x_BLD, tuple(reports)


def _dropped(within: Block | Transformer, x_BLD: Tensor, place: str, context: Context) -> Tensor:
    """Apply the dropout of `within`, in training, to this rank's shard of activations between layers. `place`: name of the activations, on
    which the random numbers depend."""
    if not (within.training and within.dropout):
        return x_BLD
    if within.columns is not None:
        context = context.of_columns(within.columns(len(context.position_T) // len(context.sequence_B)))
    return drop(x_BLD, within.dropout, name=f"{place}.dropout", context=context, first=within.first_channel)


def _in_slices(tokens_BL: Tensor, source: int, slices: int) -> Tensor:
    """Reorder the tokens of each sequence for `slices` equal shards: each shard has some of the encoder's tokens (the first `source`), then
    some of the decoder's."""
    if slices == 1:
        return tokens_BL
    halves = (half.chunk(slices, dim=1) for half in tokens_BL.tensor_split([source], dim=1))
    return torch.cat([part for slice_ in zip(*halves, strict=True) for part in slice_], dim=1)


def moe_layers(model: nn.Module) -> Iterator[MoELayer]:
    return (m for m in model.modules() if isinstance(m, MoELayer))


def divided_over(model: nn.Module) -> Axis:
    """Return the axis whose ranks each compute a part of the tokens in MoE layers, but all compute the same tokens in other layers. If
    there is no such axis, return one of size 1."""
    spreads = (layer.spread for layer in moe_layers(model) if layer.spread is not None)
    return next((replace(spread.axis, label="numbers of MoE layers") for spread in spreads), Axis("tp"))


def extra_state(model: nn.Module) -> dict[str, Tensor]:
    """Return global name -> tensor of the state that checkpoints store in addition to parameters: the routers' selection biases,
    equal on every rank."""
    return {f"{layer.router.name}.bias": layer.router.bias_E for layer in moe_layers(model) if layer.router.bias_E is not None}


def embedding_as_module(model: Transformer) -> None:
    """Move the embedding table into a module, because FSDP and ZeRO-3 gather whole modules, and tiling replaces modules."""
    if isinstance(model.embedding, nn.Parameter):
        table = model.embedding
        del model.embedding
        with torch.device("meta"):
            model.embedding = Rows(slice(0, model.vocab_size), model.config.d_model)
        model.embedding.weight = table
