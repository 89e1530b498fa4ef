"""Durations of actions in `moe simulate`: given by flags in any unit, or derived in seconds from a recipe's model and a device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import isqrt
from typing import Any

from moe.cli.run import refuse
from moe.cli.verbs import NOT_SIMULATED
from moe.plan.pipeline import STATE_BYTES, WEIGHT_BYTES, Device, Stage, layers_of, micro_batch, stages_of
from moe.recipe.sections import Run
from parallel.errors import BadInput, counted
from parallel.pipeline.schedule import Schedule
from parallel.pipeline.schedules import fewer_ranks
from parallel.pipeline.simulator.held import peak_held, weight_versions
from parallel.pipeline.simulator.simulate import Cost, Timeline, costs, drained_period, makespan, simulate

WITHOUT_RECIPE = ("forward_time", "backward_time", "weight_share", "transfer_time")
# default speeds: what Megatron-LM reached on an A100 in 16 bits (SC21, table 1), and a network card of 200 Gbit/s for each rank
WITH_RECIPE = {"tflops": 140.0, "link_gb_s": 25.0}
# texts of the error for a recipe's key that is given without --recipe
NEEDS_RECIPE = {"got": "without a recipe", "needed": "--recipe RECIPE, because it is a recipe's key"}
OF_FILE = "only the file, which sets it"  # `needed` in the error for a flag, such as --stages, given with a schedule file
MOST_ACTIONS = 2**20  # limit on simulated forward passes; this number takes about a minute


class Costs(ABC):
    """Durations of a schedule's actions and messages, all in the same unit. overlap: "on" if ranks compute while they send, else "off"."""

    overlap: str

    @abstractmethod
    def cost(self, schedule: Schedule) -> Cost:
        """Return a function (rank, action) -> duration."""

    @abstractmethod
    def transfer_of(self, schedule: Schedule) -> float:
        """Return the duration of one message."""

    def message_bytes(self, schedule: Schedule) -> float:
        """Return the bytes of one message; 0 if unknown."""
        return 0

    def run(self, schedule: Schedule) -> Timeline:
        """Simulate the schedule, and return the start and end of each action."""
        return simulate(schedule, self.cost(schedule), message_bytes=self.message_bytes(schedule), **self._messages(schedule))

    def makespan(self, schedule: Schedule) -> float:
        """Return the time from the start of the first action to the end of the last one."""
        return makespan(schedule, self.cost(schedule), **self._messages(schedule))

    def period(self, schedule: Schedule, batches: int) -> float:
        """Return the time that one more batch adds in a long run. schedule: one batch, at the end of which the pipeline is empty. batches:
        largest number of further batches to simulate, if no steady state is reached before."""
        return drained_period(schedule, self.cost(schedule), batches=batches, **self._messages(schedule))

    def _messages(self, schedule: Schedule) -> dict[str, Any]:
        return {"transfer_time": self.transfer_of(schedule), "overlap": self.overlap == "on"}


@dataclass(frozen=True)
class Times(Costs):
    """Durations from flags, in any unit. forward_time, backward_time: times of a micro-batch, either one for each stage, with commas
    between, or one for all stages of a rank together, which is divided equally among them. weight_share: share of the backward time for
    weight gradients. transfer_time: time of a message."""

    forward_time: str = "1"
    backward_time: str = "2"
    weight_share: float = 0.5
    transfer_time: float = 0
    overlap: str = "on"

    def cost(self, schedule: Schedule) -> Cost:
        forward = _numbers("--forward_time", self.forward_time, schedule)
        backward = _numbers("--backward_time", self.backward_time, schedule)
        return costs(forward, backward, weight_share=self.weight_share)

    def transfer_of(self, schedule: Schedule) -> float:
        return self.transfer_time


def check_size(*, stages: int, microbatches: int, chunks: int | None = None, batches: int | None = None, most_actions: int) -> None:
    """Raise BadInput if a pipeline has more than `most_actions` forward passes: stages (number of ranks) * chunks (stages on each rank) *
    microbatches * batches. Every schedule accepts the sizes in the fix."""
    most = most_actions // ((chunks or 1) * (batches or 1))
    if stages * microbatches <= most:
        return
    all_stages = counted(stages * (chunks or 1), "stage")
    got = f"{microbatches} on {all_stages}" + (f", in each of {batches} batches" if batches and batches > 1 else "")
    # `fits` is a multiple of twice the number of ranks, which DualPipe needs
    fits, fewer = most // stages // (2 * stages) * 2 * stages, 2 ** (isqrt(most // 2).bit_length() - 1)
    if fits:
        fix = f"--microbatches {fits}"
    else:
        fix = f"--stages {fewer} --microbatches {2 * fewer}" if fewer > 1 else "fewer --chunks or --batches"
    raise BadInput("--microbatches", got=got, needed=f"at most {most_actions:,} forward passes in all", fix=fix)


def check_filled(*, stages: int, microbatches: int, batches: int, filled: int) -> None:
    """Raise BadInput if simulating a continuous pipeline would take too long. filled: number of batches to
    simulate; the last one is measured, in steady state."""
    if stages * microbatches * filled <= MOST_ACTIONS:
        return
    # three batches suffice if a batch has at least as many micro-batches as stages: two fill the pipeline, and the third is measured
    most = MOST_ACTIONS // max(3, batches)
    fewer = 2 ** (isqrt(most).bit_length() - 1)
    fix = f"--microbatches {most // stages // stages * stages}" if stages**2 <= most else f"--stages {fewer} --microbatches {fewer}"
    got = f"{microbatches} on {counted(stages, 'stage')}; this continuous pipeline needs {filled - 1} batches to fill, and 1 to measure"
    raise BadInput("--microbatches", got=got, needed=f"micro-batches x stages x batches of at most {MOST_ACTIONS:,}", fix=fix)


def times_of(given: dict[str, Any]) -> Times:
    """Return the times that flags set. given: flag -> value. Raises BadInput for flags that need a recipe, and for impossible numbers."""
    needed = "--recipe RECIPE, which gives the FLOPs and bytes"
    refuse({flag: given.get(flag) for flag in WITH_RECIPE}, got="without a recipe", needed=needed)
    times = Times(**given)
    if not 0 <= times.weight_share <= 1:
        raise BadInput("--weight_share", got=times.weight_share, needed="a share from 0 to 1", fix="--weight_share 0.5")
    if times.transfer_time < 0:
        raise BadInput("--transfer_time", got=times.transfer_time, needed="at least 0", fix="--transfer_time 0")
    return times


def _numbers(flag: str, value: str, schedule: Schedule) -> float | list[float]:
    try:
        numbers = [float(word) for word in value.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(0 < number < 1e12 for number in numbers):
        raise BadInput(flag, got=value, needed="a time above 0 and below 1e12, or one for each stage with commas between", fix=f"{flag} 1")
    if len(numbers) not in (1, schedule.num_stages):
        needed = f"1 time, or {schedule.num_stages}: one for each stage of {schedule.name}"
        raise BadInput(flag, got=counted(len(numbers), "time"), needed=needed, fix=f"{flag} {','.join(['1'] * schedule.num_stages)}")
    return numbers[0] * schedule.num_ranks / schedule.num_stages if len(numbers) == 1 else numbers


@dataclass(frozen=True)
class OfRecipe(Costs):
    """Durations in seconds, computed from a recipe's model, whose layers are divided among a schedule's stages. sequences: number of
    sequences in a micro-batch. device: speed of each rank. of_file: whether the schedule is a user's file; its number of ranks is fixed,
    so no fix proposes fewer."""

    recipe: Run
    sequences: int
    device: Device
    overlap: str = "on"
    of_file: bool = False

    def stages(self, schedule: Schedule) -> tuple[Stage, ...]:
        layers, stages = self.recipe.model.num_layers, schedule.num_stages
        chunks = max(1, stages // schedule.num_ranks)
        most = fewer_ranks(schedule.name, layers // chunks)
        has_fewer = chunks <= layers and not self.of_file and (most > 1 or len(schedule.homes[0]) == 1)
        smaller = (f"--stages {most} or " if has_fewer else "") + f"--model.num_layers {stages}"
        if stages > layers and self.recipe.pipeline.layers is None:  # pipeline.layers may have stages without layers
            got = f"{schedule.num_ranks} ranks with {chunks} stages each" if chunks > 1 else schedule.num_ranks
            raise BadInput("stages", got=got, needed=f"at most one stage per layer: {layers}", fix=smaller)
        return stages_of(self.recipe, layers_of(self.recipe, schedule, smaller=smaller), sequences=self.sequences)

    def cost(self, schedule: Schedule) -> Cost:
        return self.device.cost(self.stages(schedule), replicas=len(schedule.homes[0]))

    def transfer_of(self, schedule: Schedule) -> float:
        return self.message_bytes(schedule) / (self.device.link_gb_s * 1e9)

    def message_bytes(self, schedule: Schedule) -> float:
        return self.stages(schedule)[0].crossing

    def of_memory(self, timeline: Timeline, batches: int, time_per_batch: float) -> dict[str, Any]:
        """Return further fields of a schedule's row: layers and FLOPs of each stage, bytes of each rank, tokens a second."""
        schedule, stages = timeline.schedule, self.stages(timeline.schedule)
        ranks = range(schedule.num_ranks)
        parameters = [sum(stages[stage].parameters for stage in schedule.stages_of(rank)) for rank in ranks]
        versions = weight_versions(schedule)
        states = [STATE_BYTES * parameters[rank] + WEIGHT_BYTES * parameters[rank] * (versions[rank] - 1) for rank in ranks]
        activations = peak_held(schedule, lambda stage: stages[stage].held)
        tokens = self.sequences * self.recipe.model.max_length * schedule.microbatches // batches
        return {
            "time_unit": "s",
            "tflops": self.device.tflops,
            "link_gb_s": self.device.link_gb_s,
            "sequences_a_microbatch": self.sequences,
            "layers_by_stage": [len(stage.layers) for stage in stages],
            "flops_by_stage": [stage.forward for stage in stages],
            "parameters_by_rank": parameters,
            "state_bytes_by_rank": states,
            "activation_bytes_by_rank": list(activations),
            "memory_gb_by_rank": [(states[rank] + activations[rank]) / 1e9 for rank in ranks],
            "sent_bytes_by_rank": list(timeline.sent_bytes()),
            "tokens_per_second": tokens / time_per_batch,
            "not_counted": not_counted(self.recipe),
        }


def not_counted(run: Run) -> list[str]:
    """Return the settings that the simulation ignores, such as "degrees.tp 2": it treats each pipeline rank as one device."""
    found = [f"degrees.{axis} {getattr(run.degrees, axis)}" for axis in NOT_SIMULATED if getattr(run.degrees, axis) != 1]
    return found + ([f"sharding.kind {run.sharding.kind}"] if run.sharding.named.stage else [])


def of_recipe(recipe: str, overrides: dict[str, str], given: dict[str, Any], size: dict[str, Any], file: Schedule | None) -> OfRecipe:
    """Return the durations for a recipe's model. Raises BadInput for flags that cannot be combined with a recipe. given: flags that set
    times or speeds -> value. size: flags that set sizes -> value; stages and microbatches are set here if they are None. file: the schedule
    from a user's file; None: a schedule of the catalog."""
    from moe.recipe.load import load

    refuse({flag: given.get(flag) for flag in WITHOUT_RECIPE}, got="with --recipe", needed="no such flag: the recipe's model gives times")
    speeds = {flag: given.get(flag, usual) for flag, usual in WITH_RECIPE.items()}
    for flag, speed in speeds.items():
        if speed <= 0:
            raise BadInput(f"--{flag}", got=speed, needed="a speed above 0", fix=f"--{flag} {WITH_RECIPE[flag]:g}")
    run, _ = load(recipe, overrides)
    if run.model.kind == "encoder_decoder":
        needed = "a decoder: times are computed for one length, but encoder and decoder have two; moe plan supports both"
        raise BadInput("--recipe", got=f"{recipe}, an encoder-decoder", needed=needed, fix="--recipe switch_tiny")
    if file is None:
        size["stages"] = size["stages"] or (run.degrees.pp if run.degrees.pp > 1 else None)
        size["microbatches"] = size["microbatches"] or (run.pipeline.microbatches if run.pipeline.microbatches > 1 else 8)
    microbatches = size["microbatches"] if file is None else file.microbatches_per_update
    return OfRecipe(run, micro_batch(run, microbatches), Device(**speeds), given.get("overlap", "on"), file is not None)
