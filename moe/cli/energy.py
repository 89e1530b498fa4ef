"""`moe energy`: plans a GPU clock for every action of a pipeline step (EnvPipe), and prints the energy that the plan saves. Needs no GPU.

Times and energies come from a measured profile (--profile). Without one, times come from flags or from a recipe's FLOPs, and energies
from the power model of parallel/pipeline/energy/clocks.py.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

from moe.cli.run import check_least, refuse, write_rows
from moe.cli.simulate import duration
from moe.cli.simulate_times import NEEDS_RECIPE, OF_FILE, Costs, check_size, of_recipe, times_of
from moe.cli.verbs import Energy
from moe.launch import exit_codes
from parallel.errors import BadInput, counted
from parallel.pipeline.energy.clocks import Clock, MeasuredProfile, PowerModel, Profile, read_profile
from parallel.pipeline.energy.energy import EnergyPlan, envpipe, plan_clocks
from parallel.pipeline.energy.plan_file import write_plan
from parallel.pipeline.order_file import read_order
from parallel.pipeline.schedule import Action, Op, Schedule
from parallel.pipeline.schedules import kind_of, make_schedule
from parallel.pipeline.simulator.held import peak_activations

KINDS = {".json": "the plan", ".png": "a picture"}
FORWARD_S, BACKWARD_S, STAGES, MICROBATCHES = "0.01", "0.02", 4, 8
TIMES = ("forward_time", "backward_time", "transfer_time", "tflops", "link_gb_s")
MOST_ACTIONS = 2**11  # limit on forward passes in a step: planning takes time quadratic in the number of actions


def main(flags: Energy, overrides: dict[str, str]) -> int:
    """Make an energy plan, print it, write it to --out. With --apply, set this machine's GPU clocks. Raises BadInput for wrong flags."""
    name, slowdown, recipe = flags.name or "1f1b", flags.slowdown or 0.0, flags.recipe
    size: dict[str, Any] = {"stages": flags.stages, "microbatches": flags.microbatches, "chunks": flags.chunks}
    _check(flags, name, size, slowdown)
    if recipe is None:
        refuse(overrides, **NEEDS_RECIPE)
    from_file = read_order(name) if name.endswith(".csv") else None
    times = {flag: value for flag in TIMES if (value := getattr(flags, flag)) is not None}
    measured: MeasuredProfile | None = None
    costs: Costs | None = None
    if flags.profile is not None:
        refuse({"recipe": recipe, **times}, got="with --profile", needed="one of the two: the profile already has times")
        measured = read_profile(flags.profile)
    elif recipe:
        costs = of_recipe(recipe, overrides, times, size, from_file)
    else:
        costs = times_of({"forward_time": FORWARD_S, "backward_time": BACKWARD_S} | times)
    schedule = from_file or _schedule(name, size, measured)
    if measured is not None and len(measured.stages) != schedule.num_stages:
        got = counted(len(measured.stages), "stage")
        raise BadInput("--profile", got=got, needed=f"the {schedule.num_stages} stages of {name}", fix="other --stages, or another profile")
    of_actions, idle_w, transfer = _profile(schedule, measured, costs)
    plan, uniform = _plan(name, schedule, of_actions, idle_w, transfer, slowdown, flags.ahead)
    row = _row(plan, uniform, slowdown, "measured" if measured is not None else "power model")
    _print(row, plan)
    if flags.out is not None:
        _write(plan, flags.out)
    write_rows(flags.json, "energy", [row])
    if flags.apply:
        _apply(plan, flags.steps or 1)
    return exit_codes.DONE


def _check(flags: Energy, name: str, size: dict[str, Any], slowdown: float) -> None:
    check_least(flags, **dict.fromkeys(size, 1))
    if name.endswith(".csv"):
        refuse(size, got=f"with {name}", needed=OF_FILE)
    if not 0 <= slowdown <= 10:
        raise BadInput("--slowdown", got=slowdown, needed="a share from 0 to 10", fix="--slowdown 0.01")
    if (ahead := flags.ahead) is not None and (ahead < 0 or name != "1f1b"):
        got, fix = (ahead, "--ahead 0") if ahead < 0 else (f"--ahead for {name}", "remove --ahead")
        raise BadInput("--ahead", got=got, needed="at least 0, and the schedule 1f1b: no other moves forward passes earlier", fix=fix)
    if flags.steps is not None and (flags.steps < 1 or not flags.apply):
        raise BadInput("--steps", got=flags.steps, needed="at least 1, with --apply", fix="--apply --steps 1")
    if (out := flags.out) is not None and out.suffix not in KINDS:
        fix = f"--out {out.stem.lstrip('.') or 'plan'}.json"
        raise BadInput("--out", got=str(out), needed=", ".join(f"*{k} ({v})" for k, v in KINDS.items()), fix=fix)


def _schedule(name: str, size: dict[str, Any], measured: MeasuredProfile | None) -> Schedule:
    chunks = size["chunks"] or kind_of(name).chunks or 2
    ranks = size["stages"] or (max(1, len(measured.stages) // chunks) if measured is not None else STAGES)
    microbatches = size["microbatches"] or MICROBATCHES
    check_size(stages=ranks, microbatches=microbatches, chunks=size["chunks"], most_actions=MOST_ACTIONS)
    return make_schedule(name, ranks=ranks, microbatches=microbatches, chunks=size["chunks"])


def _profile(schedule: Schedule, measured: MeasuredProfile | None, costs: Costs | None) -> tuple[Profile, float, float]:
    """Return (profile, watts of a waiting rank, seconds of a message). profile(rank, action): returns the possible clocks, each with
    seconds and joules. All values come from the user's profile `measured`; without one, from the power model and `costs`, the times at full
    clock."""
    if measured is not None:
        return measured, measured.idle_w, 0.0
    assert costs is not None
    model, transfer, cost = PowerModel(), costs.transfer_of(schedule), costs.cost(schedule)
    found: dict[tuple[int, Op, int], list[Clock]] = {}

    def profile(rank: int, action: Action) -> list[Clock]:
        key = (rank, action.op, action.stage)
        if key not in found:
            seconds = cost(rank, action)
            found[key] = model.clocks(seconds) if action.op not in (Op.S, Op.U) else [Clock(0, seconds, 0)]
        return found[key]

    return profile, model.idle_w, transfer


def _plan(
    name: str, schedule: Schedule, profile: Profile, idle_w: float, transfer: float, slowdown: float, ahead: int | None
) -> tuple[EnergyPlan, EnergyPlan]:
    """Return (the plan, a plan for comparison in which every action runs at its clock of least energy). name: the schedule's. idle_w: watts
    of a waiting rank. transfer: seconds of a message. slowdown: allowed increase of the step's time, as a share. ahead: for 1f1b, largest
    number of forward passes that a plan may add to a rank's warm-up; None: no limit."""
    uniform = plan_clocks(schedule, profile, idle_power=idle_w, transfer_time=transfer, rule="uniform")
    if name == "1f1b":
        ranks, microbatches = schedule.num_ranks, schedule.microbatches
        return envpipe(ranks, microbatches, profile, idle_power=idle_w, most=ahead, slowdown=slowdown, transfer_time=transfer), uniform
    limit = uniform.full_clock.makespan * (1 + slowdown)
    return plan_clocks(schedule, profile, idle_power=idle_w, limit=limit, transfer_time=transfer), uniform


def _row(plan: EnergyPlan, uniform: EnergyPlan, slowdown: float, source: str) -> dict[str, Any]:
    schedule = plan.schedule
    return {
        "schedule": schedule.name,
        "stages": schedule.num_ranks,
        "microbatches": schedule.microbatches,
        "energies": source,
        "idle_w": plan.idle_power,
        "allowed_slowdown": slowdown,
        "saved": plan.saved,
        "slowdown": plan.slowdown,
        "makespan": plan.timeline.makespan,
        "energy_j": plan.energy,
        "full_clock": {"makespan": plan.full_clock.makespan, "energy_j": plan.full_clock_energy},
        "uniform": {"saved": uniform.saved, "slowdown": uniform.slowdown},
        "time_unit": "s",
        "energy_j_by_rank": [plan.energy_of(rank) for rank in range(schedule.num_ranks)],
        "mhz_by_rank": [sorted({clock.mhz for clock in row if clock.mhz}) for row in plan.clocks],
        "peak_activations": list(peak_activations(schedule)),
        "peak_activations_at_full_clock": list(peak_activations(plan.full_clock.schedule)),
    }


def _print(row: dict[str, Any], plan: EnergyPlan) -> None:
    idle, idle_at_full = plan.timeline.bubbles(), plan.full_clock.bubbles()
    for rank, energy in enumerate(row["energy_j_by_rank"]):
        clocks = row["mhz_by_rank"][rank]
        work = [clock for clock in plan.clocks[rank] if clock.mhz]
        mean = sum(clock.mhz * clock.time for clock in work) / sum(clock.time for clock in work)
        print(
            f"rank {rank}: {clocks[0]:g} to {clocks[-1]:g} MHz, mean {mean:.0f} · {energy:.4g} J · idle {idle[rank]:.1%}"
            f" of ideal, at full clock {idle_at_full[rank]:.1%} · in flight {row['peak_activations'][rank]},"
            f" at full clock {row['peak_activations_at_full_clock'][rank]}"
        )
    full, uniform = row["full_clock"], row["uniform"]
    size = f"{counted(row['stages'], 'rank')}, {counted(row['microbatches'], 'micro-batch')}"
    print(
        f"{row['schedule']}: {size} · {row['saved']:.1%} of the energy saved"
        f" ({row['energy_j']:.4g} of {full['energy_j']:.4g} J) · time {duration(row['makespan'], row)}, {row['slowdown']:+.2%}"
    )
    print(f"all at the clock of least energy: {uniform['saved']:.1%} saved, time {uniform['slowdown']:+.1%}")
    if row["energies"] == "power model":
        m = PowerModel()
        print(
            f"assumed, not measured: {m.static_w + m.dynamic_w:g} W at {m.full_mhz} MHz, {m.static_w:g} of them fixed,"
            f" {m.lowest_voltage:g} of the voltage at {m.lowest_mhz} MHz, {m.memory_share:.0%} of the time independent of the clock,"
            f" {m.idle_w:g} W idle"
        )


def _write(plan: EnergyPlan, out: Path) -> None:
    if out.suffix == ".png":
        from parallel.pipeline.simulator.draw import draw_clocks

        said = f"{plan.schedule.name}: {plan.saved:.1%} of the energy saved at {plan.slowdown:+.2%} time"
        draw_clocks(plan.timeline, [[clock.mhz for clock in row] for row in plan.clocks], out, title=said, unit="s")
    else:
        write_plan(plan, out)
    print(f"{KINDS[out.suffix]}: {out}")


def _apply(plan: EnergyPlan, steps: int) -> None:
    """Set this machine's GPU clocks at the times that the plan gives, for `steps` steps, but compute nothing. If NVML does not permit it,
    print why."""
    from parallel.pipeline.energy.nvml import NoControl, connect, rehearse

    # SIGTERM raises SystemExit, so that clocks are restored
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(exit_codes.TERMINATED))
    try:
        with connect(plan.schedule.num_ranks) as gpus:
            done = rehearse(plan, gpus, steps=steps)
    except NoControl as reason:
        print(f"planned only: {reason}")
        return
    finally:
        signal.signal(signal.SIGTERM, before)
    joules = ", ".join(f"{j:.3g}" for j in done.joules)
    times = f"{counted(done.changes, 'time')}, at most {1e3 * done.latest_s:.1f} ms late"
    print(f"clocks set {times}, then restored; the GPUs used {joules} J meanwhile")
