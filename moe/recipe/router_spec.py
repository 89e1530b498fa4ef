"""A router as data: every choice that systems make differently, by name; nothing is left to a default of the code (no torch here).

    scores      x -> logits -> noise -> scores                       score, softmax_over, jitter, noise
    selection   scores (+ bias) -> the experts of each token         select, num_choices, expert_groups, top_groups, second, bias_rate
    gates       scores of the chosen -> weights of their outputs     gates, gate_scale
    capacity    choices -> which of them have a slot                 group ... queue
    losses      what keeps experts evenly used                       balance_weight ... z_weight

moe/recipe/presets.py has the published routers in these words; a recipe names one and replaces what it wants (`config.Router.spec`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

_SECOND_CHOICES = "a later token's first choice takes the slot of an earlier one's second choice"


@dataclass(frozen=True)
class RouterSpec:
    """One router, complete.

    scores
        `score` of a logit; `softmax_over` all experts, or over the chosen ones alone (after selection, Mixtral's order);
        `jitter` e: the router's input times uniform(1 - e, 1 + e); `noise` on logits: `gumbel` for selection only, so that an
        expert is drawn with its probability; `noisy_top_k` for gates too, with a learned size (Shazeer et al. 2017). All train only.
    selection
        `select`: `top_k`; `group_limited`: top-k within the `top_groups` best of `expert_groups` equal runs of experts;
        `expert_choice`: experts choose tokens, num_choices a token on average; `hash` of the token's id; `sinkhorn`: top-k of a
        balanced plan in training. `second` expert: always, or with probability 2 g_2 (GShard). `bias_rate`: step of the
        selection bias, None for no bias, 0 for one that stays as loaded.
    gates
        `as_is`; sum 1 over a token's choices `before_drop`; sum 1 over those that found a slot, `after_drop`. Times `gate_scale`.
    capacity
        slots = factor * tokens of the `group` [* k] / experts, rounded, up to a `capacity_multiple`, at least `min_capacity`;
        factor None is dropless. `drop`: who came last by `position`, who has the `lowest_gate`, or a `random` choice (train only).
        `queue`: all first choices of a group, then all second ones; or token after token.
    losses
        weights of Switch's balance loss, of the importance loss and of the z loss, each summed over layers; `balance_counts`:
        which choices f counts; `balance_scope`: over which tokens f is taken.
    """

    num_choices: int
    score: Literal["softmax", "sigmoid", "sqrt_softplus"] = "softmax"
    softmax_over: Literal["all", "chosen"] = "all"
    jitter: float = 0.0
    noise: Literal["none", "gumbel", "noisy_top_k"] = "none"
    select: Literal["top_k", "group_limited", "expert_choice", "hash", "sinkhorn"] = "top_k"
    expert_groups: int = 1
    top_groups: int = 1
    second: Literal["always", "random"] = "always"
    bias_rate: float | None = None
    gates: Literal["as_is", "before_drop", "after_drop"] = "as_is"
    gate_scale: float = 1.0
    group: Literal["sequence", "rank"] | int = "sequence"
    capacity_factor: float | None = None
    eval_capacity_factor: float | None = None
    min_capacity: int = 0
    capacity_counts: Literal["choices", "tokens"] = "choices"
    capacity_rounding: Literal["ceil", "floor", "round"] = "ceil"
    capacity_multiple: int = 1
    drop: Literal["position", "lowest_gate", "random"] = "position"
    queue: Literal["choices_first", "tokens_first"] = "choices_first"
    balance_weight: float = 0.0
    balance_counts: Literal["all", "first"] = "all"
    balance_scope: Literal["sequence", "micro_batch", "global_batch"] = "sequence"
    importance_weight: float = 0.0
    z_weight: float = 0.0

    @property
    def random_second(self) -> bool:
        return self.second == "random"

    @property
    def drops(self) -> bool:
        """Whether a choice may be left without a slot, in training or in evaluation."""
        return self.select != "expert_choice" and (self.capacity_factor is not None or self.eval_capacity_factor is not None)

    @property
    def looks_ahead(self) -> str | None:
        """Why the experts of a token may depend on tokens after it, in training or in evaluation; None: they never do."""
        if self.select == "expert_choice":
            return "an expert chooses its tokens among those of the whole group"
        if self.select == "sinkhorn":
            return "the balanced plan is made over all tokens of the group"
        if self.drops and self.drop == "lowest_gate":
            return "a later token with a higher gate takes an earlier one's slot"
        if self.drops and self.drop == "random" and self.capacity_factor is not None:
            return "a later token may be drawn to take an earlier one's slot"
        if self.drops and self.queue == "choices_first" and self.num_choices > 1:
            return _SECOND_CHOICES
        return None

    @property
    def causal(self) -> bool:
        """No output depends on a later token."""
        return self.looks_ahead is None

    @property
    def second_choices_only(self) -> bool:
        """It looks ahead, but through GShard's queue alone: never at a first choice. So GShard and GLaM train, and so may a recipe."""
        return self.looks_ahead == _SECOND_CHOICES
