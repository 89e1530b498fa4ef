"""Computes the update of the plain twin (the second implementation, twin.py): weight decay, gradient norm, clipping, AdamW, Muon,
Adafactor, K-FAC, and selection biases of routers. p: a parameter, g: its gradient, wd: weight decay, t: number of the step. m: Muon's
momentum, mu: its decay rate, s: a factor that depends on the matrix's shape. b_e: selection bias of expert e.

    p <- p - lr wd p - lr m' / (sqrt(v') + eps)        m', v': moments, each divided by 1 - beta^t          arXiv 1711.05101
    p <- p - lr wd p - lr s X                          X: g + mu m made orthogonal, with Muon               arXiv 2502.16982
    p <- p - lr wd p - lr rms(p) U                     U: g / sqrt(factored second moment), Adafactor       arXiv 1804.04235
    p <- p - lr wd p - lr |S| D / |D|                  S: AdamW's step, D: K-FAC's direction (kfac.py)      arXiv 2002.11803
    b_e <- b_e + rate * sign(mean load - load_e)                                                            arXiv 2408.15664

It uses nothing from torch.optim, parallel/numerics/clip.py or moe/router/losses.py.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moe.recipe import sections
from moe.verify.plain.kfac import Moments, PlainKfac
from moe.verify.plain.layer import Weights

_NORMS = "attention_norm cross_norm encoder_norm q_norm k_norm q_down_norm kv_down_norm ffn_norm hidden_norm token_norm norm"
_NO_DECAY = {
    *_NORMS.split(),
    *["q_bias", "k_bias", "v_bias", "out_bias", "output_bias", "b1", "b3", "sinks", "router"],
}  # a parameter has no weight decay if its name has one of these words between dots

_GATES = ("router", "shared_gate", "coefficient")  # matrices inside layers that Muon leaves to AdamW


def decayed(name: str) -> bool:
    """Return whether the parameter has weight decay. All parameters have it, except norms, biases, attention sinks and routers."""
    parts = name.split(".")
    return not (set(parts) & _NO_DECAY or parts[-2:] == ["bias", "weight"])


def norms(gradients: Weights) -> dict[str, float]:
    """Return family of parameters ("dense", "router", "expert", or "total" for all) -> 2-norm of its gradients."""
    squares = dict.fromkeys(("dense", "router", "expert"), 0.0)
    for name, gradient in gradients.items():
        parts = name.split(".")
        family = "expert" if "experts" in parts else "router" if "router" in parts else "dense"
        squares[family] += gradient.double().square().sum().item()
    return {name: math.sqrt(value) for name, value in squares.items()} | {"total": math.sqrt(sum(squares.values()))}


def orthogonal(matrix: Tensor) -> Tensor:
    """Return the matrix, divided by its norm, after Muon's five Newton-Schulz iterations. A zero matrix stays zero."""
    x = matrix / matrix.square().sum().sqrt().clamp(min=1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x - 4.7750 * square @ x + 2.0315 * square @ square @ x
    return x


def rate_share(settings: sections.Optimizer, number: int, total: int) -> float:
    """Return the learning rate of an update, divided by settings.lr. number: of the update, counted from 1. total: number of all updates.
    Sources: arXiv 1608.03983 (cosine), 2404.06395 (warm-up, stable, decay), 1706.03762 (inverse square root)."""
    warm, least, before = settings.warmup_steps, settings.min_lr_share, number - 1
    if before < warm:
        return number / warm
    if settings.schedule == "constant":
        return 1.0
    if settings.schedule == "inverse_sqrt":
        return math.sqrt(max(warm, 1) / number)
    begin = max(warm, total - settings.decay_share * total) if settings.schedule == "wsd" else warm
    part = min(max((before - begin) / max(1, total - begin), 0.0), 1.0)
    height = (1 + math.cos(math.pi * part)) / 2 if settings.schedule == "cosine" else 1 - part
    return least + (1 - least) * height


class PlainStep:
    """AdamW, Muon, Adafactor or K-FAC. exp_avg: parameter name -> first moment, or Muon's momentum. exp_avg_sq: parameter name -> second
    moment. Adafactor has instead "<name> rows" and "<name> columns", or "<name> all" for a vector -> moving means of g^2."""

    def __init__(self, settings: sections.Optimizer, *, total: int | None) -> None:
        """total: number of updates of the learning rate's schedule; None: the rate is always settings.lr."""
        self.settings, self.steps, self.kfac, self.total = settings, 0, PlainKfac(settings.kfac), total
        self.exp_avg: Weights = {}
        self.exp_avg_sq: Weights = {}

    @torch.no_grad()
    def step(self, parameters: Weights, gradients: Weights, moments: Moments) -> None:
        """Clip the gradients to the recipe's norm and update the parameters in place. moments: used only by
        K-FAC: each matrix's sums of a a^T and of g g^T over the tokens of this step. a: its input, g: the gradient of its output."""
        s = self.settings
        self.steps += 1
        self.kfac.begin_update(moments)
        highest = s.lr if self.total is None else s.lr * rate_share(s, self.steps, self.total)
        total = norms(gradients)["total"]
        factor = 1.0 if s.clip_norm is None or total <= s.clip_norm else s.clip_norm / total
        for name, p in parameters.items():
            by_muon = s.kind == "muon" and p.ndim == 2 and not {"embedding", "head", "bias", "output_bias", *_GATES} & set(name.split("."))
            lr = highest * s.muon.lr_factor if by_muon else highest
            gradient = gradients[name] * factor
            if s.kind == "adafactor" and name.endswith(".output_bias"):  # a vector for each expert
                rows = zip(gradient, p, strict=True)
                moved = torch.stack([self._by_adafactor(f"{name}.{e}", of_row, row) for e, (of_row, row) in enumerate(rows)])
            elif s.kind == "adafactor":
                moved = self._by_adafactor(name, gradient, p)
            else:
                moved = (self._by_muon if by_muon else self._by_adamw)(name, gradient)
            if s.kind == "kfac" and (direction := self.kfac.direction(name, self.exp_avg[name])) is not None and direction.any():
                moved = direction * (moved.norm() / direction.norm())
            shrunk = p * (1 - lr * s.weight_decay) if decayed(name) else p
            p.copy_(shrunk - lr * moved)

    def _by_adamw(self, name: str, gradient: Tensor) -> Tensor:
        s = self.settings
        m, v = (moments.setdefault(name, torch.zeros_like(gradient)) for moments in (self.exp_avg, self.exp_avg_sq))
        m.copy_(s.beta1 * m + (1 - s.beta1) * gradient)
        v.copy_(s.beta2 * v + (1 - s.beta2) * gradient**2)
        return m / (1 - s.beta1**self.steps) / ((v / (1 - s.beta2**self.steps)).sqrt() + s.eps)

    def _by_muon(self, name: str, gradient: Tensor) -> Tensor:
        s = self.settings.muon
        m = self.exp_avg.setdefault(name, torch.zeros_like(gradient))
        m.copy_(s.momentum * m + gradient)
        outputs, inputs = gradient.shape[::-1] if "experts" in name.split(".") else gradient.shape
        scale = 0.2 * math.sqrt(max(outputs, inputs)) if s.scale == "rms" else math.sqrt(max(1.0, outputs / inputs))
        return scale * orthogonal(gradient + s.momentum * m)

    def _by_adafactor(self, name: str, gradient: Tensor, p: Tensor) -> Tensor:
        def mean(kind: str, now: Tensor) -> Tensor:
            held = self.exp_avg_sq.setdefault(f"{name} {kind}", torch.zeros_like(now))
            held.copy_(held + (now - held) * self.steps**-0.8)
            return held

        square = gradient**2 + 1e-30
        if p.ndim == 1:
            squares = mean("all", square)
        else:
            rows, columns = mean("rows", square.mean(1)), mean("columns", square.mean(0))
            squares = torch.outer(rows, columns) / rows.mean()
        update = gradient / squares.sqrt()
        update = update / max(1.0, update.square().mean().sqrt().item())
        return update * max(1e-3, p.square().mean().sqrt().item()) if self.settings.adafactor.step == "relative" else update


def moved_bias(bias: Tensor, load: list[int], rate: float) -> Tensor:
    """Return a router's new selection bias [E]. load: for each expert, number of tokens that chose it in this step; rate: step size."""
    mean = sum(load) / len(load)
    return bias + rate * torch.tensor([float((mean > n) - (mean < n)) for n in load])
