"""Makes MoE layers of packages that need a GPU, each as a Pass (a call runs forward and backward) with the weights of a LayerCase.

    package      layer                  w1 alone     w1 and w3                                  w2           router
    scattermoe   mlp.MLP, mlp.GLUMLP    [E, F, D]    one tensor [E, 2F, D], w3 first            [E, D, F]    the caller's
    sonicmoe     MoE                    [E, F, D]    one tensor [E, 2F, D], rows alternating    [E, D, F]    its own
    megablocks   layers.dmoe.dMoE       [E F, D]     two tensors [E F, D]                       [E F, D]     its own

A gated layer computes act(x w1) * (x w3). These are the names and weight layouts of scattermoe 0.3.0 (arXiv 2403.08245), sonic-moe 0.1.2
(2512.14080) and megablocks 0.10 (2211.15841). A package is imported when its layer is made.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Protocol

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from moe.bench.layers.layers import LayerCase, Pass, stack

# T tokens, D width, F hidden, E experts, K choices


class Make(Protocol):
    def __call__(self, case: LayerCase, ffn: str) -> Pass: ...


def why_not(name: str, device: torch.device) -> str | None:
    """Return the reason why the layer `name` cannot run on this machine. Return None if it can, or if this file does not make that
    layer."""
    if name not in LAYERS:
        return None
    if find_spec(name) is None:
        return f"not installed: {name}"
    return "needs a GPU" if device.type != "cuda" else None


def scattermoe(case: LayerCase, ffn: str) -> Pass:
    """Return the Pass of ScatterMoE's layer after a softmax router in plain torch."""
    from scattermoe.mlp import GLUMLP, MLP

    s = case.shape
    router = case.router().requires_grad_()
    block, activation = (GLUMLP, F.silu) if ffn == "swiglu" else (MLP, F.relu)
    layer = block(input_size=s.width, hidden_size=s.hidden, num_experts=s.experts, top_k=s.k, activation=activation)
    layer = layer.to(case.device, case.dtype)
    w1_EFD, w3_EFD, w2_EDF = _output_first(case, ffn)
    layer.experts.weight.data.copy_(w1_EFD if w3_EFD is None else torch.cat((w3_EFD, w1_EFD), dim=1))
    layer.output_experts.weight.data.copy_(w2_EDF)

    def forward(x_TD: Tensor) -> Tensor:
        gate_TK, expert_TK = F.linear(x_TD.float(), router).softmax(-1).topk(s.k)
        out: Tensor = layer(x_TD, gate_TK.to(x_TD.dtype), expert_TK)
        return out

    return Pass([router, *layer.parameters()], forward, case.inputs(), case.gradient())


def sonicmoe(case: LayerCase, ffn: str) -> Pass:
    """Return the Pass of SonicMoE's layer, with softmax over the chosen experts."""
    from sonicmoe import MoE
    from sonicmoe.enums import ActivationType

    s = case.shape
    with case.device:
        sizes = {"num_experts": s.experts, "num_experts_per_tok": s.k, "hidden_size": s.width, "intermediate_size": s.hidden}
        activation = ActivationType.SWIGLU if ffn == "swiglu" else ActivationType.RELU
        layer = MoE(**sizes, activation_function=activation, add_bias=False, std=0.02).to(case.dtype)
    layer.router.weight.data.copy_(case.router())
    w1_EFD, w3_EFD, w2_EDF = _output_first(case, ffn)
    layer.c_fc.weight.data.copy_(w1_EFD if w3_EFD is None else rearrange([w1_EFD, w3_EFD], "two e f d -> e (f two) d"))
    layer.c_proj.weight.data.copy_(w2_EDF)
    return Pass(list(layer.parameters()), lambda x: layer(x)[0], case.inputs(), case.gradient())


def megablocks(case: LayerCase, ffn: str) -> Pass:
    """Return the Pass of MegaBlocks' dropless layer on grouped matrix products (package grouped_gemm), without balance loss."""
    from megablocks.layers.arguments import Arguments
    from megablocks.layers.dmoe import dMoE

    s = case.shape
    sizes = {"hidden_size": s.width, "ffn_hidden_size": s.hidden, "moe_num_experts": s.experts, "moe_top_k": s.k}
    form, activation = ("glu", F.silu) if ffn == "swiglu" else ("mlp", F.relu)
    options = {"mlp_type": form, "mlp_impl": "grouped", "activation_fn": activation, "bias": False, "return_bias": False}
    types = {"fp16": False, "bf16": case.dtype == torch.bfloat16, "device": case.device}
    layer = dMoE(Arguments(**sizes, **options, **types, moe_loss_weight=0.0))
    layer.router.layer.weight.data.copy_(case.router())
    w1_EFD, w3_EFD, w2_EDF = _output_first(case, ffn)
    network = layer.experts.mlp
    network.w1.data.copy_(w1_EFD.flatten(0, 1))
    network.w2.data.copy_(w2_EDF.transpose(1, 2).flatten(0, 1))
    if w3_EFD is not None:
        network.v1.data.copy_(w3_EFD.flatten(0, 1))
    return Pass(list(layer.parameters()), lambda x: layer(x), case.inputs().unsqueeze(0), case.gradient())


def _output_first(case: LayerCase, ffn: str) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the case's weights (w1 [E, F, D], w3 [E, F, D], w2 [E, D, F]), each with its output dim before its input dim. w3 is None if
    the network is not gated."""
    w1_EDF, w2_EFD, w3_EDF = stack(case, ffn)
    w3_EFD = None if w3_EDF is None else w3_EDF.detach().transpose(1, 2)
    return w1_EDF.detach().transpose(1, 2), w3_EFD, w2_EFD.detach().transpose(1, 2)


LAYERS: dict[str, Make] = {"scattermoe": scattermoe, "sonicmoe": sonicmoe, "megablocks": megablocks}
