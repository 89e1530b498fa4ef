"""Computes the twin's update in plain code: weight decay, gradient norm, clipping, AdamW, and the selection biases of routers.

    p <- p - lr wd p - lr m' / (sqrt(v') + eps)        m', v': moments, each divided by 1 - beta^t          arXiv 1711.05101
    b_e <- b_e + rate * sign(mean load - load_e)                                                            arXiv 2408.15664

It uses nothing from torch.optim, parallel/numerics/clip.py or moe/router/losses.py.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moe.recipe import sections
from moe.verify.plain.layer import Weights

_NORMS = "attention_norm cross_norm encoder_norm q_norm k_norm q_down_norm kv_down_norm ffn_norm hidden_norm token_norm norm"
_NO_DECAY = {
    *_NORMS.split(),
    *["q_bias", "k_bias", "v_bias", "out_bias", "output_bias", "b1", "b3", "sinks", "router"],
}  # between dots in a name


def decayed(name: str) -> bool:
    """Return whether the parameter has weight decay: all have, except norms, biases, sinks and routers."""
    parts = name.split(".")
    return not (set(parts) & _NO_DECAY or parts[-2:] == ["bias", "weight"])


def norms(gradients: Weights) -> dict[str, float]:
    """Return "dense", "router", "expert" and "total" -> 2-norm of the gradients of this family of parameters, or of all."""
    squares = dict.fromkeys(("dense", "router", "expert"), 0.0)
    for name, gradient in gradients.items():
        parts = name.split(".")
        family = "expert" if "experts" in parts else "router" if "router" in parts else "dense"
        squares[family] += gradient.double().square().sum().item()
    return {name: math.sqrt(value) for name, value in squares.items()} | {"total": math.sqrt(sum(squares.values()))}


class PlainAdamW:
    """AdamW. exp_avg: parameter name -> first moment; exp_avg_sq: parameter name -> second moment."""

    def __init__(self, settings: sections.Optimizer) -> None:
        self.settings, self.steps = settings, 0
        self.exp_avg: Weights = {}
        self.exp_avg_sq: Weights = {}

    @torch.no_grad()
    def step(self, parameters: Weights, gradients: Weights) -> None:
        """Clip the gradients to the recipe's norm and update the parameters in place."""
        s = self.settings
        self.steps += 1
        total = norms(gradients)["total"]
        factor = 1.0 if s.clip_norm is None or total <= s.clip_norm else s.clip_norm / total
        for name, p in parameters.items():
            gradient = gradients[name] * factor
            m = self.exp_avg.setdefault(name, torch.zeros_like(p))
            v = self.exp_avg_sq.setdefault(name, torch.zeros_like(p))
            m.copy_(s.beta1 * m + (1 - s.beta1) * gradient)
            v.copy_(s.beta2 * v + (1 - s.beta2) * gradient**2)
            moved = m / (1 - s.beta1**self.steps) / ((v / (1 - s.beta2**self.steps)).sqrt() + s.eps)
            shrunk = p * (1 - s.lr * s.weight_decay) if decayed(name) else p
            p.copy_(shrunk - s.lr * moved)


def moved_bias(bias: Tensor, load: list[int], rate: float) -> Tensor:
    """Return a router's new selection bias [E]. load: for each expert, number of tokens that chose it in this step; rate: step size."""
    mean = sum(load) / len(load)
    return bias + rate * torch.tensor([float((mean > n) - (mean < n)) for n in load])
