"""Measures the cost of `train.deterministic`: time of a training step with it, divided by the time of a step without it, in turn.

Passes if the median ratio is at most MOST, and if weights and moments are bitwise equal with and without it.
"""

from __future__ import annotations

from collections.abc import Callable

from moe.bench.timing import in_turn, ratio
from moe.records.results import write_json
from parallel.process.deterministic import deterministic
from tests.campaigns.corruption import CPU, LARGER, Trained

MOST = 1.05


def main(*, rounds: int = 15, json: str | None = None) -> int:
    """Print the table row. Returns 1 if it does not pass."""
    trained = {asked: Trained(0, 1, LARGER, steps=0) for asked in (False, True)}
    steps = dict.fromkeys(trained, 0)

    def one(asked: bool) -> Callable[[], None]:
        def step() -> None:
            with deterministic(asked):
                trained[asked].step(steps[asked])
            steps[asked] += 1

        return step

    seconds = in_turn({"plain": one(False), "deterministic": one(True)}, rounds=rounds, device=CPU)
    same = trained[True].is_as(trained[False].state())
    row = {"rounds": rounds, "ratio": ratio(seconds["deterministic"], seconds["plain"]), "same_bits": same}
    row["passed"] = same and row["ratio"] <= MOST
    print(f"{'rounds':<8}{'ratio':>8}{'same bits':>11}")
    print(f"{rounds:<8}{row['ratio']:>8.3f}{'yes' if same else 'NO':>11}{'' if row['passed'] else '  FAIL'}")
    if json:
        write_json(json, verb="bench deterministic", rows=[row], aim=MOST)
    return 0 if row["passed"] else 1
