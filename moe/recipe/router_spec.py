"""A router's settings: a key for every choice in which published routers differ.

scores      x -> logits -> noise -> scores                       input_norm, logits, score, softmax_over, jitter, noise
selection   scores (+ bias) -> the experts of each token         select, num_choices, expert_groups ... bias_rate
gates       scores of the chosen -> weights of their outputs     gates, gate_scale, expert_scale, gate_on
capacity    choices -> the choices that get a slot               group ... queue
losses      terms that keep experts evenly used                  balance_weight ... z_weight
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from moe.recipe.plugin import Plugin
from moe.recipe.section import Section, key


class RouterSpec(Section, alters="function", off_without="model.moe_every or model.moe_layers"):
    """All settings of one router. A recipe's section `router` takes them from a preset and changes some (moe/recipe/presets.py).

    slots of an expert = capacity factor * tokens of the `group` [* k] / experts, rounded, up to a multiple of `capacity_multiple`, at least
    `min_capacity`. docs/moe/routing.md has the formulas of all choices and losses.
    """

    num_choices: int = key(1, "k, the number of experts of a token", gt=0)
    input_norm: Literal["none", "rmsnorm"] = key(
        "none", "norm of the router's input, with a gain; experts read the input without it (Gemma 4)", alters="shape"
    )
    logits: Literal["linear", "affine"] = key("linear", "W x, or W x + b with a learned b", alters="shape")
    logit_cap: float | None = key(None, "c of c tanh(l / c), which bounds logits; null: none", ge=1e-3)
    score: Literal["softmax", "sigmoid", "sqrt_softplus"] | Plugin = key("softmax", "function from a logit to a score")
    softmax_over: Literal["all", "chosen"] = key("all", "all experts, or the chosen ones after selection (Mixtral)")
    jitter: float = key(0.0, "the router's input times uniform(1 - jitter, 1 + jitter), train only", ge=0, lt=1, alters="training")
    noise: Literal["none", "gumbel", "noisy_top_k"] = key(
        "none", "added to logits, train only; gumbel: only for selection; noisy_top_k: of a learned size, also for gates", alters="training"
    )
    select: Literal["top_k", "group_limited", "expert_choice", "hash", "sinkhorn", "sparsemixer"] | Plugin = key(
        "top_k",
        "method that selects a token's experts; group_limited: top k of the best groups of experts; expert_choice: experts choose tokens; "
        "hash: by token id; sinkhorn: top k of balanced scores in training; sparsemixer: one at a time, sampled in training (Phi-3.5-MoE)",
    )
    hash_table: str | None = key(None, "of hash: JSON file of each id's experts (by moe hash-table); null: a hash of id and layer")
    mixer_margin: float = key(0.01, "of sparsemixer: experts with a logit below the best by more than twice this share are masked", gt=0)
    expert_groups: int = key(1, "of group_limited: number of equal groups of consecutive experts", gt=0)
    top_groups: int = key(1, "of group_limited: number of groups that a token may choose from", gt=0)
    group_score: Literal["two_best", "best"] = key("two_best", "of group_limited: experts whose scores add up to a group's score")
    second: Literal["always", "random"] = key("always", "use of the second expert; random: with probability 2 g_2", alters="training")
    bias_rate: float | None = key(None, "step of the selection bias (aux-loss-free balance); null: no bias; 0: a fixed one", ge=0, le=10)
    gates: Literal["as_is", "before_drop", "after_drop"] = key("as_is", "when a token's gates are normalised to sum 1; as_is: never")
    gate_scale: float = key(1.0, "factor on all gates", ge=1e-6, le=1e6)
    expert_scale: Literal["none", "learned"] = key("none", "factor on gates: a learned number of each expert (Gemma 4)", alters="shape")
    gate_on: Literal["output", "input"] = key("output", "tensor that a gate multiplies: its expert's output or input")
    group: Literal["sequence", "rank"] | Annotated[int, Field(gt=0)] = key(
        "sequence", "tokens that share a capacity: one sequence, n sequences, or all of a rank (depends on the layout)"
    )
    capacity_factor: float | None = key(None, "null: dropless", gt=0, alters="training")
    eval_capacity_factor: float | None = key(None, "null: dropless", gt=0)
    min_capacity: int = key(0, ge=0)
    capacity_counts: Literal["choices", "tokens"] = key("choices", "capacity is proportional to choices (tokens * k), or to tokens")
    capacity_rounding: Literal["ceil", "floor", "round"] = key("ceil")
    capacity_multiple: int = key(1, "an expert's slots are rounded up to a multiple of this number", gt=0)
    drop: Literal["position", "lowest_gate", "random"] = key("position", "choices that a full expert drops: last ones; random: train only")
    queue: Literal["choices_first", "tokens_first"] = key("choices_first", "slots are filled by all first choices first, or token by token")
    balance_weight: float = key(0.0, "weight of the load-balancing loss, Switch eq. 4, summed over layers", ge=0, le=1e9, alters="training")
    balance_counts: Literal["all", "first", "unbiased"] = key(
        "all", "choices counted as load: all, the first (GShard), or the top k without bias or groups (DeepSeek-V3)", alters="training"
    )
    balance_scope: Literal["sequence", "micro_batch", "global_batch"] = key(
        "sequence",
        "tokens with equal loads as the aim: a capacity group, a rank's micro-batch (depends on the layout), or a step",
        alters="training",
    )
    importance_weight: float = key(0.0, "weight of the loss CV^2(sums of gates), Shazeer et al. 2017", ge=0, le=1e9, alters="training")
    load_weight: float = key(0.0, "weight of the loss CV^2(expected loads), with noisy_top_k", ge=0, le=1e9, alters="training")
    z_weight: float = key(0.0, "weight of the router's z loss; ST-MoE: 0.001", ge=0, le=1e9, alters="training")

    @property
    def vectors(self) -> int:
        """Number of the router's parameters for each expert, in addition to the expert's row of the weight matrix."""
        return (self.logits == "affine") + (self.expert_scale == "learned")

    @property
    def random_second(self) -> bool:
        return self.second == "random"

    @property
    def asks_balance(self) -> bool:
        """Whether a balancing loss, which is computed over the tokens of `balance_scope`, has a weight above 0."""
        return bool(self.balance_weight or self.importance_weight or self.load_weight)
