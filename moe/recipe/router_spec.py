"""A router as data: every choice in which systems differ has a name here, and the code has no other defaults (no torch here).

    scores      x -> logits -> noise -> scores                       input_norm, logits, score, softmax_over, jitter, noise
    selection   scores (+ bias) -> the experts of each token         select, num_choices, expert_groups ... bias_rate
    gates       scores of the chosen -> weights of their outputs     gates, gate_scale, gate_on
    capacity    choices -> the choices that get a slot               group ... queue
    losses      terms that keep experts evenly used                  balance_weight ... z_weight

moe/recipe/presets.py describes the published routers with it. A recipe names one and replaces some values.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from moe.recipe.plugin import Plugin
from moe.recipe.section import Section, key


class RouterSpec(Section, alters="function", off_without="model.moe_every or model.moe_layers"):
    """One complete router. A recipe's section `router` is one, begun from a published router (`Router` of moe/recipe/sections/experts.py).

    scores
        `input_norm`: norm of the router's input, with its own gain; experts read the layer's input without it (Gemma 4).
        `logits` of the router's input: `linear` W x, or `affine` W x + b (GPT-OSS). `logit_cap` c bounds them: c tanh(l / c).
        `score`: function of a logit. `softmax_over`: all experts, or only the chosen ones (after selection, Mixtral's order).
        `jitter` e: the router's input times uniform(1 - e, 1 + e). `noise` on logits: `gumbel` for selection only, so that an
        expert is drawn with its probability; `noisy_top_k` for gates too, with a learned size (Shazeer et al. 2017). Training only.
    selection
        `select`: `top_k`; `group_limited`: top-k within the `top_groups` best of `expert_groups` equal groups of consecutive experts,
        by the sum of a group's two best scores (DeepSeek-V3) or by its best one (`group_score`, DeepSeek-V2);
        `expert_choice`: experts choose tokens, on average num_choices experts per token; `hash` of the token's id, or its experts in the
        file `hash_table`; `sinkhorn`: top-k of a balanced plan in training; `sparsemixer`: one after another, drawn in training among
        experts with a logit within `mixer_margin` of the best (Phi-3.5-MoE). `second` expert: always, or with probability 2 g_2
        (GShard). `bias_rate`: step of the selection bias; None: no bias; 0: a bias that stays as loaded.
    gates
        `as_is`; normalised to sum 1 over a token's choices (`before_drop`), or over the choices that got a slot (`after_drop`). Times
        `gate_scale`. `expert_scale`: times a learned number of the expert (Gemma 4). `gate_on`: g E(x), or E(g x) (Llama 4).
    capacity
        slots = factor * tokens of the `group` [* k] / experts, rounded, up to a multiple of `capacity_multiple`, at least
        `min_capacity`. Factor None is dropless. `drop`: the last by `position`, the `lowest_gate`, or at `random` (training only).
        `queue`: all first choices of a group, then all second ones; or token after token.
    losses
        weights of Switch's balance loss, the importance loss, with noisy_top_k the load loss, and the z-loss, each summed over layers.
        `balance_counts`: choices that f counts: all, each token's first, or the experts of its k highest scores, even if the router
        chose others (`unbiased`). `balance_scope`: the tokens over which f is taken.
    """

    num_choices: int = key(1, "experts of a token", gt=0)
    input_norm: Literal["none", "rmsnorm"] = key(
        "none", "norm of the router's input, with a gain; experts read the input without it (Gemma 4)", alters="shape"
    )
    logits: Literal["linear", "affine"] = key("linear", "W x, or W x + b with a learned b", alters="shape")
    logit_cap: float | None = key(None, "c of c tanh(l / c), which bounds logits; null: none", ge=1e-3)
    score: Literal["softmax", "sigmoid", "sqrt_softplus"] | Plugin = key("softmax", "function from a logit to a score")
    softmax_over: Literal["all", "chosen"] = key("all", "all experts, or the chosen ones after selection")
    jitter: float = key(0.0, "the router's input times uniform(1 - jitter, 1 + jitter), train only", ge=0, lt=1, alters="training")
    noise: Literal["none", "gumbel", "noisy_top_k"] = key("none", "on logits, train only", alters="training")
    select: Literal["top_k", "group_limited", "expert_choice", "hash", "sinkhorn", "sparsemixer"] | Plugin = key(
        "top_k", "method that selects experts"
    )
    hash_table: str | None = key(
        None, "of hash: a JSON file with each token id's experts (moe hash-table makes one); null: a hash of id and layer"
    )
    mixer_margin: float = key(
        0.01, "of sparsemixer: an expert may be drawn if its logit is below the best by at most twice this share of it", gt=0
    )
    expert_groups: int = key(1, "of group_limited: number of equal groups of consecutive experts", gt=0)
    top_groups: int = key(1, "of group_limited: number of groups that a token may choose from", gt=0)
    group_score: Literal["two_best", "best"] = key("two_best", "of group_limited: experts with scores that sum to a group's score")
    second: Literal["always", "random"] = key("always", "the second of top-2; random: with probability 2 g_2", alters="training")
    bias_rate: float | None = key(None, "step of the selection bias (aux-loss-free balance); null: no bias", ge=0, le=10)
    gates: Literal["as_is", "before_drop", "after_drop"] = key("as_is", "step at which gates are made to sum to 1; as_is: never")
    gate_scale: float = key(1.0, "factor on all gates", ge=1e-6, le=1e6)
    expert_scale: Literal["none", "learned"] = key("none", "factor on gates: a learned number of each expert (Gemma 4)", alters="shape")
    gate_on: Literal["output", "input"] = key("output", "tensor that a gate multiplies: its expert's output or input")
    group: Literal["sequence", "rank"] | Annotated[int, Field(gt=0)] = key(
        "sequence", "tokens that share a capacity: one sequence, n sequences, or all of a rank (not layout-free)"
    )
    capacity_factor: float | None = key(None, "null: dropless", gt=0, alters="training")
    eval_capacity_factor: float | None = key(None, "null: dropless", gt=0)
    min_capacity: int = key(0, ge=0)
    capacity_counts: Literal["choices", "tokens"] = key("choices", "whether k is a factor of the capacity")
    capacity_rounding: Literal["ceil", "floor", "round"] = key("ceil")
    capacity_multiple: int = key(1, "slots are rounded up to a multiple of it", gt=0)
    drop: Literal["position", "lowest_gate", "random"] = key("position", "choices that get no slot")
    queue: Literal["choices_first", "tokens_first"] = key("choices_first", "all first choices before second ones, or not")
    balance_weight: float = key(0.0, "Switch eq. 4, summed over layers", ge=0, le=1e9, alters="training")
    balance_counts: Literal["all", "first", "unbiased"] = key(
        "all",
        "choices counted as load: all, the first (GShard), or the top k of all scores without bias or groups (DeepSeek-V3)",
        alters="training",
    )
    balance_scope: Literal["sequence", "micro_batch", "global_batch"] = key(
        "sequence",
        "tokens over which load should be even: a capacity group, a rank's micro-batch (not layout-free) or a step",
        alters="training",
    )
    importance_weight: float = key(0.0, "squared variation of the experts' gates (Shazeer et al. 2017)", ge=0, le=1e9, alters="training")
    load_weight: float = key(
        0.0, "squared variation of the experts' expected loads under the noise (Shazeer et al. 2017)", ge=0, le=1e9, alters="training"
    )
    z_weight: float = key(0.0, "ST-MoE: 0.001", ge=0, le=1e9, alters="training")

    @property
    def vectors(self) -> int:
        """Number of learned numbers of each expert, in addition to its row of the weight."""
        return (self.logits == "affine") + (self.expert_scale == "learned")

    @property
    def random_second(self) -> bool:
        return self.second == "random"

    @property
    def asks_balance(self) -> bool:
        """Return whether a loss over `balance_scope` moves the router."""
        return bool(self.balance_weight or self.importance_weight or self.load_weight)
