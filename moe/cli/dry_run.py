"""`moe train RECIPE --dry-run`: prints the memory, FLOPs and time that a run would need on this machine or on a --cluster."""

from __future__ import annotations

from collections.abc import Iterator

from moe.checks.advice import check_for_user
from moe.checks.together import check_run
from moe.cli.plan import shares
from moe.launch import exit_codes
from moe.plan.choose import predicted
from moe.plan.choose.choose import described
from moe.plan.choose.predicted import Place, Prediction, predict, settled
from moe.plan.job.counts import held
from moe.plan.job.flops import size as flops_of
from moe.plan.job.network import Plan
from moe.plan.job.of_recipe import network_of
from moe.plan.machine.cluster import load_cluster
from moe.plan.memory.memory import CONTEXT_BYTES
from moe.recipe.sections import Run
from moe.records.summary import count, size


def main(run: Run, *, world: int | None, cluster: str | None, force: bool = False) -> int:
    """Print the memory, FLOPs and time of a run on `world` processes. world None: one process for each device of the cluster, or without a
    cluster a single process. Raises BadInput if memory is too small, unless `force`."""
    machines = None if cluster is None else load_cluster(cluster)
    world = world or (machines.world if machines else 1)
    run, place = _here(run, world) if machines is None else (settled(run, machines), Place.of(machines, world))
    checked = check_for_user(run, world)
    found = predict(checked, place)
    for line in _lines(checked, world, found):
        print(line)
    if found.over_bytes > 0:
        refused = predicted.refusal(found, run, world, checked=check_run)
        if not force:
            raise refused
        print(f"it would not fit: {refused.got}")
    elif warned := predicted.warning(found):
        print(warned)
    print("nothing was started and nothing written (--dry-run)")
    return exit_codes.DONE


def _here(run: Run, world: int) -> tuple[Run, Place]:
    """Return (the run with precision.compute `auto` replaced for this machine, the device and memory of each of `world` processes here)."""
    from moe.train.start.place import settle_precision
    from moe.train.start.prediction import here
    from parallel.process.process import World

    return settle_precision(run, World()), here(World(size=world, local_size=world))


def _lines(run: Run, world: int, found: Prediction) -> Iterator[str]:
    place, sizes = found.place, flops_of(run)
    tokens = run.train.global_batch * run.model.read_length
    where = f" ({place.cluster.name}, {place.cluster.device.name})" if place.cluster else " of this machine"
    carried = "" if run.carrier is run.sharding.named else f"; {run.engine_text}"
    yield f"{world} rank{'s' if world > 1 else ''}{where}: {described(found.plan)}; {run.precision.compute} compute{carried}"
    active = "" if sizes.active == sizes.total else f", {count(sizes.active)} active for a token"
    if run.lora.rank:
        network = network_of(run)
        active += f", {count(held(network, Plan(), (range(network.depth),), (0,)).trained.total)} LoRA parameters are trained"
    yield f"{'parameters':<16}{count(sizes.total)}{active}"
    flops = sizes.training * tokens
    yield f"{'FLOPs a step':<16}{count(flops)} ({tokens:,} tokens), {count(flops / world)} a rank"
    yield f"{'memory a rank':<16}{_memory(found)}"
    fullest = found.fullest
    for name, of_part in sorted(fullest.parts.items(), key=lambda part: -part[1]):
        if of_part:
            yield f"  {name:<22}{size(of_part):>10}"
    for name, of_part in fullest.host.items():
        yield f"  {name + ' on the host':<22}{size(of_part):>10}"
    yield f"{'time of a step':<16}{_time(found)}"


def _memory(found: Prediction) -> str:
    limit = "" if found.tightest is None else f", of {size(found.tightest.limit)}"
    which = f"rank {found.fullest.rank} of the pipeline's {len(found.ranks)}: " if len(found.ranks) > 1 else ""
    if found.place.kind == "cpu":
        return f"{which}{size(found.rank_bytes)} of tensors{limit}"
    more = f"{size(found.needed_bytes)} with the allocator's share and {size(CONTEXT_BYTES)} of CUDA context"
    return f"{which}{size(found.rank_bytes)} of tensors, {more}{limit}"


def _time(found: Prediction) -> str:
    if found.time is None:
        return f"not predicted: {predicted.CALIBRATE} measures this machine, or name a cluster (--cluster)"
    return f"{predicted.seconds(found.time.step)}: {shares(found.time.parts, found.time.step)}"
