"""The Mixture-of-Experts layer: route, dispatch, experts, combine (Switch, arXiv 2101.03961, fig. 2).

    x_BLD -> router -> dispatcher.run: tokens to the experts' ranks, experts, results back -> y_BLD -> shared and residual networks

    shared    y + [sigmoid(w x)] shared(x)                  DeepSeekMoE (arXiv 2401.06066); with the gate: Qwen2-MoE
    residual  c_0 y + c_1 dense(x), c = softmax(W_c x)      PR-MoE (arXiv 2201.05596)
    free      skip experts return the token, zero experts return zero: LongCat-Flash (arXiv 2509.01322, section 2.1)
    gate_on   input: sum of E(g x) instead of g E(x)        Llama 4

The layer's backward pass adds the gradients of its auxiliary losses (moe/router/losses.py). Free experts have the highest indices: first
the skip experts, then the zero experts. The router treats them like other experts, but their choices are not dispatched. A token with all
choices dropped gets zeros from the experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from einops import rearrange
from torch import Tensor, nn

from moe.experts.dispatch.dispatcher import Exchange, Local
from moe.experts.dispatch.network import Dropout
from moe.experts.experts import Experts
from moe.experts.spread import Groups, Spread
from moe.nn.context import Context
from moe.nn.linear import FeedForward, Linear, linear_fp32
from moe.router.losses import (
    balance_loss,
    count_choices,
    importance_loss,
    join,
    load_loss,
    mean_over_tokens,
    own_balance_loss,
    spread_gates,
    step_means,
    z_loss,
)
from moe.router.own import own_balance
from moe.router.router import Router
from moe.router.routing import Routing
from moe.router.slices import Shards

if TYPE_CHECKING:  # for annotations only: the layer runs without the packages that read recipes
    from moe.recipe import sections
    from moe.recipe.router_spec import RouterSpec

# B batch, L length, D model, T = B*L tokens, K choices, N = T*K, E experts, R rows, F hidden


@dataclass(frozen=True)
class LayerReport:
    """Measurements of one layer over this rank's valid tokens. `load_E` int64: choices of each expert before dropping.
    `kept`, `dropped`: numbers of choices; their sum is load_E.sum(). Losses and entropy (in nats) are fp32 means over these tokens.
    `importance_loss` and `load_loss` are 0 if their weights are 0. `share`: these tokens / valid tokens of the micro-batch; below 1 if
    ranks of tp divide the layer's tokens.
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
    share: float | Tensor = 1.0


NO_REPORT = LayerReport(-1, *(torch.empty(0),) * 8)  # returned if MoELayer.reporting is False


class MoELayer(nn.Module):
    """The MoE layer with index `layer` among all layers of the model, and `nth` among its MoE layers. `shared`: a network for every token,
    or None."""

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
        name, kernels = f"layers.{layer}.router", experts.kernels
        self.router = Router(router, num_experts=count + self.free, d_model=d_model, norm_eps=norm_eps, kernels=kernels, name=name)
        form = {"d_model": d_model, "d_ff": d_ff, "ffn": ffn, "swiglu": swiglu, "kernels": experts.kernels, "products": experts.products}
        self.experts = Experts(count, **form, biases=experts.biases)  # type: ignore[arg-type]
        self.output_bias = nn.Parameter(torch.empty(count, d_model)) if experts.biases else None
        self.shared_gate = Linear(d_model, 1) if shared is not None and experts.shared_gate else None
        self.residual: nn.Module | None = FeedForward(d_model, d_ff, ffn, swiglu=swiglu) if experts.residual else None
        self.coefficient = Linear(d_model, 2) if experts.residual else None
        self.dispatcher: Exchange = Local()
        self.reporting = True  # False in text generation: for one token, the report takes as long as a matrix product
        self.spread: Spread | None = None  # set if tp ranks divide the tokens, or if sp ranks share a sequence

    def forward(self, x_BLD: Tensor, context: Context) -> tuple[Tensor, LayerReport]:
        x_TD, (batch, length) = x_BLD.flatten(0, 1), x_BLD.shape[:2]
        if self.spread is None:
            y_TD, report = self._output(x_TD, context, Groups(length))
            return y_TD.view_as(x_BLD), report
        (mine, share), exchange = self.spread.mine(context, batch), self.spread.exchange
        y_TD, report = self._output(exchange.cut(x_TD), mine, self.spread.groups(batch, length))
        return exchange.join(y_TD, total=len(x_TD)).view_as(x_BLD), replace(report, share=share)

    def _output(self, x_TD: Tensor, context: Context, groups: Groups) -> tuple[Tensor, LayerReport]:
        if self.shared is None and self.residual is None:
            return self._routed(x_TD, context, groups, self.dispatcher)
        add_unrouted = cache(partial(self._unrouted, x_TD))  # cache: if the dispatcher calls it, the call below reuses the result
        y_TD, report = self._routed(x_TD, context, groups, replace(self.dispatcher, meanwhile=add_unrouted))
        return add_unrouted()(y_TD), report

    def _routed(self, x_TD: Tensor, context: Context, groups: Groups, dispatcher: Exchange) -> tuple[Tensor, LayerReport]:
        """Return (the output of the routed experts, without shared and residual networks; the report). `groups`: length of the tokens'
        sequences, and the ranks that hold other tokens of these sequences."""
        routing = self.router(x_TD, sequence_tokens=groups.sequence_tokens, shards=groups.shards, context=context)
        dropout = self._dropout(context, x_TD.dtype) if self.training and self.dropout else None
        sent = _without_free(routing, self.experts.num_experts) if self.free else routing
        if self.router.spec.gate_on == "input":
            y_TD = _run_on_scaled_inputs(dispatcher, x_TD, sent, self.experts, dropout)
        else:
            y_TD = dispatcher.run(x_TD, sent, self.experts, dropout=dropout)
        if self.output_bias is not None:
            y_TD = y_TD + self._output_biases(routing).to(y_TD.dtype)
        if self.skip:
            y_TD = y_TD + self._skipped(x_TD, routing).to(y_TD.dtype)
        if not self.reporting:
            return y_TD, NO_REPORT
        loss, report = self._measured(routing, context, groups.shards)
        if loss is not None:
            y_TD = join(y_TD, loss, scale=context.auxiliary_scale)
        return y_TD, report

    def _measured(self, routing: Routing, context: Context, shards: Shards | None) -> tuple[Tensor | None, LayerReport]:
        """Return (the sum of the weighted losses, scalar fp32, or None in evaluation; the report). `shards`: how ranks share the
        groups of tokens that have a capacity or a balance loss in common; None: this rank has whole groups."""
        if (fused := routing.fused) is not None:
            load_E, (kept, dropped) = fused.counts[:-2], fused.counts[-2:]
            return fused.loss if self.training else None, LayerReport(self.layer, load_E, kept, dropped, *fused.means.unbind())
        losses = _losses(self.layer, self.router.spec, routing, context, shards)
        return _weighted(losses, self.router.spec) if self.training else None, _report(self.layer, routing, losses)

    def _unrouted(self, x_TD: Tensor) -> Callable[[Tensor], Tensor]:
        """Compute the output of the residual or shared network. Return a function that adds this output to the routed output. Gates and
        coefficients are computed in fp32.
        """
        if self.residual is not None and self.coefficient is not None:
            assert self.shared is None, "a layer has a shared or a residual network, not both"
            c_T2 = linear_fp32(x_TD, self.coefficient.weight).softmax(-1).to(x_TD.dtype)
            residual_TD = c_T2[:, 1:] * self.residual(x_TD)
            return lambda y_TD: c_T2[:, :1] * y_TD + residual_TD
        assert self.shared is not None
        shared_TD: Tensor = self.shared(x_TD)
        if self.shared_gate is not None:
            shared_TD = linear_fp32(x_TD, self.shared_gate.weight).sigmoid().to(x_TD.dtype) * shared_TD
        return lambda y_TD: y_TD + shared_TD

    def _output_biases(self, routing: Routing) -> Tensor:
        """Return each token's sum of its experts' w2 biases times their gates: fp32 [T, D]. Computed on the token's own rank, not on the
        experts'."""
        assert self.output_bias is not None
        gate_TK = (1 if self.router.spec.gate_on == "input" else routing.gate_TK) * routing.kept_TK
        gate_TE = spread_gates(gate_TK, routing.expert_TK, num_experts=self.router.num_experts)[:, : len(self.output_bias)]
        return gate_TE @ self.output_bias.float()

    def _skipped(self, x_TD: Tensor, routing: Routing) -> Tensor:
        """Return the output of the skip experts: each token times the sum of its gates for skip experts. fp32 [T, D]."""
        first = self.experts.num_experts
        skip_TK = (routing.expert_TK >= first) & (routing.expert_TK < first + self.skip) & routing.kept_TK
        return x_TD.float() * (routing.gate_TK * skip_TK).sum(1, keepdim=True)

    def _dropout(self, context: Context, dtype: torch.dtype) -> Dropout:
        """Return the experts' dropout. Its random numbers depend on the token's index in the step; the dispatcher sends this index with
        each row."""

        def scale(position_R: Tensor) -> Tensor:
            rows = replace(context, position_T=position_R)
            return rows.dropout_scale(f"layers.{self.layer}.experts.dropout", self.experts.d_ff, self.dropout).to(dtype)

        return Dropout(context.position_T, scale)


def _without_free(routing: Routing, num_experts: int) -> Routing:
    """Return the routing for the dispatcher, which runs only experts with networks. Choices of free experts (skip and zero experts, which
    have no network) count as dropped there. `num_experts`: number of experts with networks."""
    kept_TK, probs_TE = routing.kept_TK & (routing.expert_TK < num_experts), routing.probs_TE[:, :num_experts]
    return replace(routing, expert_TK=routing.expert_TK.clamp(max=num_experts - 1), kept_TK=kept_TK, probs_TE=probs_TE)


def _run_on_scaled_inputs(dispatcher: Exchange, x_TD: Tensor, routing: Routing, experts: Experts, dropout: Dropout | None) -> Tensor:
    """Multiply each token by the gate of each of its K choices, dispatch the T K products as tokens with one choice and gate 1, and sum the
    results of each token: [T, D]."""
    choices = routing.expert_TK.shape[1]
    x_ND = rearrange(x_TD.unsqueeze(1) * routing.gate_TK.unsqueeze(2), "t k d -> (t k) d").to(x_TD.dtype)
    expert_N1, kept_N1 = routing.expert_TK.reshape(-1, 1), routing.kept_TK.reshape(-1, 1)
    each = replace(routing, expert_TK=expert_N1, kept_TK=kept_N1, gate_TK=torch.ones_like(routing.gate_TK).reshape(-1, 1))
    if dropout is not None:
        dropout = replace(dropout, position_T=dropout.position_T.repeat_interleave(choices))
    y_ND = dispatcher.run(x_ND, each, experts, dropout=dropout)
    return y_ND if choices == 1 else rearrange(y_ND.float(), "(t k) d -> t k d", k=choices).sum(1).to(x_TD.dtype)


def _losses(layer: int, s: RouterSpec, routing: Routing, context: Context, shards: Shards | None) -> dict[str, Tensor]:
    """Return loss name -> fp32 scalar, not yet multiplied by the loss's weight; 0 for a loss that is not computed. z is a mean over this
    rank's tokens; the others are computed over the spec's balance_scope. If that is global_batch and context.whole_step is None, they are
    computed over this rank's micro-batch. Collective if ranks share groups of tokens (`shards`)."""
    num_experts, none = routing.probs_TE.shape[1], routing.probs_TE.new_zeros(())
    choices = 1 if s.balance_counts == "first" else routing.expert_TK.shape[1]
    expert_TK = (routing.expert_TK if routing.load_TK is None else routing.load_TK)[:, :choices]
    counted_TK = None if routing.counted_TK is None else routing.counted_TK[:, :choices]
    gate_TE = spread_gates(routing.gate_TK, routing.expert_TK, num_experts=num_experts) if s.importance_weight else None
    chance_TE, valid_T, step, whole = routing.chance_TE, routing.valid_T, None, context.whole_step
    num_groups, masks = routing.num_groups if s.balance_scope == "sequence" else 1, {"valid_T": valid_T, "counted_TK": counted_TK}
    if s.balance_scope == "global_batch" and whole is not None:
        more = {"chance_TE": chance_TE, "probs_TE": routing.probs_TE if s.own_balance else None}
        step = step_means(expert_TK, gate_TE, num_experts=num_experts, **masks, **more, whole=partial(whole, layer))
    counted: dict[str, Any] = masks | {"step": step}
    if s.balance_scope != "global_batch" and shards is not None:
        counted |= {"group_T": shards.group_T(num_groups, expert_TK.device), "summed": shards.summed}
        if gate_TE is not None or chance_TE is not None:
            gate_TE, chance_TE, valid_T = (None if x is None else shards.whole(x) for x in (gate_TE, chance_TE, valid_T))
    scope: dict[str, Any] = {"num_groups": num_groups, "valid_T": valid_T, "step": step}
    balance = balance_loss if s.own_balance is None else partial(own_balance_loss, own=partial(own_balance, name=s.own_balance))
    return {
        "balance": balance(routing.probs_TE, expert_TK, num_groups=num_groups, **counted),
        "importance": none if gate_TE is None else importance_loss(gate_TE, **scope),
        "load": none if chance_TE is None else load_loss(chance_TE, **scope),
        "z": z_loss(routing.logits_TE, valid_T=routing.valid_T),
    }


def _weighted(losses: dict[str, Tensor], s: RouterSpec) -> Tensor:
    weights = {"balance": s.balance_weight, "importance": s.importance_weight, "load": s.load_weight, "z": s.z_weight}
    return sum((weight * losses[name] for name, weight in weights.items() if weight), start=losses["z"].new_zeros(()))


def _report(layer: int, routing: Routing, losses: dict[str, Tensor]) -> LayerReport:
    valid_T, num_experts = routing.valid_T, routing.probs_TE.shape[1]
    load_GE = count_choices(routing.expert_TK, num_groups=1, num_experts=num_experts, valid_T=valid_T, counted_TK=routing.counted_TK)
    kept = routing.kept_TK.sum()
    probs_TE = routing.probs_TE.detach()
    log_probs_TE = probs_TE.clamp(min=torch.finfo(probs_TE.dtype).tiny).log()  # takes a third of torch.special.entr's time
    entropy = mean_over_tokens((probs_TE * log_probs_TE).sum(-1).neg(), valid_T=valid_T)
    means = [*(loss.detach() for loss in losses.values()), entropy]
    return LayerReport(layer, load_GE[0], kept, load_GE.sum() - kept, *means)
