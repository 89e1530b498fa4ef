"""The router: logits W x, scores from logits, the experts of each token, and a gate for each choice.

    forward = scores (with gradient) -> decide (no gradient: who is chosen, who gets a slot) -> gates (with gradient)
                                           \\__ whom a record names is taken instead (moe/nn/routing_record.py)

A Decision is a small value of integers and bools, and is made once. A pass that is computed again to save memory reuses the first
pass's Decision, so that differences in rounding cannot change the choices. Everything inside is fp32. Training noise is keyed by a
token's place in the step; evaluation has no noise. The settings are data (moe/recipe/router_spec.py, moe/recipe/presets.py); the
methods are in scores.py, selection.py, sparsemixer.py, noise.py and capacity.py.
Sources: Switch (arXiv 2101.03961, eq. 1-2), GShard (arXiv 2006.16668, algorithm 1).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from moe.kernels import choose
from moe.nn.context import Context
from moe.nn.linear import Norm, linear_fp32
from moe.recipe.plugin import is_plugin
from moe.recipe.router_spec import RouterSpec
from moe.router.capacity import kept_choices
from moe.router.checks import check_spec
from moe.router.noise import chance_of_choice, gumbel, jittered, noise_size, noisy_logits
from moe.router.own import own_choices
from moe.router.rehearsed import balanced_logits
from moe.router.scores import chosen_gates, chosen_scores, probabilities, scores_of
from moe.router.selection import balanced_plan, expert_choice, group_limited, hashed
from moe.router.slices import Slices
from moe.router.slots import slots_of
from moe.router.sparsemixer import mixed_gates, one_by_one, shares
from parallel.errors import BadInput
from parallel.regions import in_region
from parallel.supposed import supposed

# T tokens, D model, E experts, K choices


@dataclass(frozen=True)
class Decision:
    """What the router decides, without gradient.

    `expert_TK` int64; `kept_TK` bool: the choice got a slot. `counted_TK` bool: False where an entry only fills the row of a token that
    fewer experts chose; None if every row is full. `capacity`: slots per expert and group, None if dropless. `num_groups`: number of
    groups, equal in size, in token order; the same on ranks that hold slices of them. `load_TK` int64: what the balance loss counts,
    where that is not the choices. Of sparsemixer `open_TKE` bool and, in training, `share_TK` fp32 (moe/router/sparsemixer.py).
    """

    expert_TK: Tensor
    kept_TK: Tensor
    counted_TK: Tensor | None
    capacity: int | None
    num_groups: int
    load_TK: Tensor | None = None
    open_TKE: Tensor | None = None
    share_TK: Tensor | None = None


@dataclass(frozen=True)
class Routing:
    """One layer's routing of T tokens: the fields of a Decision, and tensors with gradients.

    `gate_TK` fp32; `probs_TE` fp32, rows sum to 1; `logits_TE` fp32, before noise. `valid_T` bool, None if no token is padding: a padding
    token is never kept and never counted. `chance_TE` fp32: where a load loss is asked for, how likely each expert was to be chosen.
    """

    expert_TK: Tensor
    gate_TK: Tensor
    kept_TK: Tensor
    probs_TE: Tensor
    logits_TE: Tensor
    capacity: int | None
    num_groups: int
    valid_T: Tensor | None = None
    counted_TK: Tensor | None = None
    load_TK: Tensor | None = None
    chance_TE: Tensor | None = None


class Router(nn.Module):
    """Linear router; `weight` [E, D], and `logit_bias` [E] where logits are affine. `name` keys its random numbers. `expert_scale` [E] and
    the gain of `input_norm` [D], where the spec has them, begin at 1.

    `bias_E` fp32, a buffer: the selection bias, None if the spec has none. `noise_weight` [E, D] learns the size of noisy_top_k's noise.
    Raises BadInput for a spec that cannot work with so many experts.
    """

    def __init__(
        self,
        spec: RouterSpec,
        *,
        num_experts: int,
        d_model: int,
        norm_eps: float | None = None,
        kernels: str = "auto",
        name: str = "router",
    ) -> None:
        super().__init__()
        self.spec, self.num_experts, self.name = spec, num_experts, name
        check_spec(spec, num_experts)
        self.kernels = choose(kernels)
        self.weight = nn.Parameter(torch.empty(num_experts, d_model))
        self.logit_bias = nn.Parameter(torch.empty(num_experts)) if spec.logits == "affine" else None
        self.noise_weight = nn.Parameter(torch.empty(num_experts, d_model)) if spec.noise == "noisy_top_k" else None
        self.input_norm = Norm(d_model, "rmsnorm", eps=norm_eps) if spec.input_norm == "rmsnorm" else None
        self.expert_scale = nn.Parameter(torch.empty(num_experts)) if spec.expert_scale == "learned" else None
        self.bias_E: Tensor | None
        self.register_buffer("bias_E", None if spec.bias_rate is None else torch.zeros(num_experts))
        self.table_VK: Tensor | None  # the experts of each id, where they are given: moe/recipe/hash_table.py
        self.register_buffer("table_VK", None, persistent=False)
        self.slices: Slices | None = None  # where other ranks hold other slices of its groups

    @in_region("route")
    def forward(self, x_TD: Tensor, *, sequence_tokens: int, context: Context) -> Routing:
        """Route the tokens x_TD [T, D], which stand sequence after sequence, each `sequence_tokens` long."""
        spec = self.spec
        logits_TE, noisy_TE, chance_TE = self._logits(x_TD, context)
        scores_TE = scores_of(noisy_TE, spec)
        made = context.once(
            f"{self.name}.decision",
            lambda: self._decide(scores_TE.detach(), noisy_TE.detach(), sequence_tokens=sequence_tokens, context=context),
        )
        of_TK = made.kept_TK if spec.gates == "after_drop" else made.counted_TK
        if made.open_TKE is not None:
            gate_TK = spec.gate_scale * mixed_gates(noisy_TE, made.expert_TK, made.open_TKE, made.share_TK)
        else:
            gate_TK = chosen_gates(scores_TE, noisy_TE, made.expert_TK, spec=spec, of_TK=of_TK)
        if self.expert_scale is not None:
            gate_TK = gate_TK * self.expert_scale.float()[made.expert_TK]
        return Routing(
            made.expert_TK,
            gate_TK,
            made.kept_TK,
            probabilities(scores_TE, spec),
            logits_TE,
            made.capacity,
            made.num_groups,
            context.valid_T,
            made.counted_TK,
            made.load_TK,
            chance_TE,
        )

    def _logits(self, x_TD: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor | None]:
        """Logits of the (jittered, normed) input, and the same logits with noise of learned size; without noise both are the same tensor.

        And, where a load loss is asked for, how likely each expert was to be chosen.
        """
        spec = self.spec
        if self.training and spec.jitter:
            x_TD = jittered(x_TD.float(), context.uniform(f"{self.name}.jitter", x_TD.shape[1]), spec.jitter)
        if self.input_norm is not None:
            x_TD = self.input_norm(x_TD.float())
        logits_TE = linear_fp32(x_TD, self.weight)
        if self.logit_bias is not None:
            logits_TE = logits_TE + self.logit_bias.float()
        if spec.logit_cap is not None:
            logits_TE = spec.logit_cap * (logits_TE / spec.logit_cap).tanh()
        logits_TE = supposed(logits_TE, self._balanced(x_TD))
        if self.noise_weight is None or not self.training:
            return logits_TE, logits_TE, None
        noise_TE, size_TE = context.uniform(f"{self.name}.noise", self.num_experts), noise_size(x_TD.float(), self.noise_weight)
        noisy_TE = supposed(noisy_logits(logits_TE, size_TE, noise_TE), self._balanced(x_TD))
        return logits_TE, noisy_TE, chance_of_choice(logits_TE, noisy_TE, size_TE, spec.num_choices) if spec.load_weight else None

    def _balanced(self, x_TD: Tensor) -> Callable[[], Tensor]:
        return lambda: balanced_logits(len(x_TD), num_experts=self.num_experts, num_choices=self.spec.num_choices)

    def _decide(self, scores_TE: Tensor, logits_TE: Tensor, *, sequence_tokens: int, context: Context) -> Decision:
        """Over whole groups, whoever holds their tokens."""
        slices = self.slices
        if slices is None:
            return self.decide(scores_TE, logits_TE, sequence_tokens=sequence_tokens, context=context)
        scores_GE, logits_GE = slices.whole(torch.stack((scores_TE, logits_TE), dim=1)).unbind(1)
        length = sequence_tokens * slices.axis.size
        return slices.each_mine(self.decide(scores_GE, logits_GE, sequence_tokens=length, context=slices.context(context)))

    @torch.no_grad()
    def decide(self, scores_TE: Tensor, logits_TE: Tensor, *, sequence_tokens: int, context: Context) -> Decision:
        """The experts of each token and the choices that get a slot, from the scores and the logits behind them."""
        spec, tokens = self.spec, len(logits_TE)
        num_groups = self._num_groups(tokens, sequence_tokens)
        slots = slots_of(spec, tokens // num_groups, num_experts=self.num_experts, training=self.training)
        preferred_TE = self._preferred(scores_TE, logits_TE, num_groups=num_groups, context=context)
        given_TK = self._given(context)
        if spec.select == "expert_choice":
            assert slots is not None, "check_spec refuses expert choice without a capacity"
            expert_TK, counted_TK = expert_choice(preferred_TE, slots=slots, num_groups=num_groups, valid_T=context.valid_T)
            return Decision(expert_TK, counted_TK, counted_TK, slots, num_groups)
        open_TKE = share_TK = None
        if spec.select == "sparsemixer":
            expert_TK, open_TKE, share_TK = self._mix(logits_TE, context, given_TK)
        else:
            expert_TK = self._select(preferred_TE, context)
            expert_TK = expert_TK if given_TK is None else torch.where(given_TK < 0, expert_TK, given_TK)
        if context.record_routing is not None:
            context.record_routing.add(self.name, context.position_T, expert_TK)
        active_TK = self._active(scores_TE, expert_TK, context)
        kept_TK = kept_choices(
            expert_TK,
            active_TK,
            num_groups=num_groups,
            num_experts=self.num_experts,
            slots_each=slots,
            kernels=self.kernels,
            queue=spec.queue,
            priority_TK=None if slots is None else self._priority(scores_TE, logits_TE, expert_TK, context),
        )
        load_TK = self.kernels.top_k(scores_TE, spec.num_choices) if spec.balance_counts == "unbiased" else None
        return Decision(expert_TK, kept_TK, None, slots, num_groups, load_TK, open_TKE, share_TK)

    def _preferred(self, scores_TE: Tensor, logits_TE: Tensor, *, num_groups: int, context: Context) -> Tensor:
        """The values [T, E] whose highest are selected. Gates are always taken from the unchanged scores."""
        spec = self.spec
        if spec.select == "sinkhorn" and self.training:
            return balanced_plan(logits_TE, num_groups=num_groups, valid_T=context.valid_T)
        preferred_TE = logits_TE if spec.softmax_over == "chosen" else scores_TE
        if spec.noise == "gumbel" and self.training:
            noisy_TE = logits_TE + gumbel(context.uniform(f"{self.name}.gumbel", self.num_experts))
            preferred_TE = noisy_TE if spec.softmax_over == "chosen" else scores_of(noisy_TE, spec)
        return preferred_TE if self.bias_E is None else preferred_TE + self.bias_E

    def _select(self, preferred_TE: Tensor, context: Context) -> Tensor:
        spec, k = self.spec, self.spec.num_choices
        if spec.select == "group_limited":
            best = 1 if spec.group_score == "best" else 2
            groups = {"expert_groups": spec.expert_groups, "top_groups": spec.top_groups, "best": best}
            return group_limited(preferred_TE, k, **groups, kernels=self.kernels)
        if spec.select == "hash":
            if context.tokens_T is None:
                raise BadInput("router.select", got="hash without token ids", needed="tokens_T", fix="make the context by Context.of")
            if self.table_VK is not None:
                return self.table_VK[context.tokens_T.long()]
            if spec.hash_table is not None:
                fix = "make the model by moe.parallelize.build, which reads it"
                raise BadInput("router.hash_table", got=f"{spec.hash_table}, not read", needed="its table in the router", fix=fix)
            return hashed(context.tokens_T, k, num_experts=self.num_experts, name=self.name, kernels=self.kernels)
        if is_plugin(spec.select):
            return own_choices(preferred_TE, k, spec.select)
        expert_TK: Tensor = self.kernels.top_k(preferred_TE, k)
        return expert_TK

    def _given(self, context: Context) -> Tensor | None:
        """The experts [T, K] of a record, -1 where the router chooses; None: everywhere."""
        if self.spec.select == "expert_choice" and (context.record_routing or context.replay_routing):
            needed, fix = "a router whose tokens choose: here experts choose tokens", "give no record, or set router.select to top_k"
            raise BadInput("record_routing or replay_routing", got="one with router.select expert_choice", needed=needed, fix=fix)
        if context.replay_routing is None:
            return None
        sizes = {"num_choices": self.spec.num_choices, "num_experts": self.num_experts}
        return context.replay_routing.take(self.name, context.position_T, **sizes)

    def _mix(self, logits_TE: Tensor, context: Context, given_TK: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        k, margin = self.spec.num_choices, self.spec.mixer_margin
        if not self.training:
            expert_TK, _, open_TKE = one_by_one(logits_TE, k, margin=margin, uniform=None, given_TK=given_TK)
            return expert_TK, open_TKE, None
        draw = partial(self._uniform_of, context)
        expert_TK, best_TK, open_TKE = one_by_one(logits_TE, k, margin=margin, uniform=draw, given_TK=given_TK)
        return expert_TK, open_TKE, shares(best_TK, context.uniform(f"{self.name}.midpoint", k))

    def _uniform_of(self, context: Context, choice: int) -> Tensor:
        return context.uniform(f"{self.name}.mixer.{choice}", self.num_experts)

    def _active(self, scores_TE: Tensor, expert_TK: Tensor, context: Context) -> Tensor:
        """The choices that ask for a slot: neither those of padding tokens nor declined second choices."""
        active_TK = torch.ones_like(expert_TK, dtype=torch.bool)
        if self.training and self.spec.random_second:
            gate_TK = scores_TE.gather(1, expert_TK)
            second_T = gate_TK[:, 1] / gate_TK.sum(-1)
            active_TK[:, 1] = 2 * second_T > context.uniform(f"{self.name}.second", 1)[:, 0]
        return active_TK if context.valid_T is None else active_TK & context.valid_T.unsqueeze(1)

    def _priority(self, scores_TE: Tensor, logits_TE: Tensor, expert_TK: Tensor, context: Context) -> Tensor | None:
        """Priority of service [T, K], or None if queue order alone decides."""
        spec = self.spec
        if spec.drop == "random" and self.training:
            return context.uniform(f"{self.name}.lot", expert_TK.shape[1])
        if spec.drop != "lowest_gate":
            return None
        gate_TK = chosen_scores(scores_TE, logits_TE, expert_TK, spec=spec)
        # V-MoE serves whole tokens, by their highest gate; where tokens queue instead of choices, each choice has its own priority
        return gate_TK.amax(1, keepdim=True).expand_as(gate_TK) if spec.queue == "choices_first" else gate_TK

    def _num_groups(self, tokens: int, sequence_tokens: int) -> int:
        group = self.spec.group
        if group == "rank":
            return 1
        sequences = tokens // sequence_tokens
        each = 1 if group == "sequence" else group
        if sequences % each == 0:
            return sequences // each
        if self.training:
            raise BadInput(
                "router.group", got=f"{each} sequences", needed=f"a divisor of the {sequences} given", fix="set router.group to sequence"
            )
        return 1  # evaluation and generation may have fewer sequences than a training group
