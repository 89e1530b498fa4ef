"""Predicted time of a step: pipelines equal the simulator, collectives equal counted bytes, and laws between plans."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Literal

import pytest

from moe.experts.dispatch.all_to_all import AllToAll
from moe.experts.dispatch.hierarchical import Hierarchical
from moe.plan.job.counts import held, parameters
from moe.plan.job.network import Experts, Network, Plan
from moe.plan.job.states import FP32, MIXED_FP32_GRADIENTS, Update
from moe.plan.machine.cluster import load_cluster
from moe.plan.machine.program import OWN, Updates
from moe.plan.memory.rows import once_each
from moe.plan.time.collective_times import OVERLAP_SLOWDOWN, all_reduce, all_to_all, gather, group_of
from moe.plan.time.cost import PARTS, joules, step_time
from moe.plan.time.layer_messages import Passes, exchange
from moe.plan.time.layer_time import layer_time
from moe.plan.time.pipeline_time import pipeline_time
from moe.plan.time.stage_time import rank_layers, stage_times, transfer_time
from moe.recipe.sections import Dispatch
from parallel.mesh.traffic import Load
from parallel.pipeline.schedules import make_schedule
from parallel.pipeline.simulator.simulate import costs, simulate
from tests.planner.software import PROGRAMS

A100 = load_cluster("a100-80-8")
DENSE = Network(layers=24, width=2048, heads=16, hidden=8192, vocab=50304, length=1024)
SPARSE = replace(DENSE, experts=Experts(count=16, choices=2, hidden=4096), sparse_layers=tuple(range(1, 24, 2)))
FUSED = PROGRAMS["megatron-core"]
ROUTED = Experts(count=256, choices=8, hidden=64)
ROUTINGS = (
    ROUTED,
    replace(ROUTED, open_groups=(4, 8)),
    replace(ROUTED, apart=True),
    replace(ROUTED, rows=0.7),
    replace(ROUTED, open_groups=(4, 8), busiest=3.0),
)


def seconds(network: Network = DENSE, **how: object) -> float:
    plan = Plan(**how)  # type: ignore[arg-type]
    return step_time(network, plan, A100.holding(plan.world), FUSED).step


def simulated(schedule: str, forward: list[int], backward: list[int], m: int, chunks: int) -> float:
    made = make_schedule(schedule, ranks=len(forward), microbatches=m, chunks=chunks if chunks > 1 else None)
    of = [made.homes[stage][0] for stage in range(made.num_stages)]
    return simulate(made, costs([forward[r] / chunks for r in of], [backward[r] / chunks for r in of])).makespan


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("gpipe", 1), ("naive", 1)])
def test_closed_forms_are_the_simulator_where_stages_are_alike_or_the_last_is_slowest(schedule: str, chunks: int) -> None:
    draw = random.Random(3)
    for _ in range(12):
        p = draw.choice([2, 3, 4])
        m = draw.choice([p, 2 * p, 4 * p, *([3 * p - 1, 2 * p + 1] if schedule == "interleaved" else ())])
        forward = [5] * (p - 1) + [draw.randint(5, 11)]
        backward = [2 * x for x in forward]
        plan = Plan(pp=p, microbatches=m, schedule=schedule, chunks=chunks)
        assert pipeline_time(plan, forward, backward, [0.0] * p) == pytest.approx(simulated(schedule, forward, backward, m, chunks))


def test_other_stages_make_gpipe_exact_and_1f1b_a_bound() -> None:
    draw = random.Random(4)
    for _ in range(25):
        p = draw.choice([2, 3, 5])
        m, forward = p * draw.choice([1, 3]), [draw.randint(3, 9) for _ in range(p)]
        backward = [draw.randint(4, 20) for _ in range(p)]
        gpipe = pipeline_time(Plan(pp=p, microbatches=m, schedule="gpipe"), forward, backward, [0.0] * p)
        assert gpipe == pytest.approx(simulated("gpipe", forward, backward, m, 1))
        one = pipeline_time(Plan(pp=p, microbatches=m), forward, backward, [0.0] * p)
        assert one >= simulated("1f1b", forward, backward, m, 1) * (1 - 1e-9)


@pytest.mark.parametrize("schedule", ["zb_h1", "zb_h2", "zb_v", "dualpipe_v", "dualpipe", "chimera"])
def test_other_schedules_take_what_the_simulator_says(schedule: str) -> None:
    chunks = 2 if schedule in ("zb_v", "dualpipe_v") else 1
    plan = Plan(pp=4, microbatches=8, schedule=schedule, chunks=chunks)
    forward, backward, weights = [4.0] * 4, [8.0] * 4, [4.0] * 4
    got = pipeline_time(plan, forward, backward, weights)
    ideal = 8 * 12
    assert ideal <= got * (1 + 1e-9) and got <= ideal + 3 * 12 + 1e-9  # at least the work, at most the work and 1F1B's bubble


@pytest.mark.parametrize(
    ("schedule", "chunks", "off"), [("zb_h1", 1, 1e-9), ("zb_v", 2, 1e-9), ("v_half", 2, 1e-9), ("chimera", 1, 1e-9), ("zb_h2", 1, 0.02)]
)
def test_pipeline_time_of_a_long_step_equals_its_whole_simulation(schedule: str, chunks: int, off: float) -> None:
    """`pipeline_time` simulates a few rounds and repeats the last. Rounds of zb_h2 are not quite equal, so its error may be 2 %."""
    draw = random.Random(5)
    for _ in range(6):
        p = draw.choice([2, 4])
        m = p * draw.randint(6, 10)
        forward = [float(draw.randint(700, 1000)) for _ in range(p)]
        backward = [2.0 * f for f in forward]
        plan = Plan(pp=p, microbatches=m, schedule=schedule, chunks=chunks)
        made = make_schedule(schedule, ranks=p, microbatches=m)
        # index of each stage's times: its rank, or, if two ranks hold it, the stage itself
        of = [stage if len(homes) > 1 else homes[0] for stage, homes in enumerate(made.homes)]
        times = [[values[r] / chunks for r in of] for values in (forward, backward)]
        whole = simulate(made, costs(*times, weight_share=0.5)).makespan
        assert pipeline_time(plan, forward, backward, forward) == pytest.approx(whole, rel=off + 2e-3)  # times are rounded to 0.1 %


def test_parts_add_up_and_none_is_negative() -> None:
    for network in (DENSE, SPARSE):
        for plan in (
            Plan(dp=2, tp=2, pp=2, microbatch=2, microbatches=4, recompute="full", tensor="sliced"),
            Plan(dp=8, ep=4, engine="zero1", microbatches=2),
            Plan(dp=4, ep=2, etp=2, engine="fsdp", microbatches=2, offload_optimizer="nvme"),
            Plan(dp=2, sp=4, sequence="ulysses", engine="zero2", microbatches=2, offload_parameters="cpu"),
            Plan(tp=4, tensor="2d", microbatches=2),
            Plan(tp=8, tensor="3d", microbatches=2),
            Plan(tp=8, depth=2, tensor="2.5d", microbatches=2),
        ):
            time = step_time(network, plan, A100, OWN)
            assert sum(time.parts.values()) == pytest.approx(time.step) and set(time.parts) == set(PARTS)
            assert min(time.parts.values()) >= 0 and time.hidden >= 0


def test_energy_counts_each_rank_with_its_own_work() -> None:
    """More rows on one rank leave fewer for others: only idle power for the longer step is added. A stage that is slower than others does
    not raise their energy: two uneven stages need as much as the same layers on one device, apart from idle power."""
    cluster = load_cluster("a100-80-8")
    idle, busy = cluster.device.idle_watts, cluster.device.watts - cluster.device.idle_watts
    plan = Plan(dp=8, ep=8, microbatch=4)
    loads = [replace(SPARSE, experts=replace(SPARSE.experts, busiest=share)) for share in (1.0, 2.0)]  # type: ignore[type-var]
    steps, energies = ([of(network, plan, cluster, FUSED) for network in loads] for of in (step_time, joules))
    longer = steps[1].step - steps[0].step
    assert longer > 0 and energies[1] - energies[0] == pytest.approx(8 * idle * longer)

    def computing(plan: Plan) -> float:
        return joules(DENSE, plan, cluster, FUSED) - plan.world * idle * step_time(DENSE, plan, cluster, FUSED).step

    one, two = computing(Plan(microbatches=4)), computing(Plan(pp=2, stage_layers=(20, 4), microbatches=4))
    assert one / busy > 0 and two == pytest.approx(one, rel=0.01)


def test_a_step_takes_at_least_the_operations_of_its_products() -> None:
    plan = Plan(microbatch=8, microbatches=2)
    products = 24 * 12 * 2048**2 + 50304 * 2048
    flops = 6 * products * plan.global_batch * DENSE.length
    time = step_time(DENSE, plan, A100, FUSED)
    assert 1.0 < time.step * A100.device.rate() / flops < 1.6


def test_gradients_are_reduced_once_per_step() -> None:
    """With any number of micro-batches: DDP all-reduces gradients; ZeRO-1 reduce-scatters them and all-gathers 16-bit parameters."""
    program, held = PROGRAMS["megatron-2021"], 24 * 12 * 2048**2 + 50304 * 2048 + (2 * 24 + 1) * 2048  # with gains of norms
    group, cluster = group_of(16, 1, 8, 16), A100.of(2)
    for m in (1, 4):
        ddp = step_time(DENSE, Plan(dp=16, microbatches=m), cluster, program)
        assert ddp.gradients == pytest.approx(all_reduce(cluster, group, 4 * held)) and ddp.parameters == 0
        zero = step_time(DENSE, Plan(dp=16, microbatches=m, engine="zero1"), cluster, program)
        assert zero.gradients == pytest.approx(gather(cluster, group, 4 * held))
        assert zero.parameters == pytest.approx(gather(cluster, group, 2 * held))
        assert zero.optimizer < ddp.optimizer


def test_sums_beside_the_backward_pass_cost_less_and_fsdp_pays_by_the_micro_batch() -> None:
    beside, after = FUSED, replace(FUSED, gradients="after")
    plan = Plan(dp=16, microbatch=4, microbatches=2)
    times = [step_time(DENSE, plan, A100.of(2), program) for program in (beside, after)]
    assert times[0].step < times[1].step and times[0].hidden > 0
    sent = [step_time(DENSE, replace(plan, engine="fsdp", microbatches=m, microbatch=8 // m), A100.of(2), beside) for m in (1, 2, 4, 8)]
    waited = [time.gradients + time.parameters for time in sent]
    assert waited == sorted(waited)


def test_fsdp_beside_stages_sends_in_each_micro_batch_or_once_a_step_if_it_keeps_weights() -> None:
    def sent(m: int, shards: Literal["micro-batch", "step"], *, reshard: bool = False) -> float:
        plan = Plan(dp=4, pp=2, engine="fsdp", microbatches=m, microbatch=2, reshard=reshard)
        time = step_time(DENSE, plan, A100.of(1), replace(FUSED, gradients="after", gathers="waited", shards=shards))
        return time.gradients + time.parameters

    assert sent(8, "micro-batch", reshard=True) == pytest.approx(2 * sent(4, "micro-batch", reshard=True))
    assert sent(8, "step") == pytest.approx(sent(4, "step")) == pytest.approx(sent(4, "micro-batch"))
    assert sent(4, "step") < sent(4, "micro-batch", reshard=True) / 3


def test_recomputation_offload_and_real_routing_cost_time() -> None:
    base = seconds(microbatches=4, microbatch=2)
    assert base < seconds(microbatches=4, microbatch=2, recompute="full") < 1.5 * base
    assert seconds(dp=4, engine="zero2") < seconds(dp=4, engine="zero2", offload_optimizer="cpu")
    assert seconds(dp=4, engine="zero2", offload_optimizer="cpu") < seconds(dp=4, engine="zero2", offload_optimizer="nvme")
    plan = Plan(dp=8, ep=8, microbatch=4)
    loads = [replace(SPARSE, experts=replace(SPARSE.experts, busiest=share)) for share in (1.0, 1.03, 1.1, 1.2, 1.3, 1.5)]  # type: ignore[type-var]
    uneven = [step_time(network, plan, A100, FUSED).step for network in loads]
    assert uneven == sorted(uneven) and uneven[0] < uneven[-1] < 1.5 * uneven[0]


def test_a_loss_in_chunks_recomputes_the_logits() -> None:
    """It takes longer by more than the FLOPs of a product, and by less than half of the head's time without chunks."""
    wide = replace(DENSE, layers=2, width=4096, heads=32, vocab=130_048)
    product = 2 * 3 * 1024 * 4096 * 130_048 / (A100.device.peak_tflops["bf16"] * 1e12)
    none, whole, cut = (seconds(of, microbatch=3, loss_chunks=runs) for of, runs in ((replace(wide, vocab=64), 1), (wide, 1), (wide, 4)))
    assert product < cut - whole < (whole - none) / 2


@pytest.mark.parametrize("gated", [False, True])
def test_selective_recomputation_repeats_the_second_half_of_a_layer(gated: bool) -> None:
    """For large products, selective / full recompute time is the feed-forward network's fraction of the layer's FLOPs, counted by hand.
    With experts, rows are dispatched once more."""
    wide = replace(DENSE, width=6144, heads=48, hidden=16384, gated=gated)
    none, some, full = (step_time(wide, Plan(microbatch=4, recompute=kind), A100, OWN) for kind in ("none", "selective", "full"))  # type: ignore[arg-type]
    network, attention = (3 if gated else 2) * 6144 * 16384, 4 * 6144**2 + 2 * 6144 * 1024 / 2
    assert none.recompute == 0 and none.step < some.step < full.step
    assert some.recompute / full.recompute == pytest.approx(network / (network + attention), rel=0.07)
    sparse = replace(SPARSE, experts=Experts(count=16, choices=2, hidden=4096, gated=gated))
    sent = [step_time(sparse, Plan(dp=8, ep=8, recompute=kind), A100, OWN).experts for kind in ("none", "selective", "full")]  # type: ignore[arg-type]
    assert sent == pytest.approx([sent[0], 1.5 * sent[0], 1.5 * sent[0]])


@pytest.mark.parametrize(("shared", "chunks"), [(512, 1), (200_000, 1), (200_000, 4)])
def test_the_shared_network_hides_the_exchange_that_runs_meanwhile(shared: int, chunks: int) -> None:
    """Rows on their way to experts, and a shared network: together they take the longer of both times, and a part of the shorter, because
    messages slow products down. Of four chunks, the rows of two are on their way. The way back is never hidden."""
    experts = Experts(count=16, choices=2, hidden=4096, exchange=AllToAll(Dispatch(overlap_chunks=chunks)))
    alone, both = (replace(SPARSE, experts=replace(experts, shared_hidden=size)) for size in (0, shared))
    plan, waits = Plan(dp=8, ep=8, microbatch=4), replace(OWN, shared="waited")
    routed, waited, found = (
        layer_time(network, plan, A100, program, sparse=True).passes for network, program in ((alone, OWN), (both, waits), (both, OWN))
    )
    products = waited.forward.compute - routed.forward.compute, waited.backward.compute - routed.backward.compute
    inputs = products[1] - (waited.weights - routed.weights)
    rows_bytes = 2 * 4 * 1024 * 2048 * 2  # two choices of 4 x 1024 tokens
    sent = all_to_all(A100, group_of(8, 1, 8, 8), rows_bytes * min(1, 2 / chunks))
    for of, window in (("forward", products[0]), ("backward", inputs)):
        before, after = (getattr(each, of) for each in (waited, found))
        shorter, longer = sorted((sent, window))
        assert before.device - after.device == pytest.approx(sent + window - longer - OVERLAP_SLOWDOWN * shorter)
        assert after.kernels == before.kernels and (shared > 512) == (sent < window)


def test_small_work_is_bound_by_the_host_that_launches_it() -> None:
    small = replace(DENSE, width=512, hidden=2048, heads=8)
    slow, quick = (step_time(small, Plan(microbatches=4), A100, replace(FUSED, launch_us=us)) for us in (50.0, 1.0))
    assert slow.launch > slow.forward and slow.step > 3 * quick.step


def test_tensor_parallelism_beyond_a_node_does_not_pay() -> None:
    wide = replace(DENSE, layers=12, width=8192, hidden=32768, heads=64)
    within = step_time(wide, Plan(tp=8, dp=2, microbatch=2, microbatches=16, tensor="sliced"), A100.of(2), FUSED).step
    beyond = step_time(wide, Plan(tp=16, microbatch=2, microbatches=32, tensor="sliced"), A100.of(2), FUSED).step
    assert within < beyond


def test_a_ring_over_contiguous_places_waits_for_its_last_rank() -> None:
    long = replace(DENSE, length=65536)
    times = {order: step_time(long, Plan(sp=4, order=order), A100, FUSED).forward for order in ("zigzag", "contiguous")}  # type: ignore[arg-type]
    products = step_time(replace(long, length=16384), Plan(), A100, FUSED).forward
    assert times["contiguous"] > 1.3 * times["zigzag"] and times["zigzag"] > 0.9 * products


def test_a_head_in_a_stage_of_its_own_makes_the_slowest_stage_faster() -> None:
    """With a large vocabulary, stages of 12 layers, 12 layers and the head are faster than 8, 8, and 8 layers with the head (1F1B)."""
    wide = replace(DENSE, vocab=600_000)
    m, plan = 64, Plan(pp=3, microbatch=4, microbatches=64)
    times = {sizes: stage_times(wide, plan, A100, sizes, FUSED) for sizes in ((8, 8, 8), (12, 12, 0))}
    for sizes, stages in times.items():
        total = [stage.total for stage in stages]
        step = step_time(wide, replace(plan, stage_layers=sizes), A100, FUSED)
        sent = 4 * transfer_time(wide, plan, A100, FUSED)
        once = step.gradients + step.parameters + step.optimizer
        assert step.step == pytest.approx(sum(total) + (m - 1) * max(total) + (m + 2) * sent / 2 + once, rel=1e-6)
    (_, body, joined), (_, more, head) = times.values()
    assert joined.total - body.total == pytest.approx(head.total, rel=0.05) and more.total == pytest.approx(1.5 * body.total, rel=0.05)
    assert max(s.total for s in times[12, 12, 0]) < max(s.total for s in times[8, 8, 8])


def test_rank_layers_counts_experts_on_the_ranks_that_hold_them() -> None:
    """Only the first and the last three of 24 layers have experts. With placement `v`, all six are on rank 0."""
    only_ends = replace(SPARSE, sparse_layers=(0, 1, 2, 21, 22, 23))
    assert SPARSE.layers == 24
    assert rank_layers(only_ends, Plan(pp=4, schedule="zb_v", chunks=2)) == ((0, 6), (6, 0), (6, 0), (6, 0))
    assert rank_layers(only_ends, Plan(pp=4)) == ((3, 3), (6, 0), (6, 0), (3, 3))
    assert rank_layers(only_ends, Plan(pp=4, schedule="interleaved", chunks=2)) == ((3, 3), (6, 0), (6, 0), (3, 3))


def test_layers_that_do_not_divide_leave_the_ends_the_fewest() -> None:
    for layers in range(5, 24):
        for p in (2, 3, 4, 5):
            counts = [sum(kinds) for kinds in rank_layers(replace(DENSE, layers=layers), Plan(pp=p))]
            assert sum(counts) == layers and max(counts) - min(counts) <= 1 and counts[-1] == min(counts)


def test_casts_once_a_step_save_those_of_all_micro_batches_but_one() -> None:
    """4 bytes of each parameter are read and 2 written. Programs with times without casts save nothing, nor do weights in fp32."""
    for m in (1, 4):
        use, held = (Plan(dp=2, microbatches=m, storage=storage, compute_bytes=2) for storage in (FP32, MIXED_FP32_GRADIENTS))
        for program, casts in ((OWN, m - 1), (FUSED, 0)):
            before, after = (step_time(DENSE, plan, A100.holding(2), program) for plan in (use, held))
            saved = casts * 6 * parameters(DENSE) / A100.device.bandwidth
            assert before.step - after.step == pytest.approx(saved) and before.forward - after.forward == pytest.approx(saved)


@pytest.mark.parametrize("engine", ["ddp", "zero1", "fsdp"])
def test_copies_share_the_products_of_an_update_and_shards_its_bytes(engine: str) -> None:
    plan = Plan(dp=8, ep=4, engine=engine)

    def optimizer(updates: Updates, own: tuple[float, float] = (1.0, 1.0), flops: tuple[float, float] = (0.0, 0.0)) -> float:
        storage = replace(FP32, update=Update("muon", own, flops=flops))
        return step_time(SPARSE, replace(plan, storage=storage), A100.holding(8), replace(FUSED, updates=updates)).optimizer

    of_rank = held(SPARSE, plan, (range(24),), (0,)).trained
    shared, of_experts = of_rank.dense / 8, of_rank.expert / 2  # each expert has copies on 2 ranks
    none = Updates(adamw=0, muon=0)
    for dtype in ("fp32", "bf16"):  # in the program's dtype
        products, of = (3e5 * shared + 7e5 * of_experts) / A100.device.rate(dtype), replace(none, products=dtype)
        assert optimizer(of, flops=(3e5, 7e5)) - optimizer(of) == pytest.approx(products)
    # AdamW's rule updates 3/4 of the parameters outside of experts: 3/4 x 20 + 1/4 x 60 = 30 bytes
    moved = (30 * shared + 60 * of_experts) if engine != "ddp" else 30 * of_rank.dense + 60 * of_rank.expert
    found = optimizer(Updates(adamw=20, muon=60), own=(0.25, 1.0)) - optimizer(none)
    assert found == pytest.approx(moved / A100.device.bandwidth)


def test_the_bytes_of_an_update_are_the_programs() -> None:
    """XLA's Adafactor: weights read twice and written once, gradients read a third time. Weight decay is a part of the fused update. A
    user's AdamW takes 26 bytes everywhere."""
    eager, fused = OWN.updates, PROGRAMS["xla"].updates
    assert fused.moved(Update("adafactor")) == fused.moved(Update("adafactor", decays=True)) == (3 * 4 + 4, 3 * 4 + 4)
    assert [eager.moved(Update("adafactor", decays=decays))[0] for decays in (False, True)] == [52, 52 + 2 * 4]
    assert {program.updates.moved(Update(decays=True)) for program in PROGRAMS.values()} == {(3 * 8 + 2, 3 * 8 + 2)}
    assert (OWN.updates.products, PROGRAMS["megatron-core"].updates.products) == ("fp32", "bf16")


@pytest.mark.parametrize("experts", ROUTINGS, ids=["random", "open groups", "apart", "drops", "busiest"])
def test_a_program_that_sends_a_token_once_to_a_node_sends_what_the_dispatcher_states(experts: Experts) -> None:
    """Rows over ep_outer and ep_inner of `hierarchical`, whose bytes are counted in tests/moe/experts/dispatch, for 64 ranks on 8 nodes."""
    tokens, width, rows = 4096, 2048, 4096 * experts.choices * experts.mean_rows
    each, choices = experts.dispatched
    load = Load(tokens * each, choices, rows, None, width, 2 * width, experts.count, 64, experts.share(64), experts.reached)
    stated = Hierarchical(Dispatch(kind="hierarchical", node_size=8)).traffic(load).forward
    between, within = (next(m for m in stated if m.axis == axis) for axis in ("ep_outer", "ep_inner"))
    ranks, nodes = (copies * rows * 2 * width * experts.share(64) for copies in once_each(experts, 64, 8))
    assert nodes == pytest.approx(between.handed * between.busiest)
    assert ranks == pytest.approx(within.handed * within.busiest)
    network = replace(DENSE, experts=replace(experts, exchange=None), sparse_layers=(0,))
    plan, cluster = Plan(dp=64, ep=64, microbatch=4), A100.holding(64)
    program = replace(OWN, dispatch="by_node", exchange_kernels=(0, 0))
    found = exchange(network, plan, cluster, program, tokens=tokens, shared=Passes()).forward.experts
    one = all_to_all(cluster, group_of(64, 1, 8, 64), ranks, copies=nodes / ranks)
    assert found == pytest.approx(2 * one)
