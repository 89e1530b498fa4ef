"""The lines that describe a run before its first step."""

from __future__ import annotations

from typing import Any

from moe.plan.job.flops import size
from moe.plan.pipeline import described
from moe.recipe.sections import Run
from parallel.process.process import World


def title(run: Run, world: World) -> list[str]:
    d, p, tokens = run.degrees, run.precision, run.train.global_batch * run.model.read_length
    counted = size(run)
    etp = f" etp {d.etp}" if d.etp > 1 else ""
    layout = (
        (f"pp {d.pp} " if d.pp > 1 else "")
        + (f"tp {d.tp} ({_tensor(run)}) " if d.tp > 1 else "")
        + (f"sp {d.sp} ({_attention(run)}) " if d.sp > 1 else "")
        + f"dp {d.dp} ep {d.ep}{etp}"
    )
    lines = [
        f"{world.size} x {world.device.type} · {layout} · {run.sharding.kind} · {p.compute} compute, {p.master} master",
        f"{counted.total / 1e6:.1f}M parameters, {counted.active / 1e6:.1f}M active · {tokens:,} tokens a step",
    ]
    if run.head_copies() > 1:
        heads = run.model.num_kv_heads or run.model.num_heads
        lines.append(f"key-value heads: {heads} on {run.tp_grid().units} ranks of tp, so each is held in {run.head_copies()} copies")
    if d.pp > 1:
        lines.append(described(run))
    if run.model.layers_with_experts():
        lines.append(f"router {run.router.preset}{', but ' if run.router.own else ''}{_listed(run.router.own)}")
    return lines


def _attention(run: Run) -> str:
    """Describe the attention of sequence parallelism."""
    sequence = run.sequence
    heads = [f"heads {sequence.heads}"] if sequence.heads > 1 else []
    return ", ".join([sequence.kind, sequence.position_order, *heads])


def _tensor(run: Run) -> str:
    if run.tp_grid().sequences > 1:
        return f"{run.tensor.kind}: {run.tp_grid()}"
    chunks = f", overlapped in {run.tensor.overlap_chunks} chunks" if run.tensor.overlap_chunks > 1 else ""
    return f"{run.tensor.kind}{', slices of sequences' if run.tensor.sequence_parallel else ''}{chunks}"


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"{key} {'null' if value is None else value}" for key, value in values.items())
