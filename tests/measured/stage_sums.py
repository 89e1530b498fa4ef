"""Simulated time of FSDP with pipeline stages: gradients summed once a batch, or after each pass (parallel/data/stage_sums.py).

    python -m tests.measured stage-sums          # bubble of ZB-like schedules on 4 ranks, for several times of a reduce-scatter

F, I and W of a rank's stages take 1 each. `scatter`: time of a rank's reduce-scatters of one pass; its gathers take half, as 16-bit weights
have half the bytes of fp32 gradients. A cell: bubble of the slowest rank, once a batch / each pass.
"""

from __future__ import annotations

from parallel.pipeline.schedules import make_schedule
from parallel.pipeline.simulator.simulate import costs
from tests.support.sharded_stages import makespan

RANKS, SCATTERS = 4, (0.0, 0.1, 0.5, 1.0, 2.0)


def main() -> int:
    print("| schedule | micro-batches | " + " | ".join(f"scatter {time:g}" for time in SCATTERS) + " |")
    print("|---|---|" + "---|" * len(SCATTERS))
    for name in ("1f1b", "zb_h1", "zb_h2", "zb_v", "v_half", "dualpipe_v"):
        for microbatches in (8, 32):
            schedule = make_schedule(name, ranks=RANKS, microbatches=microbatches)
            chunks = schedule.num_stages // RANKS
            cells = []
            for time in SCATTERS:
                each = [
                    makespan(schedule, costs(1 / chunks, 2 / chunks), gather=time / 2 / chunks, scatter=time / chunks, once=once)
                    for once in (True, False)
                ]
                cells.append(" / ".join(f"{taken / (3 * microbatches) - 1:.0%}" for taken in each))
            print(f"| `{name}` | {microbatches} | {' | '.join(cells)} |")
    return 0
