"""The planner's rules accept exactly the plans that the recipe's checks accept, and `planned` finds the best of these plans."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe.checks.together import check_run
from moe.plan.choose.candidates import Space, candidates
from moe.plan.choose.choose import choose, described
from moe.plan.choose.legal import advice, refusal
from moe.plan.choose.planned import planned
from moe.plan.choose.recipe_of import as_stored, recipe_of
from moe.plan.job.network import Plan
from moe.plan.job.of_recipe import network_of, plan_of
from moe.plan.machine.cluster import load_cluster
from moe.plan.memory.memory import memory, peak
from moe.plan.pipeline import layers_of, schedule_of
from moe.plan.time.cost import step_time
from moe.plan.time.layer_time import layer_time
from moe.plan.time.stage_time import own_program
from moe.recipe.load import build_run
from moe.recipe.sections import Run
from parallel.errors import BadInput
from parallel.pipeline.order_file import write_order

MODEL = {"num_layers": 6, "d_model": 48, "num_heads": 12, "num_kv_heads": 6, "d_ff": 96, "max_length": 48, "vocab_size": 300}
SPACE = Space(
    engines=("ddp", "zero1", "zero2", "zero3", "fsdp"),
    schedules=(("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zb_v", 2)),
    largest_microbatch=8,
)


def run_of(*, sparse: bool, halves: bool = False) -> Run:
    more: dict[str, Any] = {"moe_every": 2} if sparse else {}
    router = {"router": {"preset": "mixtral"}, "experts": {"num_experts": 6, "d_ff": 24}} if sparse else {}
    train = {"global_batch": 48, "eval_sequences": 48 * 12}
    more |= {"kind": "encoder_decoder", "positions": "t5", "document_mask": True} if halves else {}
    data = {"data": {"objective": "span_corruption"}} if halves else {}
    return build_run({"model": {**MODEL, "tied_embeddings": False, **more}, "train": train, **router, **data})


@pytest.mark.parametrize(("sparse", "halves"), [(False, False), (True, False), (True, True)], ids=["dense", "sparse", "halves"])
def test_what_the_planner_refuses_is_what_the_checks_refuse(sparse: bool, halves: bool) -> None:
    run = run_of(sparse=sparse, halves=halves)
    network, draw = network_of(run), random.Random(7)
    accepted = refused = 0
    for world in (4, 6, 8, 12, 16):
        plans = list(candidates(network, world=world, global_batch=48, base=plan_of(run.resolve(1)), space=SPACE))
        for plan in draw.sample(plans, min(40, len(plans))):
            plan = as_stored(plan, run)
            try:
                check_run(recipe_of(plan, run), world)
                runs = None
            except BadInput as wrong:
                runs = str(wrong)
            assert (refusal(network, plan) is None) == (runs is None), f"{described(plan)}: {refusal(network, plan)} | {runs}"
            accepted, refused = accepted + (runs is None), refused + (runs is not None)
    assert accepted > 30 and refused > 20


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb_v", "chimera"])
def test_lists_of_layers_are_refused_by_both(schedule: str) -> None:
    """For random pipeline.layers, planner and checks refuse the same: a wrong number of layers, or a rank without weights."""
    run, draw, accepted = run_of(sparse=False), random.Random(3), 0
    count = 8 if schedule in ("interleaved", "zb_v") else 4
    for _ in range(40):
        thrown = Counter(draw.randrange(count) for _ in range(draw.choice((6, 6, 6, 7))))
        values = {"schedule": schedule, "microbatches": 8, "layers": [thrown[stage] for stage in range(count)]}
        made = build_run({**run.model_dump(), "pipeline": values, "degrees": {"pp": 4, "dp": 1}}).resolve(4)
        try:
            check_run(made, 4)
            runs = None
        except BadInput as wrong:
            runs = str(wrong)
        assert (refusal(network_of(made), plan_of(made)) is None) == (runs is None), f"{values}: {runs}"
        accepted += runs is None
    assert 5 < accepted < 35


def test_pipeline_layers_follow_the_placement_in_an_order_file(tmp_path: Path) -> None:
    """The file places stages in a V, so that every rank has layers of this list. With placement in a line, rank 2 would have none."""
    values = {"schedule": "zb_v", "microbatches": 8, "layers": [0, 2, 0, 2, 0, 2, 0, 0]}
    run = build_run({**run_of(sparse=False).model_dump(), "pipeline": values, "degrees": {"pp": 4, "dp": 1}})
    write_order(schedule_of(run), tmp_path / "v.csv")
    of_file = run.model_copy(update={"pipeline": run.pipeline.model_copy(update={"schedule": str(tmp_path / "v.csv")})})
    for made in (run.resolve(4), of_file.resolve(4)):
        check_run(made, 4)
        assert refusal(network_of(made), plan_of(made)) is None


@pytest.mark.parametrize("lora", [{}, {"rank": 4}], ids=["all weights", "adapters"])
def test_with_stages_only_the_optimizer_can_be_offloaded(lora: dict[str, Any]) -> None:
    """Planner and checks refuse all other offload with pp = 2. (Offload to disk is left out: a plan does not know if there is a disk.)"""
    run, works = run_of(sparse=False), []
    for stage, optimizer, parameters in ((s, o, p) for s in (1, 2, 3) for o in ("none", "cpu") for p in ("none", "cpu")):
        sharding = {"kind": "zero", "stage": stage, "allow_slow": True, "offload": {"optimizer": optimizer, "parameters": parameters}}
        degrees = {"pp": 2, "dp": 2}
        values = {"sharding": sharding, "degrees": degrees, "pipeline": {"microbatches": 4}, "lora": lora}
        made = build_run({**run.model_dump(), **values}).resolve(4)
        accepted = refusal(network_of(made), plan_of(made)) is None
        with nullcontext() if accepted else pytest.raises(BadInput, match="offload"):
            check_run(made, 4)
        works += [(stage, optimizer, parameters)] * accepted
    assert works == [(stage, optimizer, "none") for stage in (1, 2, 3) for optimizer in ("none", "cpu")]


@pytest.mark.parametrize(
    ("options", "kind", "works"),
    [
        ({"qk_norm": "whole"}, "1d", True),
        ({"qkv_bias": True}, "1d", True),
        ({"qkv_bias": True, "out_bias": True, "qk_norm": "whole"}, "2d", True),
        ({"attention_sinks": True}, "2d", True),
        ({"qk_norm": "heads"}, "1d", True),
        ({"latent": {"key_rank": 8}, "num_kv_heads": None}, "1d", True),
        ({"latent": {"key_rank": 8}, "num_kv_heads": None}, "dtensor", True),
        ({"latent": {"key_rank": 8}, "num_kv_heads": None}, "2d", False),
        ({"ahead": 1}, "1d", True),
        ({"ahead": 1}, "2d", False),
    ],
)
def test_what_tp_cannot_cut_is_refused_by_both(options: dict[str, Any], kind: str, works: bool) -> None:
    tp = 4 if kind == "2d" else 2
    run = build_run({"model": {**MODEL, **options}, "degrees": {"tp": tp, "dp": 1}, "tensor": {"kind": kind}}).resolve(tp)
    assert (refusal(network_of(run), plan_of(run)) is None) == works
    with nullcontext() if works else pytest.raises(BadInput, match="degrees.tp|tensor.kind"):
        check_run(run, tp)


def test_the_first_plan_is_the_fastest_of_all_recommended_plans() -> None:
    """Two rounds find a plan as fast as a search of all degrees does, and as fast as the minimum of single predictions."""
    world, run, cluster = 4, run_of(sparse=True), load_cluster("a100-80-8")
    cluster = replace(cluster, devices_per_node=world)
    found = planned(run, cluster, checked=check_run, top=1, space=SPACE)
    every = planned(run, cluster, checked=check_run, top=1, space=SPACE, num_degrees=None)
    assert found.found.ranked[0].seconds == every.found.ranked[0].seconds
    network, times = network_of(run), []
    for plan in candidates(network, world=world, global_batch=48, base=plan_of(run.resolve(world)), space=SPACE):
        if refusal(network, plan) is not None or advice(plan, devices_per_node=world) is not None:
            continue
        plan = as_stored(plan, run)
        times.append(step_time(network, plan, cluster).step)
    assert found.found.ranked[0].seconds <= min(times) * (1 + 1e-9)


def test_plans_that_the_checks_refuse_are_not_ranked() -> None:
    """Here the checks refuse all plans with dp > 1. Each reason is listed once, with its number of plans."""
    run, cluster = run_of(sparse=False), replace(load_cluster("a100-80-8"), devices_per_node=4)

    def checked(run: Run, world: int) -> Run:
        if run.degrees.dp != 1:
            raise BadInput("degrees.dp", got="more", needed="1", fix="set it to 1")
        return check_run(run, world)

    found = planned(run, cluster, checked=checked, top=1).found
    (count,) = (one.count for one in found.refused if one.reason.startswith("degrees.dp: got more"))
    assert found.ranked[0].plan.dp == 1 and count > 4


@pytest.mark.parametrize("stage", [2, 3])
def test_a_plan_of_zero_with_stages_has_the_bytes_of_fsdp_which_runs_it(stage: int) -> None:
    """FSDP keeps no copy of the weights. So the plan of a recipe, and ranked plans of a recipe without stages, count none. Memory and time
    are those of FSDP, and the checks take Muon."""
    values: dict[str, Any] = {"model": MODEL, "precision": {"compute": "bf16"}, "train": {"global_batch": 48, "eval_sequences": 48}}
    staged = values | {"degrees": {"pp": 2}, "pipeline": {"microbatches": 4}}
    zero = {"kind": "zero", "stage": stage, "allow_slow": True}
    runs = [build_run(staged | {"sharding": s}).resolve(4) for s in (zero, {"kind": "fsdp"})]
    network, (of_zero, of_fsdp) = network_of(runs[0]), [plan_of(run) for run in runs]
    assert of_zero.storage == of_fsdp.storage != plan_of(build_run(values | {"sharding": zero}).resolve(4)).storage
    assert check_run(build_run(staged | {"sharding": zero, "optimizer": {"kind": "muon"}}), 4).optimizer.kind == "muon"
    space = Space(engines=(f"zero{stage}",), schedules=(("1f1b", 1),), largest_tp=1, largest_sp=1, largest_microbatch=2)
    cluster = replace(load_cluster("a100-80-8"), devices_per_node=4)
    assert memory(network, of_zero) == memory(network, of_fsdp) and peak(network, of_zero) == peak(network, of_fsdp)
    assert step_time(network, of_zero, cluster) == step_time(network, of_fsdp, cluster)
    found = planned(build_run(values), cluster, checked=check_run, top=40, space=space, num_degrees=None)
    assert {(one.plan.pp, one.plan.dp) for one in found.found.ranked} >= {(1, 4), (2, 2)}
    for one, made in zip(found.found.ranked, found.runs, strict=True):
        assert plan_of(made).storage == one.plan.storage


def test_a_slow_head_gets_a_stage_of_its_own() -> None:
    """The recipe of each ranked plan has the plan's number of layers on each stage, whether it lists them or the trainer cuts them."""
    run = run_of(sparse=False)
    run = run.model_copy(update={"model": run.model.model_copy(update={"vocab_size": 6000})})
    cluster = replace(load_cluster("a100-80-8"), devices_per_node=4)
    space = Space(schedules=(("1f1b", 1), ("zb_v", 2)), engines=("ddp",), largest_tp=1, largest_sp=1, largest_microbatch=2)
    every = planned(run, cluster, checked=check_run, top=40, space=space, num_degrees=None)
    own = [(one.plan, made) for one, made in zip(every.found.ranked, every.runs, strict=True) if one.plan.pp == 4]
    alone = [plan for plan, _ in own if plan.stage_layers == (2, 2, 2, 0)]
    assert alone and "1f1b, a stage for the head alone, " in described(alone[0])
    for plan, made in own:
        held = layers_of(made, schedule_of(made))
        assert tuple(map(len, held)) == plan.stage_layers and plan_of(made) == plan


def test_a_smaller_limit_never_makes_a_plan_faster_and_reasons_are_counted() -> None:
    run = run_of(sparse=False)
    network, before = network_of(run), 0.0
    base = plan_of(run.resolve(8))
    plans = [as_stored(p, run) for p in candidates(network, world=8, global_batch=48, base=base, space=Space(engines=("ddp", "fsdp")))]
    cluster = load_cluster("a100-80-8")
    sizes = sorted(peak(network, replace(p, recompute="full")).used for p in plans if refusal(network, p) is None)
    for limit in (sizes[-1] * 2, sizes[len(sizes) // 2], sizes[0], sizes[0] * 0.9):
        found = choose(
            network,
            plans,
            held_bytes=lambda p: peak(network, p).used,
            limit_bytes=limit,
            seconds=lambda p: step_time(network, p, cluster).step,
            top=len(plans),
        )
        assert found.tried == len(plans) == found.fitting + sum(one.count for one in found.refused)
        assert all(one.held_bytes <= limit for one in found.ranked)
        if not found.ranked:
            assert limit < sizes[0] and found.nearest is not None and found.nearest.over_bytes == pytest.approx(sizes[0] - limit)
            continue
        assert found.ranked[0].seconds >= before
        before = found.ranked[0].seconds


def test_a_grid_that_is_none_is_said() -> None:
    network = network_of(run_of(sparse=False))
    assert "do not form a grid" in str(refusal(network, Plan(tp=6, tensor="2d", microbatch=6)))
    assert refusal(network, Plan(tp=4, tensor="2d", microbatch=6)) is None


def test_a_depth_of_one_is_a_square_for_both() -> None:
    run = build_run({"model": MODEL, "degrees": {"tp": 4, "dp": 1}, "tensor": {"kind": "2.5d", "depth": 1}}).resolve(4)
    assert str(check_run(run, 4).tp_grid()) == "2 x 2" and refusal(network_of(run), plan_of(run)) is None


def test_ranks_with_copied_weights_compute_the_whole_layer() -> None:
    """With tensor.kind=copied, a layer takes as long on two ranks as on one; with 1d it takes less."""
    network, cluster = replace(network_of(run_of(sparse=False)), width=2048, hidden=8192, length=1024), load_cluster("h100-8")
    program = own_program(cluster)
    alone, copied, cut = (
        layer_time(network, Plan(tp=tp, tensor=kind), cluster, program, sparse=False).passes.forward.compute
        for tp, kind in ((1, "1d"), (2, "copied"), (2, "1d"))
    )
    assert copied == alone > cut
