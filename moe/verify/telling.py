"""Defines models in which each coefficient has a telling value: not 0, not 1, not the default, and so large that a coefficient that is
ignored, inverted or applied twice changes numbers by much more than the tolerance. Needs no torch.

A weight decay of 20 shrinks weights by 6 % in a step, so that decay after the step instead of before it is also seen. Rows of
`moe verify` name `squared` in their recipes, as a user names a function of his own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moe.verify.small import LINEAR

if TYPE_CHECKING:  # recipes of cases are read without torch
    from torch import Tensor

# G groups of tokens, E experts


def squared(load_GE: Tensor, probs_GE: Tensor) -> Tensor:
    """A balance loss that is not linear in the mean probabilities: E^2 * sum_e f_e P_e^2, for each group [G]. It is 1 for even loads."""
    loss_G: Tensor = load_GE.shape[1] ** 2 * (load_GE * probs_GE.square()).sum(1)
    return loss_G


_MOMENTS = LINEAR | {"beta1": 0.7, "beta2": 0.8, "weight_decay": 20.0}
TELLING: dict[str, dict[str, Any]] = {
    "coefficients": {
        "optimizer": _MOMENTS | {"warmup_steps": 3, "schedule": "wsd", "decay_share": 0.4, "min_lr_share": 0.3},
        "train": {"steps": 10},
        "model": {
            "head_size": 8, "ahead": 1, "ahead_weight": 0.7, "dropout": 0.3,
            "rope": {"base": 50.0, "scaling": "dynamic", "factor": 2.5, "trained_length": 7}, "scales": {"attention": 0.3},
        },
        "experts": {
            "d_ff": 14, "ffn": "relu", "biases": True, "shared": 2, "shared_d_ff": 9, "shared_gate": True, "dropout": 0.3,
            "rebalance_every": 3,
        },
        "router": {
            "preset": "switch", "num_choices": 2, "logits": "affine", "score": "sqrt_softplus", "gates": "before_drop", "gate_scale": 1.7,
            "jitter": 0.2, "bias_rate": 0.03, "group": 1, "capacity_factor": 1.3, "capacity_counts": "tokens", "min_capacity": 1,
            "capacity_rounding": "floor", "queue": "tokens_first", "balance_weight": 0.7, "balance_counts": "unbiased",
            "balance_scope": "global_batch", "importance_weight": 0.3, "z_weight": 0.2,
        },
    },
    "spectral": {  # experts may move after each step
        "optimizer": _MOMENTS | {
            "kind": "muon", "muon": {"momentum": 0.7, "scale": "spectral", "lr_factor": 1.7}, "lr": 0.02, "weight_decay": 5.0,
            "warmup_steps": 2, "schedule": "linear", "min_lr_share": 0.3,
        },
        "train": {"steps": 10},
        "model": {"rope": {"base": 50.0, "scaling": "llama3", "factor": 3.0, "trained_length": 40, "low": 0.4, "high": 2.5}},
        "experts": {"d_ff": 14, "ffn": "geglu", "biases": True, "rebalance_every": 1},
        "router": {
            "preset": "glam", "gates": "after_drop", "gate_scale": 1.7, "gate_on": "input", "capacity_factor": 0.9, "min_capacity": 1,
            "capacity_rounding": "round", "balance_weight": 0.7, "z_weight": 0.3,
        },
    },
    "absolute": {
        "optimizer": {
            "kind": "adafactor", "adafactor": {"step": "absolute"}, "weight_decay": 20.0, "warmup_steps": 2, "schedule": "cosine",
            "min_lr_share": 0.3,
        },
        "train": {"steps": 10},
        "model": {
            "num_heads": 8, "d_model": 32, "d_ff": 24, "ffn": "gelu",
            "rope": {
                "base": 50.0, "scaling": "yarn", "factor": 3.0, "trained_length": 60, "low": 0.3, "high": 6.0, "whole_pairs": False,
                "mscale": 3.0,
            },
        },
        "experts": {"d_ff": 20, "ffn": "swiglu", "biases": True},
        "router": {
            "preset": "deepseek_v3", "num_choices": 2, "expert_groups": 2, "top_groups": 1, "group_score": "best", "gate_scale": 0.6,
            "bias_rate": 0.03, "balance_weight": 0.7, "balance_counts": "first", "balance_scope": "sequence",
        },
    },
    "stretched": {
        "optimizer": _MOMENTS | {"warmup_steps": 2, "schedule": "inverse_sqrt"},
        "model": {
            "rope": {"base": 50.0, "scaling": "ntk", "factor": 3.0}, "swiglu": {"alpha": 0.6, "limit": 0.5, "offset": 0.3},
            "init_scale": 0.7,
        },
        "experts": {"biases": True, "zero": 2},
        "router": {"preset": "glam", "min_capacity": 1, "softmax_over": "chosen", "gates": "as_is", "gate_scale": 0.6, "logit_cap": 0.8},
    },
    "divided": {
        "optimizer": _MOMENTS | {"warmup_steps": 4, "schedule": "constant"},
        "model": {
            "rope": {"base": 50.0, "scaling": "linear", "factor": 2.5}, "ffn": "geglu", "logit_cap": 1.5,
            "moe_every": 0, "moe_layers": [0], "norm_eps": 0.2,
        },
        "experts": {"biases": True, "dropout": 0.3},
        "router": {"preset": "gshard", "group": 1, "min_capacity": 1, "balance_weight": 0.7, "balance_counts": "first", "gate_scale": 1.7},
    },
}  # fmt: skip
