"""A router as data: every choice in which systems differ has a name here, and the code has no other defaults (no torch here).

    scores      x -> logits -> noise -> scores                       input_norm, logits, score, softmax_over, jitter, noise
    selection   scores (+ bias) -> the experts of each token         select, num_choices, expert_groups ... bias_rate
    gates       scores of the chosen -> weights of their outputs     gates, gate_scale, gate_on
    capacity    choices -> the choices that get a slot               group ... queue
    losses      terms that keep experts evenly used                  balance_weight ... z_weight

moe/recipe/presets.py describes the published routers with it. A recipe names one and replaces some values (`sections.Router.spec`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from moe.recipe.plugin import Plugin


@dataclass(frozen=True)
class Key:
    """A recipe's description of a field: its meaning in a few words, and the range of its numbers."""

    description: str | None = None
    above: float | None = None
    least: float | None = None
    below: float | None = None
    most: float | None = None


@dataclass(frozen=True)
class RouterSpec:
    """One complete router. A recipe's section `router` has the same fields, made from these (moe/recipe/sections/experts.py).

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

    num_choices: Annotated[int, Key("experts of a token", above=0)]
    input_norm: Annotated[
        Literal["none", "rmsnorm"], Key("norm of the router's input, with a gain; experts read the input without it (Gemma 4)")
    ] = "none"
    logits: Annotated[Literal["linear", "affine"], Key("W x, or W x + b with a learned b")] = "linear"
    logit_cap: Annotated[float | None, Key("c of c tanh(l / c), which bounds logits; null: none", least=1e-3)] = None
    score: Annotated[Literal["softmax", "sigmoid", "sqrt_softplus"] | Plugin, Key("function from a logit to a score")] = "softmax"
    softmax_over: Annotated[Literal["all", "chosen"], Key("all experts, or the chosen ones after selection")] = "all"
    jitter: Annotated[float, Key("the router's input times uniform(1 - jitter, 1 + jitter), train only", least=0, below=1)] = 0.0
    noise: Annotated[Literal["none", "gumbel", "noisy_top_k"], Key("on logits, train only")] = "none"
    select: Annotated[
        Literal["top_k", "group_limited", "expert_choice", "hash", "sinkhorn", "sparsemixer"] | Plugin, Key("method that selects experts")
    ] = "top_k"
    hash_table: Annotated[
        str | None, Key("of hash: a JSON file with each token id's experts (moe hash-table makes one); null: a hash of id and layer")
    ] = None
    mixer_margin: Annotated[
        float, Key("of sparsemixer: an expert may be drawn if its logit is below the best by at most twice this share of it", above=0)
    ] = 0.01
    expert_groups: Annotated[int, Key("of group_limited: number of equal groups of consecutive experts", above=0)] = 1
    top_groups: Annotated[int, Key("of group_limited: number of groups that a token may choose from", above=0)] = 1
    group_score: Annotated[Literal["two_best", "best"], Key("of group_limited: experts with scores that sum to a group's score")] = (
        "two_best"
    )
    second: Annotated[Literal["always", "random"], Key("the second of top-2; random: with probability 2 g_2")] = "always"
    bias_rate: Annotated[float | None, Key("step of the selection bias (aux-loss-free balance); null: no bias", least=0, most=10)] = None
    gates: Annotated[Literal["as_is", "before_drop", "after_drop"], Key("step at which gates are made to sum to 1; as_is: never")] = "as_is"
    gate_scale: Annotated[float, Key("factor on all gates", least=1e-6, most=1e6)] = 1.0
    expert_scale: Annotated[Literal["none", "learned"], Key("factor on gates: a learned number of each expert (Gemma 4)")] = "none"
    gate_on: Annotated[Literal["output", "input"], Key("tensor that a gate multiplies: its expert's output or input")] = "output"
    group: Annotated[
        Literal["sequence", "rank"] | int,
        Key("tokens that share a capacity: one sequence, n sequences, or all of a rank (not layout-free)", above=0),
    ] = "sequence"
    capacity_factor: Annotated[float | None, Key("null: dropless", above=0)] = None
    eval_capacity_factor: Annotated[float | None, Key("null: dropless", above=0)] = None
    min_capacity: Annotated[int, Key(least=0)] = 0
    capacity_counts: Annotated[Literal["choices", "tokens"], Key("whether k is a factor of the capacity")] = "choices"
    capacity_rounding: Annotated[Literal["ceil", "floor", "round"], Key()] = "ceil"
    capacity_multiple: Annotated[int, Key("slots are rounded up to a multiple of it", above=0)] = 1
    drop: Annotated[Literal["position", "lowest_gate", "random"], Key("choices that get no slot")] = "position"
    queue: Annotated[Literal["choices_first", "tokens_first"], Key("all first choices before second ones, or not")] = "choices_first"
    balance_weight: Annotated[float, Key("Switch eq. 4, summed over layers", least=0, most=1e9)] = 0.0
    balance_counts: Annotated[
        Literal["all", "first", "unbiased"],
        Key("choices counted as load: all, the first (GShard), or the top k of all scores without bias or groups (DeepSeek-V3)"),
    ] = "all"
    balance_scope: Annotated[
        Literal["sequence", "micro_batch", "global_batch"],
        Key("tokens over which load should be even: a capacity group, a rank's micro-batch (not layout-free) or a step"),
    ] = "sequence"
    importance_weight: Annotated[float, Key("squared variation of the experts' gates (Shazeer et al. 2017)", least=0, most=1e9)] = 0.0
    load_weight: Annotated[
        float, Key("squared variation of the experts' expected loads under the noise (Shazeer et al. 2017)", least=0, most=1e9)
    ] = 0.0
    z_weight: Annotated[float, Key("ST-MoE: 0.001", least=0, most=1e9)] = 0.0

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
