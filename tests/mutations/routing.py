"""Faults of MoE layers: choice of experts, capacity, gates, auxiliary losses, dropped tokens and recomputation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe.router.scores import chosen_scores
from moe.verify.cases import SLICED, Case
from parallel.mesh.collectives import all_reduce
from tests.mutations.mutation import Edit, Mutation


def _one_more(real: Any) -> Any:
    """Each expert accepts one token more than its capacity."""

    def wrong(*args: Any, slots_each: int | None, **rest: Any) -> Tensor:
        kept: Tensor = real(*args, slots_each=None if slots_each is None else slots_each + 1, **rest)
        return kept

    return wrong


def _no_capacity(real: Any) -> Any:
    return lambda *args, slots_each, **rest: real(*args, slots_each=None, **rest)


def _choices_twice(real: Any) -> Any:
    """Capacity is computed from tokens * choices rows, multiplied by the number of choices again."""

    def wrong(spec: Any, group_tokens: int, **rest: Any) -> int | None:
        return real(spec, group_tokens * spec.num_choices, **rest)  # type: ignore[no-any-return]

    return wrong


def _last_come_first(real: Any) -> Any:
    """A full expert drops the first tokens instead of the last."""

    def wrong(expert_TK: Tensor, active_TK: Tensor | None, *, num_groups: int, **rest: Any) -> Tensor:
        def turned(x: Tensor) -> Tensor:
            return x.view(num_groups, -1, x.shape[1]).flip(1).reshape(x.shape)

        active_TK = None if active_TK is None else turned(active_TK)
        return turned(real(turned(expert_TK), active_TK, num_groups=num_groups, **rest))

    return wrong


def _behind_rank_0(real: Any) -> Any:
    """The tokens of every other rank queue for slots behind those of rank 0."""

    def wrong(expert_TK: Tensor, active_TK: Tensor | None, *, num_groups: int, **rest: Any) -> Tensor:
        def together(x: Tensor | None) -> Tensor | None:
            if x is None:
                return None
            theirs = x.long().clone()
            dist.broadcast(theirs, 0)
            pair = [part.view(num_groups, -1, x.shape[1]) for part in (theirs.to(x.dtype), x)]
            return torch.cat(pair, 1).flatten(0, 1)

        kept = real(together(expert_TK), together(active_TK), num_groups=num_groups, **rest).view(num_groups, 2, -1, expert_TK.shape[1])
        mine: Tensor = kept[:, 0 if dist.get_rank() == 0 else 1].reshape(expert_TK.shape)
        return mine

    return wrong


def _own_part(real: Any) -> Any:
    """Partial sums of ranks are cut, but not added."""
    return lambda x, axis: x.chunk(axis.size)[axis.index]


def _others_not_masked(real: Any) -> Any:
    """Choices of experts of all ranks are taken for choices of this rank's experts."""

    def wrong(self: Any, place_AK: Tensor, *, held: int) -> Any:
        return self.kernels.plan((place_AK - 1).clamp(min=0) % held, place_AK > 0, num_experts=held)

    return wrong


def _rows_of_all_ranks(real: Any) -> Any:
    """Each rank computes the choices of all ranks."""

    def wrong(self: Any, place_TK: Tensor, held: int) -> tuple[int, int, list[int]]:
        longest, most, rows_N = real(self, place_TK, held)
        return longest, most, [int(all_reduce((place_TK > 0).sum(), self.axis))] * len(rows_N)

    return wrong


def _seconds_from_the_start(real: Any) -> Any:
    """Second choices do not queue behind first choices, so an expert accepts up to its capacity of each."""

    def wrong(expert_TK: Tensor, active_TK: Tensor | None, **rest: Any) -> Tensor:
        def column(x: Tensor | None, k: int) -> Tensor | None:
            return None if x is None else x[:, k : k + 1]

        return torch.cat([real(column(expert_TK, k), column(active_TK, k), **rest) for k in range(expert_TK.shape[1])], 1)

    return wrong


def _negative_outranked(real: Any) -> Any:
    """Tokens with a negative logit for their expert are dropped, because tokens that did not choose it rank as if their logit were 0."""

    def wrong(self: Any, scores_TE: Tensor, logits_TE: Tensor, *shards: Any, **rest: Any) -> Any:
        made = real(self, scores_TE, logits_TE, *shards, **rest)
        if made.capacity is None:
            return made
        kept_TK = made.kept_TK & (logits_TE.gather(1, made.chosen.expert_TK) >= 0)
        return replace(made, kept_TK=kept_TK)

    return wrong


def _cut_off(real: Any) -> Any:
    return lambda x, weight: real(x.detach(), weight) if weight.shape[0] > 2 else real(x, weight)


def _jitter_in_place(real: Any) -> Any:
    """Jitter multiplies the layer's input in place, so experts also read the input with jitter."""

    def wrong(self: Any, x_BLD: Tensor, context: Any) -> Any:
        if self.router.spec.jitter:
            size = self.router.spec.jitter
            noise = context.uniform(f"{self.router.name}.jitter", x_BLD.shape[-1]).mul(2 * size).add(1 - size)
            x_BLD = x_BLD * noise.view_as(x_BLD)
        return real(self, x_BLD, context)

    return wrong


def _undisturbed(real: Any) -> Any:
    return lambda x_TD, uniform_TD, size: x_TD


def _added_to_logits(real: Any) -> Any:
    """The jitter factor, a number near 1, is added to the router's input instead of multiplied with it."""
    return lambda x_TD, uniform_TD, size: x_TD + uniform_TD * 2 * size + (1 - size)


def _made_one(real: Any) -> Any:
    """Gates are normalized to sum 1, so a top-1 gate is always 1."""

    def wrong(*args: Any, **rest: Any) -> Tensor:
        gate_TK: Tensor = real(*args, **rest)
        return gate_TK / gate_TK.sum(-1, keepdim=True).clamp(min=1e-20)

    return wrong


def _not_made_one(real: Any) -> Any:
    return lambda *args, spec, **rest: real(*args, spec=spec.model_copy(update={"gates": "as_is"}), **rest)


def _scaled_twice(real: Any) -> Any:
    return lambda *args, spec, **rest: real(*args, spec=spec, **rest) * spec.gate_scale


def _biased(real: Any) -> Any:
    """The selection bias, which should only affect the choice of experts, is added to the gates."""

    def wrong(self: Any, x_TD: Tensor, **rest: Any) -> Any:
        routing = real(self, x_TD, **rest)
        if self.bias_E is None:
            return routing
        return replace(routing, gate_TK=routing.gate_TK + self.bias_E[routing.expert_TK])

    return wrong


def _dropped_keep_input(real: Any) -> Any:
    """For a dropped token, the MoE layer returns its input times its gate instead of 0."""

    def wrong(self: Any, x_TD: Tensor, routing: Any, experts: Any, **rest: Any) -> Tensor:
        y_TD: Tensor = real(self, x_TD, routing, experts, **rest)
        dropped_T = ~routing.kept_TK.any(1)
        out_TD: Tensor = y_TD + x_TD * (routing.gate_TK.amax(1) * dropped_T).unsqueeze(1)
        return out_TD

    return wrong


def _pass_lost(real: Any) -> Any:
    """A dropped token is set to 0 in the residual stream."""

    def wrong(self: Any, x_BLD: Tensor, context: Any) -> Any:
        out_BLD, report = real(self, x_BLD, context)
        if self.moe is None:
            return out_BLD, report
        routing = self.moe.router(
            self.ffn_norm(x_BLD).flatten(0, 1).detach(), sequence_tokens=x_BLD.shape[1], context=replace(context, replay=None)
        )
        return out_BLD * routing.kept_TK.any(1).view(*x_BLD.shape[:2], 1), report

    return wrong


def _discarded(real: Any) -> Any:
    """The result of `join` is not used, so the auxiliary loss has no gradient."""

    def wrong(x: Tensor, loss: Tensor, *, scale: float) -> Tensor:
        real(x, loss, scale=scale)
        return x

    return wrong


def _twice(real: Any) -> Any:
    return lambda x, loss, *, scale: real(x, loss, scale=2 * scale)


def _without_share(real: Any) -> Any:
    """Each micro-batch adds the whole auxiliary loss instead of its share of the batch."""

    def wrong(*args: Any, **rest: Any) -> Any:
        return [replace(p, context=replace(p.context, auxiliary_scale=1.0)) for p in real(*args, **rest)]

    return wrong


def _joined_again(real: Any) -> Any:
    """The auxiliary loss counts in the first forward pass and again in the recomputed one."""

    def wrong(self: Any, x_BLD: Tensor, context: Any) -> Any:
        doubled = context if context.replay is None else replace(context, auxiliary_scale=2 * context.auxiliary_scale)
        return real(self, x_BLD, doubled)

    return wrong


def _too_small(real: Any) -> Any:
    """The balance loss over the global batch is divided by the number of ranks once too often."""

    def wrong(*args: Any, step: Any = None, **rest: Any) -> Tensor:
        loss: Tensor = real(*args, step=step, **rest)
        ranks = torch.distributed.get_world_size()
        return loss if step is None else loss / ranks

    return wrong


def _other_choices(real: Any) -> Any:
    """The load in the balance loss counts all choices, although the router's paper counts only first choices."""
    return lambda layer, spec, *rest: real(layer, spec.model_copy(update={"balance_counts": "all"}), *rest)


def _kept_alone(real: Any) -> Any:
    return lambda layer, spec, routing, *rest: real(layer, spec, replace(routing, counted_TK=routing.kept_TK), *rest)


def _local_share(real: Any) -> Any:
    """The balance loss uses this rank's load, although the loss is over the global batch."""

    def wrong(*args: Any, whole: Any, **rest: Any) -> Any:
        return real(*args, whole=lambda mine: mine, **rest)

    return wrong


def _z_of_noisy(real: Any) -> Any:
    """The z loss reads the logits with noise."""

    def wrong(self: Any, x_TD: Tensor, context: Any) -> Any:
        _, noisy_TE, chance_TE = real(self, x_TD, context)
        return noisy_TE, noisy_TE, chance_TE

    return wrong


def _own_gates(real: Any) -> Any:
    """The priority of a choice is its own gate, not its token's highest."""
    return lambda self, scores_TE, logits_TE, expert_TK, context: chosen_scores(scores_TE, logits_TE, expert_TK, spec=self.spec)


def _padding_counted(real: Any) -> Any:
    """Padding counts as tokens in the auxiliary losses."""

    def wrong(layer: int, spec: Any, routing: Any, *rest: Any) -> Any:
        return real(layer, spec, replace(routing, valid_T=None), *rest)

    return wrong


def _padding_routed(real: Any) -> Any:
    """Padding is routed and uses capacity, so real tokens are dropped."""

    def wrong(self: Any, scores_TE: Tensor, logits_TE: Tensor, *shards: Any, context: Any, **rest: Any) -> Any:
        return real(self, scores_TE, logits_TE, *shards, context=replace(context, valid_T=None), **rest)

    return wrong


def _one_round(real: Any) -> Any:
    """The hash has one round of multiply-xorshift instead of two."""
    return lambda x, spare: x.bitwise_xor_(torch.bitwise_right_shift(x, 16, out=spare).bitwise_and_(0xFFFF)).mul_(0x7FEB352D)


def _same_on_all(real: Any) -> Any:
    """Random numbers depend on a token's index on its rank instead of in the global batch, so all ranks draw the same."""

    def wrong(self: Any, name: str, width: int) -> Tensor:
        drawn: Tensor = real(replace(self, position_T=self.position_T - self.position_T[0]), name, width)
        return drawn

    return wrong


def _each_counts_alike(real: Any) -> Any:
    """The loss is the mean of the micro-batches' mean losses, although their numbers of tokens differ."""

    def wrong(x_BLD: Tensor, targets_BL: Tensor, matrix: Any, **rest: Any) -> Tensor:
        loss: Tensor = real(x_BLD, targets_BL, matrix, **rest)
        return loss * targets_BL.numel() / (targets_BL >= 0).sum().clamp(min=1)

    return wrong


def _decided_again(real: Any) -> Any:
    """A recomputed pass routes to other experts. Each expert has the same number of rows, because torch would detect other shapes."""
    seen: set[tuple[int, str, int, int]] = set()

    def wrong(self: Any, name: str, decide: Any) -> Any:
        if self.replay is None:
            return decide()
        key = (self.step, name, int(self.position_T[0]), torch.distributed.get_rank())
        made = decide()
        if key in seen:
            chosen = replace(made.chosen, expert_TK=made.chosen.expert_TK.roll(1, 0))
            return replace(made, chosen=chosen, kept_TK=made.kept_TK.roll(1, 0))
        seen.add(key)
        return made

    return wrong


def _first_run(real: Any) -> Any:
    """Every ep rank initializes its experts with the values of the first rank's experts."""

    def wrong(name: str, layout: Any, mesh: Any, within: Any = None) -> Any:
        for tensor in real(name, layout, mesh, within):
            yield tensor if tensor.entry is None else tensor._replace(name=layout.unstack.format(tensor.entry))

    return wrong


def _skips_without_slots(real: Any) -> Any:
    """Skip experts return also the tokens that got no slot."""
    return lambda self, x_TD, routing: real(self, x_TD, replace(routing, kept_TK=torch.ones_like(routing.kept_TK)))


def _shifted_dropout(real: Any) -> Any:
    """Dropout of experts with gates on their inputs uses the random numbers of the token before."""

    def wrong(dispatcher: Any, x_TD: Tensor, routing: Any, experts: Any, dropout: Any) -> Tensor:
        found: Tensor = real(dispatcher, x_TD, routing, experts, replace(dropout, position_T=dropout.position_T.roll(1)))
        return found

    return wrong


def _mean_of_own_tokens(real: Any) -> Any:
    """A user's balance loss is computed from this rank's loads and mean probabilities, although other ranks hold tokens of the groups."""
    return lambda *args, summed=None, **rest: real(*args, **rest)


def _padding_taken(real: Any) -> Any:
    return lambda scores_TE, *, valid_T, **rest: real(scores_TE, valid_T=None, **rest)


_ONE = Case("switch", "ddp", 1, 1, 1, "fp32")
_TWO = Case("switch", "ddp", 2, 1, 1, "fp32")
_GSHARD = Case("gshard", "ddp", 1, 1, 1, "fp32")
_DEEPSEEK = Case("deepseek", "ddp", 1, 1, 1, "fp32")
_DEEPSEEK_2 = Case("deepseek", "ddp", 2, 1, 1, "fp32")
_GLAM = Case("glam", "ddp", 1, 1, 1, "fp32", experts=8)
_RECOMPUTED = Case("switch", "ddp", 1, 1, 1, "fp32", "full")
_PADDED = Case("gshard", "ddp", 1, 1, 3, "fp32", padded=True)
_NOISY = Case("noisy_top_k", "ddp", 1, 1, 1, "fp32", experts=8)
_FREE = Case("free", "fsdp", 2, 1, 3, "fp32")
_KEPT = "moe.router.router:kept_choices"

MUTATIONS = (
    Mutation(
        "one_slot_too_many",
        "Each expert accepts one token more than its capacity: positions that count from 1 are compared as if they counted from 0",
        "no public report known to us; reasoned from arXiv 2101.03961, equation 3",
        "data",
        _ONE,
        (Edit(_KEPT, _one_more),),
    ),
    Mutation(
        "capacity_ignored",
        "No token is dropped, whatever the capacity factor",
        "deepspeedai/DeepSpeed#1658",
        "data",
        _ONE,
        (Edit(_KEPT, _no_capacity),),
    ),
    Mutation(
        "capacity_counts_choices_twice",
        "Capacity is computed from rows, which are tokens times choices, and multiplied by the number of choices again",
        "no public report known to us; reasoned from databricks/megablocks: layers/moe.py, parallel_forward_once, which counts rows that "
        "were copied for each choice",
        "data",
        _DEEPSEEK,
        (Edit("moe.router.router:slots_of", _choices_twice),),
    ),
    Mutation(
        "dropped_by_chance_of_a_sort",
        "Dropping by position uses a top-k over equal values, which may keep any of them",
        "no public report known to us; reasoned from deepspeedai/DeepSpeed: moe/sharded_moe.py, top1gating, a top-k over a mask",
        "data",
        _ONE,
        (Edit(_KEPT, _last_come_first),),
    ),
    Mutation(
        "tokens_of_rank_0_take_slots",
        "Slots are counted with another rank's tokens, so a rank's outputs depend on the samples of another one",
        "NVIDIA-NeMo/Megatron-Bridge#4635",
        "data",
        _TWO,
        (Edit(_KEPT, _behind_rank_0),),
    ),
    Mutation(
        "outputs_not_summed_over_ep",
        "With any ep above 1, a token gets the outputs of its own rank's experts only",
        "huggingface/transformers#45473",
        "expert",
        Case("glam", "ddp", 2, 2, 1, "fp32", rows="all_gather", experts=8),
        (Edit("parallel.mesh.collectives:reduce_scatter", _own_part),),
    ),
    Mutation(
        "other_ranks_experts_not_masked",
        "Each rank also computes the choices of other ranks' experts, with its own: the mask that removes them is never applied (in the "
        "report, results of other ranks' experts stayed in the sum as they were in memory)",
        "huggingface/transformers#48201",
        "expert",
        Case("glam", "ddp", 2, 2, 1, "fp32", rows="all_gather", experts=8),
        (
            Edit("moe.experts.dispatch.all_gather:Gathered._plan_held", _others_not_masked),
            Edit("moe.experts.dispatch.all_gather:Gathered._agree", _rows_of_all_ranks),
        ),
    ),
    Mutation(
        "second_choices_queue_from_the_start",
        "Positions are counted along the wrong dim: second choices do not queue behind first ones, and an expert gets too many tokens",
        "huggingface/transformers#48293",
        "expert",
        _GLAM,
        (Edit(_KEPT, _seconds_from_the_start),),
    ),
    Mutation(
        "negative_logits_outranked",
        "Tokens that did not choose an expert are ranked with logit 0, so a token with a negative logit loses its slot",
        "deepspeedai/DeepSpeed#7986",
        "expert",
        Case("megatron", "ddp", 1, 1, 1, "fp32", experts=8),
        (Edit("moe.router.router:Router.decide", _negative_outranked),),
    ),
    Mutation(
        "router_input_without_gradient",
        "The router's input is detached, so layers below get no gradient from the router",
        "NVIDIA-NeMo/Automodel#2995",
        "data",
        _ONE,
        (Edit("moe.router.router:linear_fp32", _cut_off),),
    ),
    Mutation(
        "jitter_reaches_the_experts",
        "Jitter is written into the layer's input, so experts read it too",
        "huggingface/transformers#33969",
        "data",
        _ONE,
        (Edit("moe.experts.layer:MoELayer.forward", _jitter_in_place), Edit("moe.router.router:jittered", _undisturbed)),
    ),
    Mutation(
        "jitter_added",
        "Jitter, a number near 1, is added instead of multiplied",
        "no public report known to us; reasoned from laekov/fastmoe: gates/switch_gate.py, against arXiv 2101.03961, appendix",
        "data",
        _ONE,
        (Edit("moe.router.router:jittered", _added_to_logits),),
    ),
    Mutation(
        "top_1_gate_made_one",
        "A top-1 gate is divided by itself, so the router learns nothing from the model's loss",
        "jingyaogong/minimind#858",
        "data",
        _ONE,
        (Edit("moe.router.router:chosen_gates", _made_one),),
    ),
    Mutation(
        "gates_not_made_one",
        "The gates of a normalizing router are not normalized",
        "sgl-project/sglang#31449",
        "data",
        _DEEPSEEK,
        (Edit("moe.router.router:chosen_gates", _not_made_one),),
    ),
    Mutation(
        "gate_scale_twice",
        "The gate scale is applied in the router and again after it",
        "sgl-project/sglang#35152",
        "data",
        _DEEPSEEK,
        (Edit("moe.router.router:chosen_gates", _scaled_twice),),
    ),
    Mutation(
        "bias_in_the_gates",
        "The selection bias is added to the gates as well as to the scores that choose",
        "vllm-project/vllm#12002",
        "data",
        _DEEPSEEK,
        (Edit("moe.router.router:Router.forward", _biased),),
    ),
    Mutation(
        "dropped_tokens_weighted",
        "A token without a slot returns its input times a gate instead of zero",
        "huggingface/transformers#37017",
        "data",
        _ONE,
        (Edit("moe.experts.dispatch.dispatcher:Local.run", _dropped_keep_input),),
    ),
    Mutation(
        "dropped_tokens_lose_their_residual",
        "A token without a slot is zero after the layer: its residual is lost too",
        "huggingface/transformers#37123",
        "data",
        _ONE,
        (Edit("moe.model.transformer:Block._second", _pass_lost),),
    ),
    Mutation(
        "auxiliary_loss_discarded",
        "The result of the function that attaches the auxiliary loss is not used, so the loss has no gradient",
        "NVIDIA-NeMo/Automodel#1408",
        "data",
        _ONE,
        (Edit("moe.experts.layer:join", _discarded),),
    ),
    Mutation(
        "auxiliary_loss_twice",
        "The auxiliary loss is added in the layer and again in the sum of losses",
        "huggingface/trl#4070",
        "data",
        _ONE,
        (Edit("moe.experts.layer:join", _twice),),
    ),
    Mutation(
        "auxiliary_loss_grows_with_microbatches",
        "Every micro-batch adds a whole auxiliary loss",
        "NVIDIA-NeMo/Automodel#3359",
        "data",
        Case("switch", "ddp", 1, 1, 3, "fp32"),
        (Edit("moe.train.loop.step:passes_of", _without_share),),
    ),
    Mutation(
        "auxiliary_loss_twice_under_recompute",
        "The load-balancing loss counts in the first forward pass and again in the recomputed one",
        "NVIDIA/Megatron-LM#1330, where it affected the reported loss",
        "data",
        _RECOMPUTED,
        (Edit("moe.experts.layer:MoELayer.forward", _joined_again),),
    ),
    Mutation(
        "global_balance_too_small",
        "The balance loss over the global batch is divided by the data ranks once more",
        "NVIDIA/Megatron-LM#3672",
        "data",
        _DEEPSEEK_2,
        (Edit("moe.experts.layer:balance_loss", _too_small),),
    ),
    Mutation(
        "load_of_one_rank",
        "A balance loss over the global batch uses each rank's own load",
        "Qiu et al., arXiv 2501.11873",
        "data",
        _DEEPSEEK_2,
        (Edit("moe.experts.layer:step_means", _local_share),),
    ),
    Mutation(
        "balance_after_dropping",
        "The load in the balance loss counts kept instead of chosen tokens, so full experts never exceed their capacity",
        "NVIDIA/Megatron-LM#1513",
        "data",
        _ONE,
        (Edit("moe.experts.layer:_losses", _kept_alone),),
    ),
    Mutation(
        "all_choices_count_as_load",
        "Second choices count as load, although the paper counts first choices only",
        "deepspeedai/DeepSpeed#2551",
        "data",
        _GSHARD,
        (Edit("moe.experts.layer:_losses", _other_choices),),
    ),
    Mutation(
        "z_loss_of_noisy_logits",
        "With noisy top-k routing, the z loss reads the logits after the noise",
        "no public report known to us; reasoned from ST-MoE, arXiv 2202.08906, equation 5, and arXiv 1701.06538, equation 4",
        "expert",
        _NOISY,
        (Edit("moe.router.router:Router._logits", _z_of_noisy),),
    ),
    Mutation(
        "choices_dropped_by_their_own_gates",
        "First choices are ranked by their token's highest gate, but second choices by their own",
        "no public report known to us; reasoned from V-MoE, arXiv 2106.05974, section 4.1",
        "expert",
        _NOISY,
        (Edit("moe.router.router:Router._priority", _own_gates),),
    ),
    Mutation(
        "padding_in_the_balance_loss",
        "Padding counts as tokens in the auxiliary losses",
        "huggingface/transformers#29363",
        "data",
        _PADDED,
        (Edit("moe.experts.layer:_losses", _padding_counted),),
    ),
    Mutation(
        "padding_takes_slots",
        "Padding is routed, and real tokens are dropped because of it",
        "NVIDIA/Megatron-LM#5542",
        "data",
        _PADDED,
        (Edit("moe.router.router:Router.decide", _padding_routed),),
    ),
    Mutation(
        "noise_equal_on_ranks",
        "Every data rank draws the same random numbers",
        "huggingface/transformers#31412",
        "data",
        _TWO,
        (Edit("moe.nn.context:Context.uniform", _same_on_all),),
    ),
    Mutation(
        "hash_of_one_round",
        "The hash of random numbers mixes once instead of twice",
        "no public report known to us; reasoned from skeeto/hash-prospector: its hash of two rounds",
        "data",
        _ONE,
        (Edit("parallel.numerics.random:_mix", _one_round),),
    ),
    Mutation(
        "microbatches_count_alike",
        "Losses of micro-batches are averaged although their numbers of tokens differ",
        "huggingface/transformers#34191; ml-explore/mlx-lm#1413",
        "data",
        _PADDED,
        (Edit("moe.model.transformer:summed_loss", _each_counts_alike),),
    ),
    Mutation(
        "replicas_count_alike",
        "Auxiliary losses of the replicas of one process are averaged although their numbers of tokens differ",
        "no public report known to us; reasoned from huggingface/transformers#34191, there in micro-batches",
        "data",
        Case("deepseek", "dp", 1, 1, 3, "fp32", padded=True),
        (Edit("moe.parallelize.engines:_shares", lambda real: lambda args, count: [1 / count] * count),),
    ),
    Mutation(
        "routing_not_replayed",
        "A recomputed pass routes again and chooses other experts than the first pass",
        "pytorch/torchtitan#1117",
        "data",
        _RECOMPUTED,
        (Edit("moe.nn.context:Context.once", _decided_again),),
    ),
    Mutation(
        "every_rank_holds_the_first_experts",
        "Each rank of the ep axis loads the first chunk of experts",
        "deepspeedai/DeepSpeed#6589",
        "data",
        Case("switch", "ddp", 2, 2, 1, "fp32"),
        (Edit("moe.model.initialize:stored", _first_run),),
    ),
    Mutation(
        "skip_experts_ignore_slots",
        "Skip experts return also the tokens that they dropped",
        "no public report known to us; reasoned from LongCat-Flash, arXiv 2509.01322, section 2.1",
        "data",
        _FREE,
        (Edit("moe.experts.layer:MoELayer._skipped", _skips_without_slots),),
    ),
    Mutation(
        "dropout_of_other_tokens",
        "With gates on the experts' inputs, dropout uses the random numbers of other tokens",
        "no public report known to us; reasoned from PaddlePaddle/PaddleFleetX#1005, there in slices",
        "data",
        _FREE,
        (Edit("moe.experts.layer:_run_on_scaled_inputs", _shifted_dropout),),
    ),
    Mutation(
        "padding_chosen_by_experts",
        "Experts that choose tokens also choose padding",
        "no public report known to us; reasoned from NVIDIA/Megatron-LM#5542, there in tokens that choose",
        "expert",
        Case("expert_choice", "ddp", 1, 1, 3, "fp32", experts=8, padded=True),
        (Edit("moe.router.methods.expert_choice:expert_choice", _padding_taken),),
    ),
    Mutation(
        "own_balance_of_own_tokens",
        "A user's balance loss sees the loads and mean probabilities of one rank's tokens, although other ranks hold tokens of its groups",
        "no public report known to us; reasoned from NVIDIA/Megatron-LM: moe_utils.py, switch_load_balancing_loss_func, whose callers sum "
        "over the ranks that share a sequence",
        "sequence",
        Case("own_balance", "ddp", 2, 2, 3, "fp32", "full", sp=2, padded=True, length=SLICED),
        (Edit("moe.experts.layer:own_balance_loss", _mean_of_own_tokens),),
    ),
)
