"""Predicted memory: published parameter counts, Korthikanti's closed forms, micro-batches in flight, and laws of sharding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from moe.plan.job.counts import even, held, parameters, stages_of
from moe.plan.job.in_flight import in_flight
from moe.plan.job.network import Experts, Latent, Network, Plan
from moe.plan.job.states import FP32, MIXED, MIXED_FP32_GRADIENTS
from moe.plan.memory.kept import layer_kept, layer_parts, layer_pending
from moe.plan.memory.memory import CONTEXT_BYTES, MOST_STARTED, memory, peak
from moe.plan.memory.stack import OURS, OURS_ON_CPU
from parallel.data import buckets
from parallel.mesh import gradients
from parallel.pipeline.schedule import Action, Op
from parallel.pipeline.schedules import SCHEDULES, make_schedule
from parallel.pipeline.schedules.kind import Size
from parallel.pipeline.simulator.held import peak_held, peak_kept, weight_versions
from tests.planner.software import MEGATRON, MEGATRON_2022

GPT = Network(layers=12, width=96, heads=6, hidden=384, vocab=640, length=32, dropout=True)
LLAMA = {"norm": "rmsnorm", "gated": True, "tied": False}
PUBLISHED = {  # name -> (printed number of parameters in 10^9, network)
    "GPT-3": (174.6, Network(96, 12288, 96, 4 * 12288, 51200, 2048, biases=True, norm="layernorm", learned_positions=True)),
    "Llama 3 8B": (8.03, Network(32, 4096, 32, 14336, 128256, 8192, kv_heads=8, **LLAMA)),
    "Llama 3 405B": (405.9, Network(126, 16384, 128, 53248, 128256, 8192, kv_heads=8, **LLAMA)),
    "Mixtral 8x7B": (46.7, Network(32, 4096, 32, 14336, 32000, 4096, kv_heads=8, experts=Experts(8, 2, 14336, True), **LLAMA)),
    "Qwen3 235B": (235.1, Network(94, 4096, 64, 1536, 151936, 4096, 4, 128, experts=Experts(128, 8, 1536, True), **LLAMA)),
    "DeepSeek-V3": (
        671.0,
        Network(
            *(61, 7168, 128, 18432, 129280, 4096, None, 128),
            experts=Experts(256, 8, 2048, True, shared_hidden=2048),
            latent=Latent(1536, 512, 64, 128),
            **LLAMA,
        ),
    ),
}


def with_layers(network: Network, name: str) -> Network:
    """Return the network with experts in all layers, for DeepSeek-V3 from the fourth layer on; a dense network unchanged."""
    return replace(network, sparse_layers=tuple(range(3 if "V3" in name else 0, network.layers)) if network.experts else ())


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_published(name: str) -> None:
    billions, network = PUBLISHED[name]
    assert parameters(with_layers(network, name)) / 1e9 == pytest.approx(billions, rel=2e-3)


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize(("tp", "pp", "ep", "etp"), [(1, 1, 1, 1), (2, 1, 4, 1), (4, 8, 2, 2), (8, 4, 8, 1)])
def test_ranks_hold_the_whole_model_once_but_for_copies(name: str, tp: int, pp: int, ep: int, etp: int) -> None:
    network = with_layers(PUBLISHED[name][1], name)
    plan = Plan(dp=16, tp=tp, pp=pp, ep=ep if network.experts else 1, etp=etp if network.experts else 1)
    stages = stages_of(network, plan, pp)
    ranks = [held(network, plan, stages, (stage,)) for stage in range(pp)]
    whole = sum(tp * r.dense + plan.ep * plan.etp * r.expert for r in ranks)
    copies = network.vocab * network.width if network.tied and pp > 1 else 0
    assert parameters(network) + copies <= whole + 1 < (parameters(network) + copies) * 1.05  # every tp rank has norms, routers, latents


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_head_in_a_stage_of_its_own_moves_its_bytes_there(name: str) -> None:
    """Bytes of weights, gradients and optimizer states of the last two stages add up to those of one stage with layers and head. Only the
    stage with the head has logits."""
    network = with_layers(PUBLISHED[name][1], name)
    middle = network.layers // 2
    at_work = Plan(pp=3, microbatches=6, stage_layers=(middle, network.layers - middle, 0))
    joined = Plan(pp=2, microbatches=6, stage_layers=(middle, network.layers - middle))
    alone, both = memory(network, at_work), memory(network, joined)
    for part in ("parameters", "gradients", "optimizer"):
        assert alone[1].parts[part] + alone[2].parts[part] == pytest.approx(both[1].parts[part])
    assert alone[0].parts["activations"] == pytest.approx(both[0].parts["activations"] * 3 / 2)  # one more micro-batch in flight
    assert alone[2].parts["activations"] == 0 == alone[2].parts["layer at work"] < alone[2].parts["loss and logits"]
    inputs = 2 * network.width * network.length  # bytes of a stage's input in 16 bits
    assert alone[1].parts["loss and logits"] == 0  # no logits, and the first norm keeps the stage's input itself
    copied = memory(network, at_work, OURS_ON_CPU)  # norms keep an fp32 copy, in addition to the inputs of two micro-batches in flight
    assert copied[1].parts["loss and logits"] == 2 * inputs
    first = memory(network, Plan(pp=3, microbatches=6, stage_layers=(0, middle, network.layers - middle)))[0]
    assert first.parts["activations"] == 0 and first.parts["parameters"] < 0.5 * both[0].parts["parameters"]


def test_with_stages_the_host_has_a_part_of_the_optimizer_and_the_device_all_gradients() -> None:
    network = PUBLISHED["GPT-3"][1]
    plan = Plan(dp=8, pp=4, engine="zero1", microbatches=8)
    bucket = OURS.bucket_elements * OURS.bucket_bytes  # DeepSpeed's
    for here, off in zip(memory(network, plan), memory(network, replace(plan, offload_optimizer="cpu")), strict=True):
        assert off.parts == here.parts | {"optimizer": 0.0, "gradient buckets": bucket}
        assert off.host == pytest.approx({"optimizer": here.parts["optimizer"], "gradients": here.parts["gradients"] / 8})


def test_uneven_stages_take_from_the_ends() -> None:
    assert even(8, 4) == (2, 2, 2, 2)
    assert even(126, 8) == (15, *[16] * 6, 15)  # the cut of Llama 3 405B
    assert even(70, 12) == (5, *[6] * 10, 5)  # the cut of BLOOM
    assert sum(even(77, 12)) == 77 and min(even(77, 12)) == 6


# --- activations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("t", [1, 2, 8])
@pytest.mark.parametrize(("tensor", "recompute"), [("1d", "none"), ("1d", "selective"), ("sliced", "none"), ("sliced", "selective")])
def test_a_layer_keeps_what_korthikanti_table_2_says(t: int, tensor: str, recompute: str) -> None:
    s, b, h, a = 64, 3, 96, 8
    network = Network(layers=1, width=h, heads=a, hidden=4 * h, vocab=100, length=s, dropout=True)
    plan = Plan(tp=t, tensor=tensor, microbatch=b, recompute=recompute)  # type: ignore[arg-type]
    scores = 0 if recompute == "selective" else 5 * a * s / (h * t)
    want = s * b * h * (10 + 24 / t + scores) if tensor == "1d" else s * b * h * (34 / t + scores)
    assert layer_kept(network, plan, MEGATRON_2022, 0, plan.recompute) == pytest.approx(want)
    assert layer_kept(network, plan, MEGATRON_2022, 0, "full") == 2 * s * b * h / (t if tensor == "sliced" else 1)


def test_sequence_parallel_ranks_and_grids_cut_everything() -> None:
    whole = sum(layer_parts(GPT, Plan(microbatch=2), MEGATRON, 0).values())
    assert sum(layer_parts(GPT, Plan(microbatch=2, sp=4), MEGATRON, 0).values()) == pytest.approx(whole / 4)
    for kind, depth in (("2d", 1), ("2.5d", 2), ("3d", 2)):
        plan = Plan(microbatch=2, tp=8 if kind != "2d" else 4, tensor=kind, depth=depth)  # type: ignore[arg-type]
        assert sum(layer_parts(GPT, plan, MEGATRON, 0).values()) == pytest.approx(whole / plan.tp)


def test_experts_keep_rows_by_choices_and_capacity() -> None:
    sparse = replace(GPT, experts=Experts(8, 2, 48, gated=True), sparse_layers=(0,))
    tokens, rows = 2 * 32, 2 * 2 * 32
    assert layer_parts(sparse, Plan(microbatch=2), MEGATRON, 0)["experts"] == rows * 2 * (96 + 3 * 48) + tokens * (8 * 8 + 8 * 2)
    padded = replace(sparse, experts=Experts(8, 2, 48, gated=True, rows=1.5))
    assert layer_parts(padded, Plan(microbatch=2), MEGATRON, 0)["experts"] == 1.5 * rows * 2 * (96 + 3 * 48) + tokens * (8 * 8 + 8 * 2)


@pytest.mark.parametrize(("itemsize", "documents", "repeated"), [(2, False, False), (2, True, True), (4, False, True), (4, True, True)])
def test_keys_are_repeated_where_flash_attention_does_not_run(itemsize: int, documents: bool, repeated: bool) -> None:
    """moe/nn/core.py repeats keys and values of grouped heads on a GPU with a mask or in fp32. 64 tokens, 6 query heads of 16 channels."""
    grouped = replace(GPT, kv_heads=2, dropout=False, documents=documents)
    ungrouped, plan = replace(grouped, kv_heads=6), Plan(microbatch=2, compute_bytes=itemsize)
    keys = [layer_parts(network, plan, OURS, 0)["attention"] for network in (grouped, ungrouped)]
    assert keys[1] - keys[0] == (0 if repeated else 64 * 2 * (6 - 2) * 16 * itemsize)


# --- schedules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 12), (4, 24)])
def test_in_flight_is_that_of_the_whole_order(name: str, ranks: int, microbatches: int) -> None:
    chunks = {"interleaved": 3, "looped_bfs": 2}.get(name)
    whole = make_schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
    found = in_flight(name, ranks=ranks, microbatches=microbatches, chunks=chunks or 1)
    for rank, of in enumerate(found):
        assert of.stages == whole.stages_of(rank)
        for weigh in (lambda s: 1.0, lambda s: 1.0 + 7.0 * (s == 0), lambda s: 1.0 + 3.0 * s):  # equal and unequal bytes per stage
            want = peak_held(whole, weigh)[rank]
            assert max(sum(n * weigh(s) for n, s in zip(most, of.stages, strict=True)) for most in of.most) == want
    if whole.num_updates > 1:
        assert tuple(of.versions for of in found) == weight_versions(whole)


@pytest.mark.parametrize("name", [name for name, kind in SCHEDULES.items() if kind.splits_backward])
def test_micro_batches_before_and_after_i_are_those_of_the_same_moment(name: str) -> None:
    """If bytes between I and W are many times those before, a peak of its own for each of both would be above the peak of the order."""
    for kept, pending in ((1.0, 7.0), (1.0, 1.0), (5.0, 1.0)):
        whole = make_schedule(name, ranks=4, microbatches=16)
        wanted = peak_kept(whole, lambda stage, size=kept: size, lambda stage, size=pending: size)
        for of, want in zip(in_flight(name, ranks=4, microbatches=16), wanted, strict=True):
            found = max(sum(one.kept) * kept + sum(one.pending) * pending + one.at_i * max(0.0, pending - kept) for one in of.with_i)
            assert found == want


@pytest.mark.parametrize("name", [name for name, kind in SCHEDULES.items() if kind.splits_backward])
def test_gathered_weights_are_those_of_the_same_moment(name: str) -> None:
    """FSDP has gathered a stage's weights if the last of its actions F, B and I was F. A micro-batch of a stage takes 1 byte."""
    whole = make_schedule(name, ranks=4, microbatches=16)
    for order, of in zip(whole.orders, in_flight(name, ranks=4, microbatches=16), strict=True):
        for weights in (0.5, 9.0):
            kept, last, want = dict.fromkeys(of.stages, 0), dict.fromkeys(of.stages, Op.B), 0.0
            for op, stage, *_ in order:
                if op in (Op.F, Op.B, Op.I):
                    kept[stage] += 1 if op is Op.F else -1
                    last[stage] = op
                    want = max(want, sum(kept.values()) + weights * sum(op is Op.F for op in last.values()))
            assert max(sum(one.kept) + weights * one.freed.count(False) for one in of.with_i) == want


@pytest.mark.parametrize("name", [name for name, kind in SCHEDULES.items() if kind.splits_backward])
def test_gradients_are_those_of_the_same_moment(name: str) -> None:
    """A stage's first I makes the gradient of its embedding, and its first B or W all others. sizes: bytes of these two, and of a
    micro-batch in flight on a rank's first and on its last stage."""
    whole = make_schedule(name, ranks=4, microbatches=16)
    for order, of in zip(whole.orders, in_flight(name, ranks=4, microbatches=16), strict=True):
        for sizes in ((0.5, 0.0, 1.0, 1.0), (9.0, 0.0, 1.0, 1.0), (0.0, 9.0, 1.0, 1.0), (2.0, 3.0, 1.0, 5.0), (0.0, 9.0, 5.0, 0.0)):
            (table, others, *_), weights = sizes, {of.stages[0]: sizes[2], of.stages[-1]: sizes[3]}
            want = 0.0
            for end, (op, *_) in enumerate(order):
                if op in (Op.B, Op.I):
                    ended = {s: {a.op for a in order[:end] if a.stage == s} for s in of.stages}
                    kept = sum(weights[a.stage] * ((a.op is Op.F) - (a.op in (Op.B, Op.I))) for a in order[:end])
                    made = sum(table * bool(ops & {Op.B, Op.I}) + others * bool(ops & {Op.B, Op.W}) for ops in ended.values())
                    want = max(want, kept + made)
            found = [
                sum(n * weights[s] + table * (g > 0) + others * (g > 1) for n, s, g in zip(one.kept, of.stages, one.gradients, strict=True))
                for one in of.with_i
            ]
            assert max(found) == want


def test_w_of_frozen_shared_experts_needs_nothing() -> None:
    network = with_layers(replace(PUBLISHED["DeepSeek-V3"][1], frozen=("dense",)), "V3")
    assert network.experts is not None
    without = replace(network, experts=replace(network.experts, shared_hidden=0))
    assert layer_pending(network, Plan(), OURS, 3) == layer_pending(without, Plan(), OURS, 3) > 0


@pytest.mark.parametrize("name", [name for name, kind in SCHEDULES.items() if kind.batches == 1 and kind.placed != "both_ways"])
def test_in_flight_of_a_short_step_equals_that_of_a_long_step(name: str) -> None:
    """`in_flight` counts in a short step. The long step is counted here, also for micro-batches that the ranks do not divide."""
    for ranks, microbatches in ((2, 5), (3, 7), (3, 20), (5, 14)):
        microbatches = SCHEDULES[name].update_every or microbatches
        whole = make_schedule(name, ranks=ranks, microbatches=microbatches)
        plain = [moments(order, whole.stages_of(rank)) for rank, order in enumerate(whole.orders)]
        found = in_flight(name, ranks=ranks, microbatches=microbatches, chunks=SCHEDULES[name].chunks or 2)
        assert [set(of.most) for of in found] == plain


def moments(order: Sequence[Action], stages: tuple[int, ...]) -> set[tuple[int, ...]]:
    """Return the numbers of kept micro-batches for each stage, at all moments that no other moment exceeds (Pareto front)."""
    seen, now = set(), dict.fromkeys(stages, 0)
    for action in order:
        now[action.stage] += {Op.F: 1, Op.B: -1, Op.W: -1}.get(action.op, 0)
        seen.add(tuple(now.values()))
    return {one for one in seen if not any(two != one and all(a <= b for a, b in zip(one, two, strict=True)) for two in seen)}


def test_in_flight_closed_forms() -> None:
    p, m, v = 4, 16, 3
    assert [of.most for of in in_flight("1f1b", ranks=p, microbatches=m)] == [((p - i,),) for i in range(p)]
    assert [of.most for of in in_flight("gpipe", ranks=p, microbatches=m)] == [((m,),)] * p
    chunks = [max(map(sum, of.most)) for of in in_flight("interleaved", ranks=p, microbatches=m, chunks=v)]
    assert chunks == [min(2 * (p - i - 1) + (v - 1) * p + 1, m * v) for i in range(p)]  # Megatron-LM's warm-up, and one more


@pytest.mark.parametrize(
    ("ranks", "chunks", "microbatches"), [*((4, 2, m) for m in (3, 5, 6, 7, 11, 13, 18, 27)), (3, 2, 11), (2, 3, 7), (4, 3, 23), (5, 3, 34)]
)
def test_in_flight_of_interleaved_with_a_last_round_of_fewer_micro_batches(ranks: int, chunks: int, microbatches: int) -> None:
    """The peak equals that of the whole step, for equal and for several unequal bytes per stage."""
    whole = make_schedule("interleaved", ranks=ranks, microbatches=microbatches, chunks=chunks)
    found = in_flight("interleaved", ranks=ranks, microbatches=microbatches, chunks=chunks)
    for weigh in (lambda s: 1.0, lambda s: 1.0 + 7.0 * (s == 0), lambda s: 1.0 + 3.0 * s, lambda s: 20.0 - s):
        most = [max(sum(n * weigh(s) for n, s in zip(one, of.stages, strict=True)) for one in of.most) for of in found]
        assert most == pytest.approx(peak_held(whole, weigh))


# --- memory of a rank -------------------------------------------------------------------------------------------------


def test_states_of_each_engine() -> None:
    network, elements = replace(GPT, tied=True), parameters(GPT)
    want = {"ddp": 16 * elements, "zero1": (4 + 12 / 8) * elements, "zero2": (2 + 14 / 8) * elements, "zero3": 16 / 8 * elements}
    for engine, size in want.items():
        parts = peak(network, Plan(dp=8, engine=engine, storage=MIXED), MEGATRON).parts  # type: ignore[arg-type]
        assert sum(parts[name] for name in ("parameters", "gradients", "optimizer")) == pytest.approx(size)


def test_offloaded_parts_go_to_the_host() -> None:
    plan = Plan(dp=4, engine="zero3", storage=MIXED_FP32_GRADIENTS)
    on_device = peak(GPT, plan, MEGATRON)
    half = peak(GPT, replace(plan, offload_optimizer="cpu"), MEGATRON)
    whole = peak(GPT, replace(plan, offload_optimizer="cpu", offload_parameters="cpu"), MEGATRON)
    assert on_device.host == {} and set(half.host) == {"gradients", "optimizer"} and set(whole.host) == {"parameters", *half.host}
    for moved in (half, whole):
        assert moved.allocated + sum(moved.host.values()) == pytest.approx(on_device.allocated)
    assert peak(GPT, replace(plan, offload_activations=1.0), MEGATRON).parts["activations"] == 0


def test_tiles_and_resharding_bound_what_is_gathered() -> None:
    plan = Plan(dp=4, engine="zero3", storage=MIXED)
    network = replace(GPT, vocab=8)

    def gathered(p: Plan) -> float:
        return peak(network, p, MEGATRON).parts["gathered layers"]

    assert gathered(replace(plan, tiles=4)) < gathered(plan) < gathered(replace(plan, reshard=False))
    assert gathered(replace(plan, reshard=False)) - 6 * (12 * 96**2 + 2 * 96) == pytest.approx(2 * parameters(network))


def test_memory_grows_and_shrinks_as_it_should() -> None:
    plan = Plan(dp=2, tp=2, pp=4, microbatch=2, microbatches=8)
    base = peak(GPT, plan).allocated
    assert peak(GPT, replace(plan, microbatch=4)).allocated > base > peak(GPT, replace(plan, tensor="sliced")).allocated
    assert base > peak(GPT, replace(plan, recompute="selective")).allocated > peak(GPT, replace(plan, recompute="full")).allocated
    assert peak(GPT, replace(plan, schedule="gpipe")).allocated > base
    assert [m.rank for m in memory(GPT, plan)] == [0, 1, 2, 3]
    assert peak(GPT, plan, OURS).parts["activations"] > 0


def test_used_bytes_have_room_for_the_allocator_and_the_context() -> None:
    needed = peak(GPT, Plan())
    assert needed.used == pytest.approx(1.1 * needed.allocated + CONTEXT_BYTES)


# --- moments of a step at which memory may be at its peak -------------------------------------------------------------


WIDE_VOCABULARY = replace(GPT, vocab=20_000, dropout=False)


def test_the_peak_has_logits_or_recomputed_activations_but_not_both() -> None:
    """The backward pass of a micro-batch's layers begins after its logits are freed."""
    plan = Plan(microbatch=4, recompute="full", microbatches=3)
    of_loss, of_layers = (peak(network, plan, OURS).parts for network in (WIDE_VOCABULARY, replace(WIDE_VOCABULARY, vocab=64)))
    logits = 4 * 32 * 20_000
    assert of_loss["layer at work"] == 0 and of_loss["loss and logits"] > 12 * logits
    assert of_layers["layer at work"] > 0 and of_layers["loss and logits"] < 4 * 32 * 64 * 4 + 2 * 4 * 32 * 96


def test_gradients_outside_of_buckets_exist_only_after_a_backward_pass() -> None:
    """At the loss of the only micro-batch, DDP's buckets hold dense gradients, and experts' do not exist; at the second loss all exist."""
    sparse = replace(WIDE_VOCABULARY, experts=Experts(8, 2, 48), sparse_layers=(0, 3, 7))
    plan = Plan(dp=4, ep=2, microbatch=4, microbatches=1, storage=FP32)
    held_here = held(sparse, plan, (range(12),), (0,))
    once, twice = peak(sparse, plan, OURS), peak(sparse, replace(plan, microbatches=2), OURS)
    assert once.parts["gradients"] == 4 * held_here.dense and twice.parts["gradients"] == 4 * held_here.total
    assert twice.allocated - once.allocated == pytest.approx(4 * held_here.expert)
    assert peak(sparse, replace(plan, ep=1), OURS).parts["gradients"] == 4 * parameters(sparse)  # buckets hold all gradients
    no_bucket = replace(OURS, bucket_elements=0)
    assert peak(sparse, replace(plan, engine="zero1"), no_bucket).parts["gradients"] == 0
    assert peak(sparse, plan, MEGATRON).parts["gradients"] == 4 * held_here.total  # Megatron-LM's own buffers are never freed


@pytest.mark.parametrize("pp", (1, 2))
def test_zero_1_holds_as_many_buckets_as_its_engine_sums_at_the_same_time(pp: int) -> None:
    """With few activations the peak is after the backward pass: copies of all gradients, up to the engine's largest number of buckets."""
    assert MOST_STARTED == buckets._MOST_STARTED and OURS.bucket_elements == gradients._BUCKET_ELEMENTS
    plan = Plan(dp=2, pp=pp, microbatches=2 * pp, engine="zero1", storage=FP32, compute_bytes=4)
    for network in (replace(GPT, length=1, dropout=False, width=1536, hidden=6144), replace(GPT, length=1, dropout=False)):
        found = peak(network, plan, OURS)
        trained = found.parts["gradients"] / 4
        copies = min(trained, MOST_STARTED * gradients._BUCKET_ELEMENTS)
        assert found.parts["gradient buckets"] == 4 * copies
    least = OURS.bucket_elements * OURS.bucket_bytes  # DeepSpeed's bucket, during the pass
    assert peak(network, replace(plan, engine="zero2", pp=1), OURS).parts["gradient buckets"] == least


def test_with_few_activations_the_peak_is_the_end_of_the_backward_pass() -> None:
    """Then almost all gradients exist, and almost all activations are freed. (One micro-batch of one token.)"""
    once = peak(replace(GPT, length=1, dropout=False), Plan(pp=1, storage=FP32), OURS)
    assert once.parts["gradients"] > 0.9 * 4 * parameters(GPT) and once.parts["activations"] < 0.2 * once.parts["gradients"]


def test_before_any_backward_pass_of_the_step_stages_have_no_gradients() -> None:
    """gpipe's peak is before its first backward pass; 1f1b's peak is after backward passes of other micro-batches."""
    plan = Plan(pp=3, microbatch=8, microbatches=6, storage=FP32)
    network = replace(GPT, vocab=64)
    at_first, later = (memory(network, replace(plan, schedule=schedule), OURS)[1].parts for schedule in ("gpipe", "1f1b"))
    assert at_first["gradients"] < 1e-9 < later["gradients"] == 4 * held(network, plan, stages_of(network, plan, 3), (1,)).total


def test_fsdp_has_nothing_whole_at_the_loss_and_two_layers_while_one_works() -> None:
    plan = Plan(dp=4, engine="fsdp", microbatch=64, microbatches=3, storage=FP32)
    network = replace(GPT, vocab=8)
    layer, table = (12 * 96**2 + 2 * 96), 8 * 96

    def whole(network: Network, p: Plan) -> float:
        return peak(network, p, OURS).parts["gathered layers"]

    assert whole(WIDE_VOCABULARY, plan) == 0
    assert whole(WIDE_VOCABULARY, replace(plan, loss_chunks=2)) == 2 * 20_000 * 96
    assert whole(network, plan) == 2 * 2 * layer + 4 * table, "weights of two layers, gradient of the head"
    assert whole(network, replace(plan, reshard=False)) == 2 * (parameters(network) - table) + 4 * table
    assert whole(network, replace(plan, recompute="full")) == 2 * 2 * layer + 4 * layer, "weights of two layers, gradient of the next layer"
    assert whole(network, replace(plan, microbatch=1)) == 2 * 2 * layer + 4 * 2 * layer, "weights of two layers, gradients of both"
    assert whole(network, replace(plan, dp=1)) == 0, "no other rank holds the same parameters"
    sparse = replace(network, experts=Experts(8, 2, 48), sparse_layers=(1, 4, 11))
    assert whole(sparse, replace(plan, ep=2)) > whole(sparse, replace(plan, ep=4)), "experts without copies are never gathered"


@pytest.mark.parametrize("bucket", [20_000, 500_000, 10**7])
def test_zero3_has_two_buckets_whole_or_all_it_needs(bucket: int) -> None:
    plan, network = Plan(dp=4, engine="zero3", microbatch=4, microbatches=3, storage=FP32), replace(WIDE_VOCABULARY, vocab=10_000)
    found = peak(network, replace(plan, microbatch=16), replace(OURS, bucket_elements=bucket)).parts
    assert found["loss and logits"] > 12 * 16 * 32 * 10_000, "the peak is at the loss"
    assert found["gathered layers"] == 2 * min(parameters(network), max(2 * bucket, 10_000 * 96))
    assert found["gradients"] == 4 * parameters(network) / 4 and found["gradient buckets"] == 4 * bucket


def test_25d_cuts_logits_and_states_over_depth_too() -> None:
    grid = Plan(tp=8, tensor="2.5d", depth=2, microbatch=4, engine="zero1", storage=FP32)
    no_bucket = replace(OURS, bucket_elements=0)
    deep, flat = (peak(WIDE_VOCABULARY, plan, no_bucket).parts for plan in (grid, replace(grid, tp=4, tensor="2d", depth=1)))
    assert deep["loss and logits"] == pytest.approx(flat["loss and logits"] / 2)
    assert deep["optimizer"] == pytest.approx(flat["optimizer"] / 2) and deep["parameters"] == pytest.approx(flat["parameters"])


def test_colossal_ais_ring_keeps_whole_rows_of_probabilities() -> None:
    plan = Plan(microbatch=3, sp=4)
    ring, whole = (sum(layer_parts(GPT, replace(plan, sequence=kind), OURS, 0).values()) for kind in ("ring", "colossal_ring"))  # type: ignore[arg-type]
    assert whole - ring == 2 * 3 * 6 * 8 * 32  # c B H (L / 4) L
    assert peak(GPT, replace(plan, sequence="colossal_ring"), OURS).parts["activations"] == 12 * whole


@pytest.mark.parametrize("vocab", [8, 4096])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_peak_is_that_of_the_fullest_rank(vocab: int, recompute: str) -> None:
    """The planner skips ranks that certainly need no more than another. Inputs that later stages keep may be larger than the embedding."""
    network = Network(layers=24, width=96, heads=8, hidden=128, vocab=vocab, length=512, tied=False)
    for name, kind in SCHEDULES.items():
        for pp, chunks, m in ((2, 1, 8), (4, 3, 8), (6, 2, 8), (8, 1, 16)):
            chunks = kind.chunks or chunks
            if kind.batches > 1 or 24 % (pp * chunks) or kind.refusal(Size(pp, m, chunks)) is not None:
                continue
            plan = Plan(pp=pp, chunks=chunks, microbatches=m, schedule=name, recompute=recompute)  # type: ignore[arg-type]
            assert peak(network, plan).allocated == max(of.allocated for of in memory(network, plan)), plan


@pytest.mark.parametrize(
    ("plan", "length"),
    [
        (Plan(dp=2, tp=2, pp=4, tensor="sliced", microbatches=6, recompute="full"), 64),
        (Plan(dp=2, tp=2, sp=2, pp=4, tensor="sliced", schedule="v_half", chunks=2, microbatches=6), 16),
    ],
)
def test_a_rank_may_be_the_fullest_because_fsdp_holds_more_of_its_weights(plan: Plan, length: int) -> None:
    """A rank that keeps as many micro-batches as another may need less, because it reduces its small embedding last instead of a layer, or
    has freed the weights of a stage."""
    network = Network(layers=8, width=96, heads=4, hidden=16 if plan.chunks == 1 else 128, vocab=8, length=length)
    plan = replace(plan, engine="fsdp")
    assert peak(network, plan).allocated == max(of.allocated for of in memory(network, plan))
