"""The Mixture-of-Experts layer: route, dispatch, experts, combine (Switch, arXiv 2101.03961, fig. 2).

    x_BLD -> router -> dispatcher.run: tokens to experts, network, back -> y_BLD -> shared and residual networks
                \\__ balance and z losses join the backward pass here

    shared    y + [sigmoid(w x)] shared(x)                  DeepSeekMoE (arXiv 2401.06066); with the gate: Qwen2-MoE
    residual  c_0 y + c_1 dense(x), c = softmax(W_c x)      PR-MoE (arXiv 2201.05596)

`output_bias` [E, D]: the biases after w2 (experts.biases), of all experts, on every rank. The layer returns zero for a dropped
token, which continues through the residual connection around the layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from moe.experts import free, scaled_inputs
from moe.experts.copies import Copies
from moe.experts.dispatch.dispatcher import Exchange
from moe.experts.dispatch.local import Local
from moe.experts.dispatch.network import Dropout
from moe.experts.experts import Experts
from moe.nn.context import Context
from moe.nn.linear import FeedForward, Linear, linear_fp32
from moe.router.losses import (
    balance_loss,
    count_choices,
    importance_loss,
    join,
    load_loss,
    mean_over_tokens,
    spread_gates,
    step_means,
    z_loss,
)
from moe.router.router import Router, Routing

if TYPE_CHECKING:
    from moe.recipe.router_spec import RouterSpec

if TYPE_CHECKING:  # the layer runs without the packages that read recipes
    from moe.recipe import sections

# B batch, L length, D model, T = B*L tokens, K choices, E experts, R rows, F hidden


@dataclass(frozen=True)
class LayerReport:
    """Measurements of one layer over the valid tokens held here.

    `load_E` int64: choices of each expert before dropping. `kept`, `dropped`: choices; they add up to load_E's sum, which is
    tokens * k unless experts choose. The others are fp32 means over this micro-batch's tokens, so micro-batches are averaged by
    their shares of the tokens. `importance_loss` and `load_loss` are 0 if their weights are 0. `entropy` of the router is in nats.
    """

    layer: int
    load_E: Tensor
    kept: Tensor
    dropped: Tensor
    balance_loss: Tensor
    importance_loss: Tensor
    load_loss: Tensor
    z_loss: Tensor
    entropy: Tensor


NO_REPORT = LayerReport(-1, *(torch.empty(0),) * 8)  # returned if `reporting` is off


class MoELayer(nn.Module):
    """The MoE layer with index `layer` in the model, `nth` among MoE layers. `shared`: a feed-forward network for every token, or None."""

    def __init__(
        self,
        experts: sections.Experts,
        router: sections.Router,
        *,
        d_model: int,
        d_ff: int,
        ffn: str,
        swiglu: sections.Swiglu | None = None,
        norm_eps: float | None = None,
        layer: int,
        nth: int = 0,
        shared: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.layer, self.dropout, self.shared = layer, experts.dropout, shared
        count, d_ff, ffn = experts.of_layer(nth), experts.d_ff or d_ff, experts.ffn or ffn
        self.free, self.skip = experts.free, experts.skip
        self.router = Router(
            router,
            num_experts=count + self.free,
            d_model=d_model,
            norm_eps=norm_eps,
            kernels=experts.kernels,
            name=f"layers.{layer}.router",
        )
        form = {"d_model": d_model, "d_ff": d_ff, "ffn": ffn, "swiglu": swiglu, "kernels": experts.kernels, "products": experts.products}
        self.experts = Experts(count, **form, biases=experts.biases)  # type: ignore[arg-type]
        self.output_bias = nn.Parameter(torch.empty(count, d_model)) if experts.biases else None
        self.shared_gate = Linear(d_model, 1) if shared is not None and experts.shared_gate else None
        self.residual: nn.Module | None = FeedForward(d_model, d_ff, ffn, swiglu=swiglu) if experts.residual else None
        self.coefficient = Linear(d_model, 2) if experts.residual else None
        self.dispatcher: Exchange = Local()
        self.reporting = True  # False in text generation: for one token, counting takes as long as a matrix product
        self.copies: Copies | None = None  # set if other ranks hold copies of its tokens

    def forward(self, x_BLD: Tensor, context: Context) -> tuple[Tensor, LayerReport]:
        if self.copies is None:
            return self._routed(x_BLD, context)
        if not self.copies.cuts(x_BLD):
            y_BLD, report = self._routed(self.copies.exchange.whole(x_BLD), context)
            return self.copies.exchange.mine(y_BLD), report
        mine_BLD, context, share = self.copies.cut(x_BLD, context)
        y_BLD, report = self._routed(mine_BLD, context)
        return self.copies.join(y_BLD), self.copies.together(report, share=share)

    def _routed(self, x_BLD: Tensor, context: Context) -> tuple[Tensor, LayerReport]:
        x_TD = x_BLD.flatten(0, 1)
        routing = self.router(x_TD, sequence_tokens=x_BLD.shape[1], context=context)
        dropout = self._dropout(context, x_TD.dtype) if self.training and self.dropout else None
        inputs = self.router.spec.gate_on == "input"
        run = partial(scaled_inputs.run, self.dispatcher) if inputs else self.dispatcher.run
        count = self.experts.num_experts
        sent = free.of_experts(routing, count) if self.free else routing
        y_TD = run(x_TD, sent, self.experts, dropout=dropout)
        if self.output_bias is not None:
            y_TD = y_TD + self._output_biases(routing).to(y_TD.dtype)
        if self.skip:
            y_TD = y_TD + free.skipped(x_TD, routing, count, skip=self.skip).to(y_TD.dtype)
        if not self.reporting:
            return self._add_unrouted(x_BLD, y_TD.unflatten(0, x_BLD.shape[:2])), NO_REPORT
        losses = _losses(self.layer, self.router.spec, self._of_groups(routing), context)
        if self.training:
            y_TD = join(y_TD, losses.weighted(self.router.spec), scale=context.auxiliary_scale)
        y_BLD = y_TD.unflatten(0, x_BLD.shape[:2])
        return self._add_unrouted(x_BLD, y_BLD), _report(self.layer, routing, losses)

    def _of_groups(self, routing: Routing) -> Routing:
        """Return the routing over which balance is counted. If ranks hold shards of separately balanced groups: of whole groups."""
        slices = self.router.slices
        if slices is None or self.router.spec.balance_scope == "global_batch":
            return routing
        return slices.each_whole(routing)

    def _add_unrouted(self, x_BLD: Tensor, y_BLD: Tensor) -> Tensor:
        """Add the residual and shared networks to the routed output. Gates and coefficients are computed in fp32."""
        if self.residual is not None and self.coefficient is not None:
            c_BL2 = linear_fp32(x_BLD, self.coefficient.weight).softmax(-1).to(x_BLD.dtype)
            y_BLD = c_BL2[..., :1] * y_BLD + c_BL2[..., 1:] * self.residual(x_BLD)
        if self.shared is None:
            return y_BLD
        shared_BLD: Tensor = self.shared(x_BLD)
        if self.shared_gate is not None:
            shared_BLD = linear_fp32(x_BLD, self.shared_gate.weight).sigmoid().to(x_BLD.dtype) * shared_BLD
        return y_BLD + shared_BLD

    def _output_biases(self, routing: Routing) -> Tensor:
        """Sum the biases after w2 of each token's experts, times their gates: fp32 [T, D].

        A bias is equal for all rows of its expert, so the token's own rank adds it and no rank sends it.
        """
        assert self.output_bias is not None
        gate_TK = (1 if self.router.spec.gate_on == "input" else routing.gate_TK) * routing.kept_TK
        gate_TE = spread_gates(gate_TK, routing.expert_TK, num_experts=self.router.num_experts)[:, : len(self.output_bias)]
        return gate_TE @ self.output_bias.float()

    def _dropout(self, context: Context, dtype: torch.dtype) -> Dropout:
        """Return the experts' dropout. Its random numbers depend on the token's index in the step, which is sent with the row."""

        def scale(position_R: Tensor) -> Tensor:
            rows = Context(context.seed, context.step, position_R)
            return rows.dropout_scale(f"layers.{self.layer}.experts.dropout", self.experts.d_ff, self.dropout).to(dtype)

        return Dropout(context.position_T, scale)


@dataclass(frozen=True)
class _Losses:
    """The layer's auxiliary losses: fp32 scalars, not yet weighted."""

    balance: Tensor
    importance: Tensor
    load: Tensor
    z: Tensor

    def weighted(self, s: RouterSpec) -> Tensor:
        """Return the weighted sum. A loss of weight 0 is left out of the backward pass."""
        balance = ((s.balance_weight, self.balance), (s.importance_weight, self.importance), (s.load_weight, self.load))
        terms = (*balance, (s.z_weight, self.z))
        return sum((weight * loss for weight, loss in terms if weight), start=self.z.new_zeros(()))


def _losses(layer: int, s: RouterSpec, routing: Routing, context: Context) -> _Losses:
    """Compute the losses over the spec's scope: sequence, micro-batch, or global batch (if the context can sum over it)."""
    probs_TE, valid_T, num_experts = routing.probs_TE, routing.valid_T, routing.probs_TE.shape[1]
    choices = 1 if s.balance_counts == "first" else routing.expert_TK.shape[1]
    expert_TK = (routing.expert_TK if routing.load_TK is None else routing.load_TK)[:, :choices]
    counted_TK = None if routing.counted_TK is None else routing.counted_TK[:, :choices]
    num_groups = routing.num_groups if s.balance_scope == "sequence" else 1
    gate_TE = spread_gates(routing.gate_TK, routing.expert_TK, num_experts=num_experts) if s.importance_weight else None
    step, whole = None, context.whole_step
    if s.balance_scope == "global_batch" and whole is not None:
        step = step_means(
            expert_TK,
            gate_TE,
            num_experts=num_experts,
            valid_T=valid_T,
            counted_TK=counted_TK,
            chance_TE=routing.chance_TE,
            whole=lambda mine: whole(layer, mine),
        )
    chance_TE = routing.chance_TE
    return _Losses(
        balance_loss(probs_TE, expert_TK, num_groups=num_groups, valid_T=valid_T, counted_TK=counted_TK, step=step),
        probs_TE.new_zeros(()) if gate_TE is None else importance_loss(gate_TE, num_groups=num_groups, valid_T=valid_T, step=step),
        probs_TE.new_zeros(()) if chance_TE is None else load_loss(chance_TE, num_groups=num_groups, valid_T=valid_T, step=step),
        z_loss(routing.logits_TE, valid_T=valid_T),
    )


def _report(layer: int, routing: Routing, losses: _Losses) -> LayerReport:
    valid_T, num_experts = routing.valid_T, routing.probs_TE.shape[1]
    load_GE = count_choices(routing.expert_TK, num_groups=1, num_experts=num_experts, valid_T=valid_T, counted_TK=routing.counted_TK)
    kept = routing.kept_TK.sum()
    probs_TE = routing.probs_TE.detach()
    surprise_TE = probs_TE.clamp(min=torch.finfo(probs_TE.dtype).tiny).log()  # a third of the time that torch.special.entr takes
    entropy = mean_over_tokens((probs_TE * surprise_TE).sum(-1).neg(), valid_T=valid_T)
    means = (losses.balance.detach(), losses.importance.detach(), losses.load.detach(), losses.z.detach(), entropy)
    return LayerReport(layer, load_GE[0], kept, load_GE.sum() - kept, *means)
