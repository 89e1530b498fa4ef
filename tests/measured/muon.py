"""Measures Muon's step on two ranks if each updates half of the matrices (parallel/optim/shared.py), compared with all on both ranks.

    dense      7 matrices in each layer, 192 and 384 wide, with copies on both ranks
    experts    8 experts with three matrices each in place of the dense network: with ep 1 copies on both ranks, with ep 2 each on one rank

Ratios are of times in the same round; the table has their median. FLOPs are counted during the step, on the rank that has the most.
`python -m tests.measured muon --rounds 9 --json FILE`.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from moe.bench.timing import in_turn, ratio
from moe.checks.together import check_run
from moe.parallelize.build import build
from moe.parallelize.engines import start_engine
from moe.recipe.load import build_run
from moe.records.results import write_json
from parallel.data.ddp import DDP
from parallel.process import process
from parallel.process.fork import run_on_ranks
from parallel.process.process import World

WORLD, CPU = 2, torch.device("cpu")
SIZES: dict[str, Any] = {"num_layers": 2, "d_model": 192, "num_heads": 4, "d_ff": 384, "ffn": "swiglu", "max_length": 64}
CASES: dict[str, dict[str, Any]] = {
    "dense": {},
    "experts, ep 1": {"moe_every": 1},
    "experts, ep 2": {"moe_every": 1, "ep": 2},
}


def main(*, rounds: int = 9, json: str | None = None) -> int:
    """`python -m tests.measured muon`: prints the table and returns 0."""
    torch.set_num_threads(1)
    rows = []
    for case, values in CASES.items():
        found = run_on_ranks(_on_rank, WORLD, values, rounds, timeout_s=900)
        row = {"case": case, "ranks": WORLD} | found[0]
        row |= {f"{way}_gflop": max(rank[f"{way}_gflop"] for rank in found) for way in ("shared", "repeated")}
        rows.append(row)
        print(
            f"{case:<16} shared {row['shared']:7.3f} s, repeated {row['repeated']:7.3f} s, ratio {row['ratio']:.2f}; "
            f"{row['shared_gflop']:.1f} of {row['repeated_gflop']:.1f} GFLOP",
            flush=True,
        )
    if json:
        write_json(json, verb="bench muon", rows=rows, rounds=rounds)
    return 0


def _on_rank(rank: int, values: dict[str, Any], rounds: int) -> dict[str, float]:
    more = {"experts": {"num_experts": 8}, "router": {"preset": "mixtral"}} if "moe_every" in values else {}
    run = build_run(
        {
            "model": SIZES | {"moe_every": values.get("moe_every", 0)},
            "degrees": {"dp": WORLD, "ep": values.get("ep", 1)},
            "optimizer": {"kind": "muon"},
            "train": {"global_batch": WORLD},
        }
        | more
    )
    run = check_run(run, WORLD)
    mesh = process.connect(run.mesh_degrees(), World(rank, WORLD))
    model, layouts = build(run, mesh, device=CPU)
    engine = start_engine(run, model, layouts, mesh)
    assert isinstance(engine, DDP)
    for parameter in engine.parameters.values():
        parameter.grad = torch.randn_like(parameter)
    alone = engine.rule.build(engine.rule.groups(engine.parameters.items()))
    steps = {"shared": engine.optimizer.step, "repeated": alone.step}

    def at_once(way: str) -> None:
        dist.barrier()
        steps[way]()
        dist.barrier()

    found: dict[str, float] = {}
    for way, step in steps.items():
        with FlopCounterMode(display=False) as counted:
            step()
        found[f"{way}_gflop"] = counted.get_total_flops() / 1e9
    seconds = in_turn({way: lambda way=way: at_once(way) for way in steps}, rounds=rounds, device=CPU)  # type: ignore[misc]
    found |= {way: statistics.median(times) for way, times in seconds.items()}
    return found | {"ratio": ratio(seconds["shared"], seconds["repeated"])}
