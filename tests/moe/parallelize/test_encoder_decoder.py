"""An encoder-decoder over stages, over shards of both halves' sequences and over ranks of tp equals its plain twin."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from moe.checks.advice import applied
from moe.checks.together import check_run
from moe.model.transformer import Transformer
from moe.parallelize import stages
from moe.parallelize.plan import lay_out
from moe.plan.pipeline import schedule_of
from moe.recipe.load import build_run
from moe.recipe.shapes import divisible_inputs, spans_of
from moe.verify.cases import Case
from moe.verify.expected import FP32_TOLERANCE, NUMBERS, compare, twin_of
from moe.verify.layouts import run_world
from moe.verify.twin import Result, reference
from parallel.errors import BadInput
from parallel.mesh.mesh import Mesh

HALVES = Case("t5", "ddp", 2, 1, 1, "fp32", layers=4, length=12, steps=2)  # 12 tokens read, 4 written, 2 layers each
STAGED = replace(HALVES, pp=2, microbatches=4)
CASES = {
    "ring": replace(HALVES, sp=2, attention="zigzag", ep=2),
    "ulysses": replace(HALVES, sp=2, attention="ulysses"),
    "lightseq": replace(HALVES, sp=2, attention="lightseq"),
    "colossal": replace(HALVES, sp=2, attention="colossal"),
    "slices": replace(HALVES, tp=2, tensor="sliced"),
    "dtensor": replace(HALVES, tp=2, tensor="dtensor"),
    "2d": replace(HALVES, world=4, tp=4, tensor="2d", ep=2),
    "packed": replace(HALVES, model="t5_packed", tp=2, tensor="sliced", ep=2, recompute="full"),
    "packed ring": replace(HALVES, model="t5_packed", sp=2, attention="zigzag"),
    "packed colossal": replace(HALVES, model="t5_packed", sp=2, attention="colossal"),
    "1f1b": replace(STAGED, stages=(3, 1)),
    "interleaved": replace(STAGED, schedule="interleaved"),
    "zero bubble": replace(STAGED, schedule="zb_h1"),
}


@cache
def twin(model: str) -> Result:
    return reference(replace(twin_of(replace(HALVES, model=model)), layers=4, steps=2))


@pytest.mark.parametrize("world", [2, 4])
def test_output_gradients_and_step_are_those_of_the_plain_twin(world: int) -> None:
    for case, ran in run_world([case for case in CASES.values() if case.world == world], world):
        assert not isinstance(ran, str), (case.layout, ran)
        plain = twin(case.model)
        found = compare(ran[0], plain)
        assert all(found[number] <= FP32_TOLERANCE for number in NUMBERS if number != "ten_step"), (case.layout, found)
        assert len(plain.gradients) > 60 and all(gradient.abs().sum() > 0 for gradient in plain.gradients.values())


CUTS = {"1f1b": (1, 2, 1, 0), "interleaved": (0, 1, 0, 0, 1, 0, 1, 1), "chimera": (1, 1, 1, 1)}  # layers of each stage


@pytest.mark.parametrize(("schedule", "layers"), CUTS.items())
def test_every_stage_of_a_half_holds_its_position_bias_and_one_rank_owns_it(schedule: str, layers: tuple[int, ...]) -> None:
    """The encoder's bias is on every stage with a layer of the encoder, likewise the decoder's; the encoder's norm is on its last stage."""
    run = check_run(replace(STAGED, world=4, pp=4, schedule=schedule, stages=layers).run(), 4)
    order, found = schedule_of(run), []
    parts = stages.parts_of(run, order)
    for rank in range(4):
        with torch.device("meta"):
            model = Transformer(run.model, run.experts, run.router, vocab_size=run.vocab_size)
        layouts = stages.hold(run, model, lay_out(model), Mesh.of(run.mesh_degrees(), rank))
        assert set(layouts) == {name for name, _ in model.named_parameters()}
        found.append(layouts)
    readers = {"layers.0.attention.bias.weight": {0, 1}, "layers.2.attention.bias.weight": {2, 3}, "encoder_norm.weight": {1}}
    for name, numbers in readers.items():
        ranks = {rank for stage, part in enumerate(parts) if numbers & {*part.layers} for rank in order.homes[stage]}
        assert {rank for rank, layouts in enumerate(found) if name in layouts} == ranks
        assert sum(layouts[name].is_owner(Mesh.of(run.mesh_degrees(), rank)) for rank, layouts in enumerate(found) if name in layouts) == 1


@pytest.mark.parametrize("case", ["ring", "slices"])
def test_lengths_that_ranks_do_not_divide_are_refused_with_one_that_they_do(case: str) -> None:
    run = replace(CASES[case], length=13).run()  # 13 tokens read, 4 written
    with pytest.raises(BadInput, match=r"model\.max_length: got 13, with 4 tokens for the decoder, needed a multiple of 2") as refused:
        check_run(run, 2)
    changes = refused.value.fix.ways("model.max_length")
    assert len(changes) == 2
    for change in changes:
        check_run(build_run(applied(change, run.model_dump())), 2)


@pytest.mark.parametrize(("read", "written"), [(2, 4), (3, 3), (8, 8)])
def test_lengths_of_a_fix_are_the_nearest_that_are_divided(read: int, written: int) -> None:
    fits = [n for n in range(4, 2000) if n % read == 0 == spans_of(n).targets % written and spans_of(n).inputs == n]
    for near in (10, 512):
        found = divisible_inputs(near, read=read, written=written)
        assert set(found) <= set(fits) and abs(found[0] - near) == min(abs(n - near) for n in fits) and len(found) == 2
    assert divisible_inputs(512, read=16, written=16) == []
