"""A router's settings: one key for each respect in which published routers differ.

scores      router's input -> logits -> noise -> scores          input_norm, logits, score, softmax_over, jitter, noise
selection   scores (+ bias) -> the experts of each token         select, num_choices, expert_groups ... bias_rate
gates       chosen experts' scores -> weights of outputs         gates, gate_scale, expert_scale, gate_on
capacity    choices -> the choices that get a slot               group ... queue
losses      terms that keep experts evenly used                  balance_loss ... z_weight
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from moe.recipe.plugin import Plugin, is_plugin
from moe.recipe.section import Section, key


class RouterSpec(Section, alters="function", off_without="model.moe_every or model.moe_layers"):
    """All settings of one router. A recipe's section `router` takes them from a preset and may change some (moe/recipe/presets.py).

    An expert's capacity is capacity_factor * k * (tokens of a `group`) / experts (without k for capacity_counts "tokens"). This is
    rounded, then rounded up to a multiple of `capacity_multiple`, and is at least `min_capacity`. docs/moe/routing.md has all formulas.
    """

    num_choices: int = key(1, "k, the number of experts that each token is sent to", gt=0)
    input_norm: Literal["none", "rmsnorm"] = key(
        "none", "norm of the router's input, with a gain; experts get the input without this norm (Gemma 4)", alters="shape"
    )
    logits: Literal["linear", "affine"] = key("linear", "linear: W x; affine: W x + b, b learned", alters="shape")
    logit_cap: float | None = key(None, "c in c tanh(l / c), applied to each router logit l to bound it; null: no bound", ge=1e-3)
    score: Literal["softmax", "sigmoid", "sqrt_softplus"] | Plugin = key(
        "softmax", "function from logits l to scores; sqrt_softplus: sqrt(log(1 + exp(l)))"
    )
    softmax_over: Literal["all", "chosen"] = key("all", "softmax over all experts, or, after selection, over the chosen ones (Mixtral)")
    jitter: float = key(
        0.0, "in training, the router's input is multiplied by uniform(1 - jitter, 1 + jitter)", ge=0, lt=1, alters="training"
    )
    noise: Literal["none", "gumbel", "noisy_top_k"] = key(
        "none",
        "noise added to logits in training; gumbel: affects selection alone; noisy_top_k: of a learned size, also affects gates",
        alters="training",
    )
    select: Literal["top_k", "group_limited", "expert_choice", "hash", "sinkhorn", "sparsemixer"] | Plugin = key(
        "top_k",
        "method that selects a token's experts; group_limited: top k of the best groups of experts; expert_choice: experts choose "
        "tokens; hash: by token id; sinkhorn: top k of balanced scores in training; sparsemixer: drawn one by one in training "
        "(Phi-3.5-MoE)",
    )
    hash_table: str | None = key(
        None, "for select hash: JSON file with each token id's experts (moe hash-table writes it); null: a hash of id and layer"
    )
    mixer_margin: float = key(0.01, "for sparsemixer, m: experts with logit l < b - 2 m max(|l|, b) are masked; b: the highest", gt=0)
    expert_groups: int = key(1, "for group_limited: number of equal groups of consecutive experts", gt=0)
    top_groups: int = key(1, "for group_limited: number of groups that a token may choose from", gt=0)
    group_score: Literal["two_best", "best"] = key(
        "two_best", "for group_limited: a group's score is the sum of its two best scores, or its best score"
    )
    second: Literal["always", "random"] = key(
        "always",
        "random: in training, a token's second expert is used with probability 2 s_2 / (s_1 + s_2); s: scores (GShard)",
        alters="training",
    )
    bias_rate: float | None = key(
        None,
        "step size of experts' biases in selection, which balance loads without a loss (DeepSeek-V3); null: none; 0: fixed",
        ge=0,
        le=10,
    )
    gates: Literal["as_is", "before_drop", "after_drop"] = key(
        "as_is",
        "whether a token's gates are divided by their sum; before_drop: over all choices; after_drop: over those with a slot; as_is: no",
    )
    gate_scale: float = key(1.0, "factor on all gates", ge=1e-6, le=1e6)
    expert_scale: Literal["none", "learned"] = key(
        "none", "learned: a learned factor for each expert on its gates (Gemma 4)", alters="shape"
    )
    gate_on: Literal["output", "input"] = key("output", "tensor that a gate multiplies: its expert's output or input")
    group: Literal["sequence", "rank"] | Annotated[int, Field(gt=0)] = key(
        "sequence", "tokens that share experts' slots: of one sequence, n sequences, or all on a rank (depends on the layout)"
    )
    capacity_factor: float | None = key(None, "in training: an expert's slots / its mean load; null: no limit", gt=0, alters="training")
    eval_capacity_factor: float | None = key(None, "in evaluation: an expert's slots / its mean load; null: no limit", gt=0)
    min_capacity: int = key(0, "smallest number of an expert's slots for a router.group", ge=0)
    capacity_counts: Literal["choices", "tokens"] = key("choices", "an expert's mean load counts choices (tokens * k), or tokens")
    capacity_rounding: Literal["ceil", "floor", "round"] = key("ceil", "how an expert's number of slots is rounded")
    capacity_multiple: int = key(1, "an expert's slots are rounded up to a multiple of this number", gt=0)
    drop: Literal["position", "lowest_gate", "random"] = key(
        "position", "choices that a full expert drops: the last in the queue, the ones with the lowest gates, or (in training) random ones"
    )
    queue: Literal["choices_first", "tokens_first"] = key(
        "choices_first", "order in which choices get slots: the first choices of all tokens, then the second; or token by token"
    )
    balance_loss: Literal["switch"] | Plugin = key(
        "switch", "load-balancing loss; switch: experts * sum_e f_e P_e (Switch Transformer, eq. 4)", alters="training"
    )
    balance_weight: float = key(0.0, "weight of the load-balancing loss, summed over layers", ge=0, le=1e9, alters="training")
    balance_counts: Literal["all", "first", "unbiased"] = key(
        "all",
        "choices that count as load: all k, each token's first (GShard), or top k without bias or groups (DeepSeek-V3)",
        alters="training",
    )
    balance_scope: Literal["sequence", "micro_batch", "global_batch"] = key(
        "sequence",
        "tokens over which experts should have equal loads: a router.group, a rank's micro-batch (depends on the layout), or a step",
        alters="training",
    )
    importance_weight: float = key(
        0.0, "weight of a loss: variance / mean^2 of experts' summed gates (Shazeer et al. 2017)", ge=0, le=1e9, alters="training"
    )
    load_weight: float = key(
        0.0, "for noisy_top_k: weight of a loss: variance / mean^2 of experts' expected loads", ge=0, le=1e9, alters="training"
    )
    z_weight: float = key(0.0, "weight of the z loss, the mean of logsumexp(logits)^2; ST-MoE: 0.001", ge=0, le=1e9, alters="training")

    @property
    def vectors(self) -> int:
        """Number of the router's parameters for each expert, in addition to the expert's row of the weight matrix."""
        return (self.logits == "affine") + (self.expert_scale == "learned")

    @property
    def random_second(self) -> bool:
        return self.second == "random"

    @property
    def own_balance(self) -> str | None:
        """The user's balance loss, as module:name; None for a built-in one."""
        return self.balance_loss if is_plugin(self.balance_loss) else None

    @property
    def asks_balance(self) -> bool:
        """Whether any loss over the tokens of `balance_scope` has a weight above 0."""
        return bool(self.balance_weight or self.importance_weight or self.load_weight)
