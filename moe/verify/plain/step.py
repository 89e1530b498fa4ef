"""The update in plain code: which parameters decay, the gradient norm, clipping, AdamW, and the routers' biases.

    p <- p - lr wd p - lr m' / (sqrt(v') + eps)        m', v': moments, each divided by 1 - beta^t          arXiv 1711.05101
    b_e <- b_e + rate * sign(mean load - load_e)                                                            arXiv 2408.15664

Takes nothing from torch.optim, parallel/numerics/clip.py or moe/router/losses.py.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moe.recipe import sections
from moe.verify.plain.layer import Weights

_NORMS = "attention_norm cross_norm encoder_norm q_norm k_norm q_down_norm kv_down_norm ffn_norm hidden_norm token_norm norm"
_NO_DECAY = {*_NORMS.split(), *["q_bias", "k_bias", "v_bias", "out_bias", "output_bias", "b1", "b3", "sinks", "router"]}  # parts of names
FAMILIES = ("dense", "router", "expert")


def decayed(name: str) -> bool:
    """Return whether weight decay applies: to matrices of networks, attention, embedding and head, but not to norms, biases and routers."""
    parts = name.split(".")
    return not (set(parts) & _NO_DECAY or parts[-2:] == ["bias", "weight"])


def family(name: str) -> str:
    """The family of a parameter, by which gradient norms are reported: dense, router or expert."""
    parts = name.split(".")
    return "expert" if "experts" in parts else "router" if "router" in parts else "dense"


def norms(gradients: Weights) -> dict[str, float]:
    """2-norms of gradients: "dense", "router", "expert" (family of parameters) and "total" -> norm."""
    squares = dict.fromkeys(FAMILIES, 0.0)
    for name, gradient in gradients.items():
        squares[family(name)] += gradient.double().square().sum().item()
    return {name: math.sqrt(value) for name, value in squares.items()} | {"total": math.sqrt(sum(squares.values()))}


class PlainAdamW:
    """AdamW; exp_avg and exp_avg_sq: parameter name -> first and second moment."""

    def __init__(self, settings: sections.Optimizer) -> None:
        self.settings, self.steps = settings, 0
        self.exp_avg: Weights = {}
        self.exp_avg_sq: Weights = {}

    @torch.no_grad()
    def step(self, parameters: Weights, gradients: Weights) -> None:
        """Update the parameters in place, with gradients clipped to the recipe's norm."""
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
    """A router's selection bias [E] after a step. load: number of choices of each expert in that step; rate: size of the change."""
    mean = sum(load) / len(load)
    return bias + rate * torch.tensor([float((mean > n) - (mean < n)) for n in load])
