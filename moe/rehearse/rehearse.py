"""`moe rehearse`: memory and messages of one rank of a run, computed without the other ranks and without a GPU.

moe rehearse dense_8b --world 1024 --rank 37 --device cuda --degrees.tp 8 --degrees.pp 4
"""

from __future__ import annotations

from typing import Any

from moe.checks.together import check_run
from moe.launch import exit_codes
from moe.recipe.sections import Run
from moe.records.results import write_json
from moe.rehearse.walk import Walked, walk
from parallel.errors import BadInput
from parallel.fixes import Set
from parallel.process.process import World
from parallel.rehearse.pretended import Found

DEVICES = ("cpu", "cuda")


def check_place(*, world: int, rank: int, device: str) -> None:
    """Refuse an impossible rank, world or device. Raises BadInput."""
    if world < 1:
        raise BadInput("--world", got=world, needed="at least 1 rank", fix="--world 8")
    if not 0 <= rank < world:
        raise BadInput("--rank", got=rank, needed=f"0 to {world - 1} in a world of {world}", fix=f"--rank {world // 2}")
    if device not in DEVICES:
        raise BadInput("--device", got=device, needed=f"one of {', '.join(DEVICES)}", fix="--device cuda")


def carried(run: Run) -> tuple[Run, str]:
    """Return the run with engines that accept tensors without values, and a line about the replaced engine; "" if none is replaced.

    Raises BadInput for offload and for DP, which have no replacement.
    """
    s, kind = run.sharding, run.sharding.carrier(pp=run.degrees.pp)
    if kind.threads:
        raise BadInput(
            "sharding.kind",
            got="dp, whose replicas are threads of one process",
            needed="one thread a rank, which is what a rehearsal follows",
            fix=Set("sharding.kind", "ddp"),
        )
    if kind.stands_in is None:
        return run, ""
    if (s.offload.optimizer, s.offload.parameters) != ("none", "none"):
        raise BadInput(
            "sharding.offload",
            got="DeepSpeed's offload, which copies by addresses of memory that a rehearsal does not have",
            needed="states on the device",
            fix=Set("sharding.offload.optimizer", "none") & Set("sharding.offload.parameters", "none"),
        )
    return run.model_copy(update={"sharding": s.model_copy(update=dict(kind.stands_in.sharding))}), kind.stands_in.why


def main(run: Run, *, recipe: str, world: int, rank: int = 0, device: str = "cpu", json: str | None = None) -> int:
    """Print the table and return the exit code: FAILED, with the place in one line, if the run would fail. Raises BadInput if it would be
    refused."""
    check_place(world=world, rank=rank, device=device)
    run = check_run(run, world)
    run, stands_for = carried(run)
    try:
        walked = walk(run, World(rank, world, place=device))
    except Found as found:
        print(f"rank {rank} of {world} on {device} fails: {found}")
        if json is not None:
            write_json(json, verb="rehearse", rows=[_place(rank, world, device) | {"found": str(found), "passed": False}], recipe=recipe)
        return exit_codes.FAILED
    print(*table(run, walked), *([stands_for] if stands_for else []), sep="\n")
    if json is not None:
        write_json(json, verb="rehearse", rows=[row_of(walked) | {"stands_for": stands_for}], recipe=recipe)
    return exit_codes.DONE


def _place(rank: int, world: int, device: str) -> dict[str, Any]:
    return {"rank": rank, "world": world, "device": device}


def row_of(walked: Walked) -> dict[str, Any]:
    """Return the result as JSON values: bytes of this rank; collectives of one step."""
    row = _place(walked.rank, walked.world, walked.device) | {"passed": True}
    row |= {"build_seconds": walked.build_s, "step_seconds": walked.step_s, "save_seconds": walked.save_s}
    row |= {"built_bytes": walked.built_bytes, "peak_bytes": walked.peak_bytes, "saved_bytes": walked.saved_bytes}
    row |= {f"peak_{kind}": size for kind, size in walked.held.items()}
    row["collectives"] = [
        {"axis": axis, "collective": name, "calls": c.calls, "bytes": c.bytes, "sent": c.sent} for (axis, name), c in walked.counts.items()
    ]
    return row | {"parameters": {name: list(shape) for name, shape in walked.parameters.items()}}


def table(run: Run, walked: Walked) -> list[str]:
    """Format the result as lines."""
    d = run.degrees
    place = " ".join(f"{name} {size}" for name in ("pp", "dp", "sp", "tp", "ep", "etp") if (size := getattr(d, name)) != 1)
    lines = [f"rank {walked.rank} of {walked.world} ({place or 'alone'}) on {walked.device}: build, two steps and a save go through"]
    lines += ["", f"{'held at the peak of a step':<34}{walked.peak_bytes:>20,} bytes"]
    lines += [f"  {kind:<32}{walked.held.get(kind, 0):>20,}" for kind in ("parameters", "gradients", "optimizer", "activations")]
    lines += [f"{'held once built':<34}{walked.built_bytes:>20,}", f"{'saved':<34}{walked.saved_bytes:>20,}"]
    lines += ["", f"{'collectives of a step':<34}{'calls':>8}{'bytes':>20}{'sent':>20}"]
    for (axis, name), c in sorted(walked.counts.items()):
        lines.append(f"  {axis:<14} {name:<17}{c.calls:>8,}{c.bytes:>20,}{c.sent:>20,}")
    if not walked.counts:
        lines.append("  none")
    alike: dict[tuple[int, ...], int] = {}
    for shape in walked.parameters.values():
        alike[shape] = alike.get(shape, 0) + 1
    lines += ["", f"{'parameters held here, by shape':<34}"]
    lines += [f"  {' x '.join(map(str, shape)) or 'a number':<24}{count:>8,}" for shape, count in alike.items()]
    took = f"build {walked.build_s:.1f} s, step {walked.step_s:.1f} s, save {walked.save_s:.1f} s, of this process"
    return [*lines, "", took]
