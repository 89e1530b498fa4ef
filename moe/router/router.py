"""The router: logits W x, scores from logits, the experts of each token, and a gate for each choice.

    forward = scores (with gradient) -> decide (no gradient: experts of each token, slots) -> gates (with gradient)

Recomputation reuses the Decision of the first forward pass, so rounding cannot change the choices. Everything inside is fp32. Noise, in
training only, depends on a token's position in the step. Experts are selected by a method (moe/router/methods/) or taken from a record
(moe/nn/routing_record.py). Sources: Switch (arXiv 2101.03961, eq. 1-2), GShard (arXiv 2006.16668, algorithm 1).
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe.kernels import choose
from moe.kernels.cpu import kept_of_rows
from moe.nn.context import Context
from moe.nn.linear import Norm, linear_fp32
from moe.router.capacity import kept_choices, slots_of
from moe.router.checks import check_spec, fuses
from moe.router.methods import method_of
from moe.router.methods.method import Chosen, Method, RoutingRequest
from moe.router.routing import Decision, Routing
from moe.router.scores import chance_of_choice, chosen_gates, chosen_scores, gumbel, jittered, normal, probabilities, scores_of
from moe.router.slices import Shards
from parallel.errors import BadInput, counted
from parallel.fixes import Set
from parallel.mesh.regions import in_region
from parallel.numerics.precision import sum_dtype
from parallel.numerics.supposed import supposed, supposed_as

if TYPE_CHECKING:
    from moe.kernels.triton.router import Fused, Together
    from moe.recipe.router_spec import RouterSpec

# T tokens, D model, E experts, K choices

_CHOSEN = 20.0  # `balanced_logits`: the chosen experts' logit, far above noise; all others get -_CHOSEN


class Router(nn.Module):
    """Linear router with `weight` [E, D] and, for affine logits, `logit_bias` [E]. `name`: part of the keys of its random numbers.
    `bias_E` fp32, a buffer: the selection bias. `noise_weight` [E, D] learns the size of noisy_top_k's noise. `expert_scale` [E] and the
    gain of `input_norm` [D] begin at 1. Raises BadInput for a spec that cannot work with `num_experts`.
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
        self.table_VK: Tensor | None  # the experts of each token id, from the recipe's hash_table (moe/recipe/hash_table.py)
        self.register_buffer("table_VK", None, persistent=False)

    @property
    def method(self) -> Method:
        return method_of(self.spec)

    @in_region("route")
    def forward(self, x_TD: Tensor, *, sequence_tokens: int | None, context: Context, shards: Shards | None = None) -> Routing:
        """Route the tokens x_TD [T, D], one sequence after another. `sequence_tokens`: number of tokens of a whole sequence; None: all
        tokens are one group. `shards`: the ranks over which the tokens of these sequences are distributed; None: this rank has whole
        sequences. Raises BadInput if router.group does not divide a micro-batch's number of sequences in training."""
        spec = self.spec
        logits_TE, noisy_TE, chance_TE = self._logits(x_TD, context)
        if self._fuses(logits_TE, context, shards, sequence_tokens):
            return self._fused(logits_TE, shards, sequence_tokens=sequence_tokens, context=context)
        scores_TE = scores_of(noisy_TE, spec)
        made = context.once(
            f"{self.name}.decision",
            lambda: self._decide(scores_TE.detach(), noisy_TE.detach(), shards, sequence_tokens=sequence_tokens, context=context),
        )
        chosen = made.chosen
        gate_TK = self.method.gates(noisy_TE, chosen)
        if gate_TK is None:
            of_TK = made.kept_TK if spec.gates == "after_drop" else chosen.counted_TK
            gate_TK = chosen_gates(scores_TE, noisy_TE, chosen.expert_TK, spec=spec, of_TK=of_TK)
        else:
            gate_TK = spec.gate_scale * gate_TK
        gate_TK = self._scaled(gate_TK, chosen.expert_TK)
        groups = (made.capacity, made.num_groups, context.valid_T, chosen.counted_TK, made.load_TK)
        return Routing(chosen.expert_TK, gate_TK, made.kept_TK, probabilities(scores_TE, spec), logits_TE, *groups, chance_TE)

    def _scaled(self, gate_TK: Tensor, expert_TK: Tensor) -> Tensor:
        return gate_TK if self.expert_scale is None else gate_TK * self.expert_scale.float()[expert_TK]

    def _fuses(self, logits_TE: Tensor, context: Context, shards: Shards | None, sequence_tokens: int | None) -> bool:
        """Return whether a kernel computes gates, losses and the layer's report: on a GPU with Triton, for the common routers. Torch
        operations compute all other cases, such as a balance loss over the whole step's tokens, or over groups whose tokens are spread
        unevenly over ranks. `shards`, `sequence_tokens`: as in `forward`.
        """
        s = self.spec
        return (
            _kernel(self.kernels, "route", logits_TE) is not None
            and fuses(s, training=self.training)
            and not (s.balance_scope == "global_batch" and context.whole_step)
            and (shards is None or s.balance_scope != "sequence" or shards.in_runs(self._num_groups(shards.total, sequence_tokens)))
        )

    def _fused(self, logits_TE: Tensor, shards: Shards | None, *, sequence_tokens: int | None, context: Context) -> Routing:
        """Route by one kernel. It also chooses the experts, except in three cases, in which `_decide` chooses them: (1) a record gives the
        experts; (2) experts have a capacity and router.drop is not position; (3) experts have a capacity, K > 1, router.queue is not
        choices_first, and ranks share groups of tokens (`shards`). A recomputation reuses the experts of the first pass. Collective if
        ranks share groups. `sequence_tokens`: tokens of a sequence."""
        from moe.kernels.triton.router import Given, Together

        spec, route, made_now, known = self.spec, _kernel(self.kernels, "route", logits_TE), list["Fused"](), list["Together"]()
        assert route is not None
        num_groups, slots = self._groups(len(logits_TE) if shards is None else shards.total, sequence_tokens)
        groups = num_groups if spec.balance_scope == "sequence" else 1
        balances = shards is not None and spec.balance_scope != "global_batch"
        sorts = shards is None or spec.queue == "choices_first" or spec.num_choices == 1
        chooses = context.replay_routing is None and (slots is None or (spec.drop == "position" and sorts))

        def run(made: Decision | None = None) -> Fused:
            def exchange(expert_TK: Tensor, counted_GBE: Tensor) -> Together:
                assert shards is not None
                kept_TK, counted_GE = (None, None) if made is None else (made.kept_TK, made.counted_GE)
                if made is None and slots is not None:
                    expert_TK = supposed(expert_TK, choices)
                    kept_TK, counted_GE = self._kept_together(expert_TK, shards, context, num_groups=num_groups, slots=slots)
                if balances and counted_GE is None:
                    counted_GE = shards.summed(counted_GBE.sum(1))
                known.append(Together(counted_GE if balances else None, None if slots is None else kept_TK))
                return known[-1]

            expert_TK, load_TK = (None, None) if made is None else (made.chosen.expert_TK, made.load_TK)
            asks = exchange if balances or (shards is not None and slots is not None) else None
            given = Given(groups, slots, self.bias_E, context.valid_T, self.method.open_groups(spec), expert_TK, load_TK, asks)
            fused: Fused = route(logits_TE, given, spec)
            return fused

        def choices() -> Tensor:
            return self._balanced(logits_TE)().topk(spec.num_choices).indices

        def decide() -> Decision:
            if not chooses:
                detached_TE = logits_TE.detach()
                return self._decide(scores_of(detached_TE, spec), detached_TE, shards, sequence_tokens=sequence_tokens, context=context)
            made_now.append(run())
            expert_TK, together = supposed(made_now[0].expert_TK, choices), known[0] if known else Together()
            _record(context, self.name, expert_TK)
            kept_TK = together.kept_TK
            if kept_TK is None:
                kept_TK = self._keep(expert_TK, self._active(logits_TE, expert_TK, context), None, num_groups=num_groups, slots=slots)
            return Decision(Chosen(expert_TK), kept_TK, slots, num_groups, made_now[0].load_TK, together.counted_GE)

        made = context.once(f"{self.name}.decision", decide)
        fused = made_now[0] if made_now else run(made)
        gate_TK = self._scaled(fused.gate_TK, fused.expert_TK)
        of_groups = (made.capacity, made.num_groups, context.valid_T)
        return Routing(fused.expert_TK, gate_TK, made.kept_TK, fused.probs_TE, logits_TE, *of_groups, fused=fused)

    def _kept_together(
        self, expert_TK: Tensor, shards: Shards, context: Context, *, num_groups: int, slots: int
    ) -> tuple[Tensor, Tensor | None]:
        """Return (whether each of this rank's choices gets one of an expert's `slots` slots in a group, bool [T, K]; number of each
        expert's choices in a group that the balance loss counts, over the ranks of `shards`, int32 [G, E]). The second is None if the
        balance loss counts other experts than the chosen ones. Collective."""
        from moe.kernels.triton import queues

        if context.valid_T is not None:
            expert_TK = torch.where(context.valid_T.unsqueeze(1), expert_TK, -1)
        given, counts = (shards.gathered(expert_TK), shards.row_G(expert_TK.device)), self.spec.balance_counts
        sizes: dict[str, Any] = {"mine": shards.own_rows, "num_groups": num_groups, "num_experts": self.num_experts, "slots_each": slots}
        sizes["counted"] = 1 if counts == "first" else expert_TK.shape[1]
        kept_TK, counted_GE = queues(*given, **sizes)
        return supposed_as(kept_TK, kept_of_rows, *given, **sizes), None if counts == "unbiased" else counted_GE

    def _logits(self, x_TD: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return (logits, logits with noisy_top_k's noise, each expert's probability of being chosen), each [T, E].
        Without noise, both logits are the same tensor. The probabilities are None without a load loss.
        """
        spec = self.spec
        if self.training and spec.jitter:
            x_TD = self._jittered(x_TD, context)
        if self.input_norm is not None:
            x_TD = self.input_norm(x_TD.to(sum_dtype(x_TD.dtype)))
        logits_TE = linear_fp32(x_TD, self.weight)
        if self.logit_bias is not None:
            logits_TE = logits_TE + self.logit_bias.to(logits_TE.dtype)
        if spec.logit_cap is not None:
            logits_TE = spec.logit_cap * (logits_TE / spec.logit_cap).tanh()
        logits_TE = supposed(logits_TE, self._balanced(x_TD))
        if self.noise_weight is None or not self.training:
            return logits_TE, logits_TE, None
        noise_TE = normal(context.uniform(f"{self.name}.noise", self.num_experts))
        wide_TD = x_TD.to(sum_dtype(x_TD.dtype))
        size_TE = F.softplus(F.linear(wide_TD, self.noise_weight.to(wide_TD.dtype)))
        noisy_TE = supposed(logits_TE + noise_TE * size_TE, self._balanced(x_TD))
        return logits_TE, noisy_TE, chance_of_choice(logits_TE, noisy_TE, size_TE, spec.num_choices) if spec.load_weight else None

    def _jittered(self, x_TD: Tensor, context: Context) -> Tensor:
        name, kernel = f"{self.name}.jitter", _kernel(self.kernels, "jittered", x_TD)
        if kernel is not None:
            out_TD: Tensor = kernel(x_TD, context.position_T, key=context.key(name), size=self.spec.jitter)
            return out_TD
        return jittered(x_TD.to(sum_dtype(x_TD.dtype)), context.uniform(name, x_TD.shape[1]), self.spec.jitter)

    def _balanced(self, x_TD: Tensor) -> Callable[[], Tensor]:
        return lambda: balanced_logits(len(x_TD), num_experts=self.num_experts, num_choices=self.spec.num_choices)

    def _decide(
        self, scores_TE: Tensor, logits_TE: Tensor, shards: Shards | None, *, sequence_tokens: int | None, context: Context
    ) -> Decision:
        """Choose experts for the tokens of this rank, in sequences of `sequence_tokens` tokens. Collective if ranks share groups of tokens
        (`shards`): the logits of whole groups are gathered if a token's experts depend on other tokens of the group, and the chosen experts
        if only the token's slots do."""
        if shards is None or not self.method.needs_whole_groups:
            return self.decide(scores_TE, logits_TE, shards, sequence_tokens=sequence_tokens, context=context)
        logits_GE = shards.whole(logits_TE)
        scores_GE = scores_of(logits_GE, self.spec)
        found = self.decide(scores_GE, logits_GE, sequence_tokens=sequence_tokens, context=shards.context(context))
        return shards.of_mine(found)

    @torch.no_grad()
    def decide(
        self, scores_TE: Tensor, logits_TE: Tensor, shards: Shards | None = None, *, sequence_tokens: int | None, context: Context
    ) -> Decision:
        """Select experts, and keep the choices that get a slot, by scores and logits [T, E] fp32. `shards`: the ranks that hold other
        tokens of these groups; None: the groups are whole. `sequence_tokens`: tokens of a sequence."""
        spec = self.spec
        num_groups, slots = self._groups(len(logits_TE) if shards is None else shards.total, sequence_tokens)
        preferred_TE, own = self._preferred(scores_TE, logits_TE, context), (self.kernels, self.name, self._given(context), self.table_VK)
        request = RoutingRequest(spec, preferred_TE, scores_TE, logits_TE, num_groups, slots, self.training, context, *own)
        chosen = self.method.choose(request)
        if not self.method.tokens_choose:
            assert chosen.counted_TK is not None
            return Decision(chosen, chosen.counted_TK, slots, num_groups)
        expert_TK = chosen.expert_TK
        priority_TK = None if slots is None else self._priority(scores_TE, logits_TE, expert_TK, context)
        active_TK = self._active(scores_TE, expert_TK, context)
        _record(context, self.name, expert_TK)
        kept_TK = self._keep(expert_TK, active_TK, shards, num_groups=num_groups, slots=slots, priority_TK=priority_TK)
        load_TK = self.kernels.top_k(scores_TE, spec.num_choices) if spec.balance_counts == "unbiased" else None
        return Decision(chosen, kept_TK, slots, num_groups, load_TK)

    def _keep(
        self,
        expert_TK: Tensor,
        active_TK: Tensor | None,
        shards: Shards | None,
        *,
        num_groups: int,
        slots: int | None,
        priority_TK: Tensor | None = None,
    ) -> Tensor:
        """Return the active choices that get a slot: bool [T, K]. `active_TK`: choices that need one; None: all. `shards`: the ranks over
        which tokens of a group are distributed; None: this rank has whole groups. `slots`: number of an expert's slots in a group;
        None: no limit. `priority_TK`: see `kept_choices`."""
        if shards is not None and slots is not None:
            whole = (None if x is None else shards.whole(x.contiguous()) for x in (expert_TK, active_TK, priority_TK))
            expert_TK, active_TK, priority_TK = whole  # type: ignore[assignment]
        kept_TK = kept_choices(
            expert_TK,
            active_TK,
            num_groups=1 if slots is None else num_groups,
            num_experts=self.num_experts,
            slots_each=slots,
            kernels=self.kernels,
            queue=self.spec.queue,
            priority_TK=priority_TK,
        )
        return kept_TK if shards is None or slots is None else shards.mine(kept_TK)

    def _preferred(self, scores_TE: Tensor, logits_TE: Tensor, context: Context) -> Tensor:
        """Return the scores [T, E] by which experts are selected. They include gumbel noise and the selection bias; gates do not."""
        spec = self.spec
        preferred_TE = logits_TE if spec.softmax_over == "chosen" else scores_TE
        if spec.noise == "gumbel" and self.training:
            noisy_TE = logits_TE + gumbel(context.uniform(f"{self.name}.gumbel", self.num_experts))
            preferred_TE = noisy_TE if spec.softmax_over == "chosen" else scores_of(noisy_TE, spec)
        return preferred_TE if self.bias_E is None else preferred_TE + self.bias_E

    def _given(self, context: Context) -> Tensor | None:
        """Return the recorded experts [T, K], with -1 for a token without a record; None if no record is replayed. Raises BadInput for a
        record with a method in which experts choose tokens."""
        if not self.method.tokens_choose and (context.record_routing or context.replay_routing):
            needed, fix = "a router in which tokens choose experts", "give no record" | Set("router.select", "top_k")
            raise BadInput(
                "record_routing or replay_routing",
                got=f"a record with router.select {self.spec.select}, in which experts choose tokens",
                needed=needed,
                fix=fix,
            )
        if context.replay_routing is None:
            return None
        sizes = {"num_choices": self.spec.num_choices, "num_experts": self.num_experts}
        return context.replay_routing.take(self.name, context.position_T, **sizes)

    def _active(self, scores_TE: Tensor, expert_TK: Tensor, context: Context) -> Tensor | None:
        """Return bool [T, K]: False for padding, and for second choices that `router.second: random` does not use. None: all are True."""
        valid_T1 = None if context.valid_T is None else context.valid_T.unsqueeze(1)
        if self.training and self.spec.random_second:
            gate_TK = scores_TE.gather(1, expert_TK)
            second_T = gate_TK[:, 1] / gate_TK.sum(-1)
            active_TK = torch.ones_like(expert_TK, dtype=torch.bool)
            active_TK[:, 1] = 2 * second_T > context.uniform(f"{self.name}.second", 1)[:, 0]
            return active_TK if valid_T1 is None else active_TK & valid_T1
        return None if valid_T1 is None else valid_T1.expand_as(expert_TK).contiguous()

    def _priority(self, scores_TE: Tensor, logits_TE: Tensor, expert_TK: Tensor, context: Context) -> Tensor | None:
        """Return each choice's priority for a slot [T, K], or None if only the order in the queue decides."""
        spec = self.spec
        if spec.drop == "random" and self.training:
            return context.uniform(f"{self.name}.lot", expert_TK.shape[1])
        if spec.drop != "lowest_gate":
            return None
        gate_TK = chosen_scores(scores_TE, logits_TE, expert_TK, spec=spec)
        # choices_first: a token's highest gate is the priority of all its choices (V-MoE); tokens_first: each choice's own gate
        return gate_TK.amax(1, keepdim=True).expand_as(gate_TK) if spec.queue == "choices_first" else gate_TK

    def _groups(self, tokens: int, sequence_tokens: int | None) -> tuple[int, int | None]:
        """Return (number of groups, number of slots of an expert in each group; None: no limit), for sequences of `sequence_tokens`
        tokens."""
        num_groups = self._num_groups(tokens, sequence_tokens)
        return num_groups, slots_of(self.spec, tokens // num_groups, num_experts=self.num_experts, training=self.training)

    def _num_groups(self, tokens: int, sequence_tokens: int | None) -> int:
        group = self.spec.group
        if group == "rank" or sequence_tokens is None:
            return 1
        sequences = tokens // sequence_tokens
        each = 1 if group == "sequence" else group
        if sequences % each == 0:
            return max(1, sequences // each)
        if self.training:
            needed, fix = f"a divisor of the micro-batch's {counted(sequences, 'sequence')}", Set("router.group", "sequence")
            raise BadInput("router.group", got=counted(each, "sequence"), needed=needed, fix=fix)
        return 1  # evaluation uses one group, because it may have fewer sequences than a group in training


def _kernel(kernels: ModuleType, name: str, x: Tensor) -> Callable[..., Any] | None:
    """Return the function `name` of the kernels for x's device; None if these kernels have no such function, or if x is float64."""
    of = getattr(kernels, "kernels_of", None)  # exists if the kernels differ by device
    return None if x.dtype == torch.float64 else getattr(of(x) if of else kernels, name, None)


def _record(context: Context, name: str, expert_TK: Tensor) -> None:
    """Record the experts if the context asks for it."""
    if context.record_routing is not None:
        context.record_routing.add(name, context.position_T, expert_TK)


def balanced_logits(tokens: int, *, num_experts: int, num_choices: int) -> Tensor:
    """Return logits [T, E], fp32 on the CPU, with an equal load of all experts: for a rehearsal, which computes no values.
    Token t chooses K experts in a row from expert t K (modulo E). For E = 6 and K = 2: 0 1, 2 3, 4 5.
    """
    choice_K = torch.arange(num_choices)
    expert_TK = (torch.arange(tokens).unsqueeze(1) * num_choices + choice_K) % num_experts
    return torch.full((tokens, num_experts), -_CHOSEN).scatter_(1, expert_TK, (_CHOSEN - choice_K / num_choices).expand(tokens, -1))
