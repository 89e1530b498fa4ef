"""Training with expert parallelism, on four ranks and with every dispatcher, equals training on one process: losses, norms, saved state.

Model, batches and step are those of `moe verify`; the engines are real ones on forked gloo ranks.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe.checks.together import check_run
from moe.verify.cases import Case
from parallel.data.deepspeed import load_deepspeed
from parallel.process.fork import run_on_ranks
from parallel.process.process import World
from parallel.store.checkpoint import pieces
from tests.support.tiny import CPU, Tiny, hand_over, start

STEPS = 3
Trained = tuple[list[float], list[float], dict[str, Tensor]]

LAYOUTS: dict[str, dict[str, Any]] = {
    "padded": {"dispatch": {"kind": "padded"}},
    "all_gather": {"dispatch": {"kind": "all_gather"}},
    "hierarchical": {"dispatch": {"kind": "hierarchical", "node_size": 2}},
    "chunked": {"dispatch": {"overlap_chunks": 2}, "degrees": {"ep": 2}},
    "etp": {"degrees": {"ep": 2, "etp": 2}},
    "etp alone": {"degrees": {"ep": 1, "etp": 4}},
    "etp, all_gather": {"degrees": {"ep": 2, "etp": 2}, "dispatch": {"kind": "all_gather"}},
    "etp, chunked": {"degrees": {"ep": 2, "etp": 2}, "dispatch": {"overlap_chunks": 2}},
    "recomputed": {"degrees": {"ep": 2, "etp": 2}, "dispatch": {"overlap_chunks": 2}, "recompute": {"kind": "full"}},
}


# (engine, model) -> the layouts it is tested with; none listed: all. Exchanges do not depend on engine and model, so others take those that
# differ for them: zero1 shards states over copies and shards of experts, switch drops rows.
TAKEN = {
    ("zero1", "gshard"): ("etp", "chunked"),
    ("zero1", "switch"): ("padded", "etp", "etp alone", "recomputed"),
    ("ddp", "switch"): ("all_gather", "hierarchical", "chunked", "etp, all_gather"),
}


def case_of(model: str, kind: str, world: int) -> Case:
    return Case(model, kind, world, world, 1, "fp32")


def trained(tiny: Tiny, first: int = 0) -> Trained:
    """Train STEPS steps. Return (losses, gradient norms, this rank's pieces of weights and moments by the names in checkpoints)."""
    losses, norms = [], []
    for step in range(first, first + STEPS):
        losses.append(tiny.accumulate(step).loss)
        norms.append(tiny.finish().total)
    return losses, norms, held(tiny)


def held(tiny: Tiny) -> dict[str, Tensor]:
    found = {}
    for name, layout in tiny.engine.layouts.items():
        parts = tiny.engine.state(name)
        if layout.is_owner(tiny.mesh):
            for kind, tensor in parts.items():
                for piece in pieces(name, layout, tiny.mesh, tensor):
                    found[f"{piece.name}/{kind}@{','.join(map(str, piece.start))}"] = piece.tensor.detach().clone()
    return found


@cache
def alone(model: str) -> Trained:
    return trained(start(case_of(model, "ddp", 1), 0))


def check(got: list[Any], want: Trained) -> None:
    """Assert that each rank has the losses and norms of `want`, and that every element of each weight and moment is on one rank, and is
    equal.
    """
    whole = {name.split("@")[0]: tensor for name, tensor in want[2].items()}
    seen = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    for losses, norms, parts in got:
        assert losses == pytest.approx(want[0], rel=1e-5) and norms == pytest.approx(want[1], rel=1e-5)
        for key, part in parts.items():
            name, _, at = key.partition("@")
            region = tuple(slice(a, a + n) for a, n in zip(map(int, at.split(",")), part.shape, strict=True)) if at else ()
            limit = 2e-5 * float(whole[name].abs().max())
            assert float((part - whole[name][region]).abs().max()) <= limit, key
            seen[name][region] += 1
    assert all(bool((tensor == 1).all()) for tensor in seen.values())


@pytest.mark.parametrize(("model", "kind"), [("gshard", "ddp"), ("switch", "zero1")])
def test_every_layout_trains_like_one_process(kind: str, model: str) -> None:
    """gshard has a random second expert, dropout in the experts and a shared expert. switch has drops, jitter and a z loss."""
    if kind == "zero1":
        load_deepspeed()

    def work(rank: int) -> dict[str, Any]:
        chosen = TAKEN.get((kind, model), LAYOUTS)
        return {name: list(trained(start(case_of(model, kind, 4), rank, **LAYOUTS[name]))) for name in chosen}

    ranks = run_on_ranks(work, 4, timeout_s=120)
    for name in ranks[0]:
        check([r[name] for r in ranks], alone(model))


@pytest.mark.parametrize(("before", "after"), [("etp", "padded"), ("padded", "etp alone")])
def test_a_checkpoint_can_be_resumed_on_another_layout(tmp_path: Path, before: str, after: str) -> None:
    """After three steps, a run saves and resumes with another dispatcher or etp. Its next three steps equal those of an uninterrupted
    process.
    """

    def work(rank: int) -> Any:
        one = start(case_of("switch", "ddp", 4), rank, **LAYOUTS[before])
        trained(one)
        other = start(case_of("switch", "ddp", 4), rank, train={"seed": 8}, **LAYOUTS[after])
        hand_over(tmp_path, one, other, step=STEPS)
        return list(trained(other, first=STEPS))

    unbroken = start(case_of("switch", "ddp", 1), 0)
    trained(unbroken)
    check(run_on_ranks(work, 4, timeout_s=90), trained(unbroken, first=STEPS))


def test_first_values_of_a_shard_are_bitwise_those_of_the_whole_expert() -> None:
    from moe.parallelize.build import build
    from parallel.mesh.mesh import Degrees, Mesh

    run = check_run(case_of("gshard", "ddp", 1).run(), 1)
    whole = dict(build(run, Mesh.of(Degrees()), device=CPU)[0].named_parameters())
    for rank in range(4):
        mesh = Mesh.of(Degrees(dp=4, ep=2, etp=2), World(rank, 4).rank)
        model, layouts = build(run, mesh, device=CPU)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, whole[name][layouts[name].region(mesh)]), name
            assert layouts[name].local_shape(mesh) == tuple(parameter.shape)
