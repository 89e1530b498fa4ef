"""`moe plan ... --pictures FOLDER`: draws the best plan's pipeline over time, and the memory of each rank at its peak.

timeline.png    a row for each pipeline rank: forward, backward, waiting                         moe/plan/time/timeline.py
memory.png      a bar for each: parameters, activations, ... with a line at the device's limit   moe/report/planned.py
"""

from __future__ import annotations

from pathlib import Path

from moe.plan.choose.choose import described
from moe.plan.choose.planned import Planned
from moe.plan.choose.predicted import stack_on
from moe.plan.memory.memory import memory
from moe.plan.time.stage_time import pictured, timeline
from parallel.errors import BadInput


def draw(made: Planned, folder: Path) -> tuple[Path, Path]:
    """Write both pictures of the plan ranked first and return their paths. Raises BadInput if the folder cannot be made or written."""
    from moe.report import planned
    from parallel.pipeline.simulator import draw as pipeline

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput("--pictures", got=f"{folder}: {error.strerror}", needed="a folder", fix="choose another path") from None
    best, network = made.found.ranked[0], made.network
    plan, shown = best.plan, pictured(best.plan)
    title = f"{described(plan)}: {best.seconds:.4g} s a step" + (f"; here {shown} of them" if shown < plan.microbatches else "")
    times = folder / "timeline.png"
    pipeline.draw(timeline(network, plan, made.cluster, microbatches=shown), times, unit="s", title=title)
    ranks, cluster = memory(network, plan, stack_on(made.cluster)), made.cluster
    held = planned.draw(ranks, folder / "memory.png", capacity=cluster.memory_bytes(), context=not cluster.cores)
    return times, held
