"""The Mixture-of-Experts layer: route, dispatch, experts, combine (Switch, arXiv 2101.03961, fig. 2).

    x_BLD -> router -> dispatcher.run: tokens to experts, network, back -> y_BLD (+ shared experts)
                \\__ balance and z losses join the backward pass here

A dropped token gets zero from here and lives on through the residual around the layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor, nn

from moe import config
from moe.balance import count_choices, join
from moe.context import Context
from moe.dispatch import Dispatcher, Dropout, Local
from moe.experts import Experts
from moe.router import Router, Routing

# B batch, L length, D model, T = B*L tokens, K choices, E experts, R rows, F hidden


@dataclass(frozen=True)
class LayerReport:
    """What one layer did with the tokens held here; sums, so that ranks and micro-batches add up.

    `load_E` int64: choices of each expert before dropping; `kept`, `dropped`: choices, adding up to tokens * k;
    `balance_loss`, `z_loss`: fp32 means over this pass's groups and tokens; `entropy`: of the router, mean over tokens, nats.
    """

    layer: int
    load_E: Tensor
    kept: Tensor
    dropped: Tensor
    balance_loss: Tensor
    z_loss: Tensor
    entropy: Tensor


class MoELayer(nn.Module):
    """`shared` is a feed-forward network that every token passes, or None."""

    def __init__(
        self,
        experts: config.Experts,
        router: config.Router,
        *,
        d_model: int,
        d_ff: int,
        ffn: str,
        layer: int,
        shared: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.layer, self.dropout, self.shared = layer, experts.dropout, shared
        self.router = Router(
            router, num_experts=experts.num_experts, d_model=d_model, kernels=experts.kernels, name=f"layers.{layer}.router"
        )
        self.experts = Experts(
            experts.num_experts, d_model=d_model, d_ff=experts.d_ff or d_ff, ffn=experts.ffn or ffn, kernels=experts.kernels
        )
        self.dispatcher: Dispatcher = Local()

    def forward(self, x_BLD: Tensor, context: Context) -> tuple[Tensor, LayerReport]:
        x_TD = rearrange(x_BLD, "b l d -> (b l) d")
        routing = self.router(x_TD, sequence_tokens=x_BLD.shape[1], context=context)
        dropout = self._dropout(context, x_TD.dtype) if self.training and self.dropout else None
        y_TD = self.dispatcher.run(x_TD, routing, self.experts, dropout=dropout)
        balance, z = routing.balance_loss(), routing.z_loss()
        if self.training:
            s = self.router.settings
            y_TD = join(y_TD, s.balance_weight * balance + s.z_weight * z, scale=context.auxiliary_scale)
        y_BLD = rearrange(y_TD, "(b l) d -> b l d", b=x_BLD.shape[0])
        if self.shared is not None:
            y_BLD = y_BLD + self.shared(x_BLD)
        return y_BLD, _report(self.layer, routing, balance.detach(), z.detach())

    def _dropout(self, context: Context, dtype: torch.dtype) -> Dropout:
        """Dropout inside the experts, keyed by the token's own index, which travels with its row."""

        def scale(position_R: Tensor) -> Tensor:
            there = Context(context.seed, context.step, position_R)
            return there.dropout_scale(f"layers.{self.layer}.experts.dropout", self.experts.d_ff, self.dropout).to(dtype)

        return Dropout(context.position_T, scale)


def _report(layer: int, routing: Routing, balance: Tensor, z: Tensor) -> LayerReport:
    kept = routing.kept_TK.sum()
    load_E = count_choices(routing.expert_TK, num_groups=1, num_experts=routing.probs_TE.shape[1])[0]
    entropy = torch.special.entr(routing.probs_TE.detach()).sum(-1).mean()
    return LayerReport(layer, load_E, kept, routing.kept_TK.numel() - kept, balance, z, entropy)
