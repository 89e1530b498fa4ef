"""`moe plan --calibrate`: measures this machine and writes a cluster file for the predictions of `moe plan --cluster FILE` and `moe train`.

    kernels.py      matrix products by size, attention, memory bandwidth, shortest kernel; on a CPU, one rank on each core in parallel
    `collectives`   times of collectives by number of ranks (2, 4, 8, ... up to --nproc) and bytes, with gloo on CPU cores or NCCL on
                    GPUs. With more ranks than cores, times include waiting for a core, as in training
    own_step.py     whole training steps of small models, each rank by itself: for the time that is not in products and attention

Predicted time of a step = products + attention + launch_us * number of kernels + pointwise * time of fully fused elementwise kernels
+ step_ms. The constants launch_us, pointwise and step_ms are fitted to the measured steps: least squares of relative errors, no constant
below 0. gather_us is the host's time for one FSDP gather, in addition to the collective; it follows from FSDP and DDP steps on two ranks.
On GPUs these constants are not measured, but taken from moe/plan/machine/program.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import yaml

from moe.calibrate import kernels, own_step
from moe.launch import exit_codes
from moe.plan.job.of_recipe import network_of, plan_of
from moe.plan.machine.cluster import Between, Cluster, Inside, mapping_of, measured_file
from moe.plan.machine.device import Device
from moe.plan.machine.program import OWN_ON_CPU
from moe.plan.time.cost import step_time
from moe.plan.time.stage_time import own_program
from moe.recipe.load import build_run
from parallel.data.kinds import CUT, ENGINES, PLAIN
from parallel.errors import counted
from parallel.machine import memory_limit_bytes, processor, usable_cores
from parallel.numerics.precision import multiplies
from parallel.process.fork import run_on_ranks
from parallel.process.process import gpus
from parallel.store.files import check_writable, write_text

TIMEOUT_S = 600.0  # time limit of one measurement on several processes
SOURCE = "moe plan --calibrate"
# sizes of the measured collectives: bytes of a rank's input (all_reduce, all_to_all), of its output (all_gather), of the message (send)
SIZES = (4096, 65536, 524288, 4 * 2**20)
KINDS = ("all_reduce", "all_gather", "all_to_all", "send")
CALLS = 25  # timed calls of each collective with each size
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # newer versions of torch have the first name
MOST_AT_ONCE = 16  # largest number of ranks that measure kernels at the same time
THREADED = (1024, 768, 768)  # (m, n, k) of the matrix product that is timed with several threads
# (layers, d_model, d_ff, heads, tokens a sequence, sequences a step) of each timed model; products take an increasing share of the time
STEPS = ((2, 64, 256, 2, 64, 4), (6, 64, 256, 2, 64, 4), (2, 128, 512, 4, 128, 8), (4, 192, 768, 8, 160, 8), (2, 320, 1280, 8, 128, 8))
SHARDED = (6, 64, 256, 2, 64, 16)  # sizes, in the order of STEPS, of the model that FSDP and DDP train for gather_us: many small gathers


def main(*, out: Path | None = None, nproc: int | None = None) -> int:
    """Measure this machine, print the results and write the cluster file `out` (None: the user's machine.yaml). nproc: largest number of
    ranks in collectives; None: one for each core or GPU."""
    if out is not None:
        check_writable(out, what="--out")
    began = time.perf_counter()
    torch.set_num_threads(1)
    found = gpus()
    made = _gpus(found, nproc or found) if found else host(nproc or usable_cores())
    path = out or measured_file()
    write_text(path, text(made), what="--out")
    for line in _lines(made):
        print(line)
    print(f"wrote {path} in {time.perf_counter() - began:.0f} s" + ("" if out else ", which moe train reads by itself"))
    return exit_codes.DONE


def text(cluster: Cluster) -> str:
    return "# This machine, as moe plan --calibrate measured it.\n" + yaml.safe_dump(mapping_of(cluster), sort_keys=False)


def host(ranks: int) -> Cluster:
    """Measure a host without accelerators. In the returned cluster, each of `ranks` processes (at least two) is a device, and they share
    the host's cores."""
    ranks, cores = max(2, ranks), usable_cores()
    at_once = min(cores, MOST_AT_ONCE)
    found = _typical(run_on_ranks(_measured, at_once, "cpu", timeout_s=TIMEOUT_S))
    core = device(processor(), memory_limit_bytes() / 2**30, 1, found)
    times = _times(ranks, "cpu")
    between = Between(node_gb_s=1.0, device_gb_s=1.0, share=1.0, latency_us=100.0, tree_us=100.0)
    cluster = Cluster("machine", core, ranks, 1, inside(times), between, cores=cores, threads=_threads(cores), sources=(SOURCE,))
    cluster = replace(cluster, program=program(cluster, at_once))
    return replace(cluster, program=cluster.program | {"gather_us": gather_us(cluster)})


def _gpus(count: int, ranks: int) -> Cluster:
    """Measure `count` GPUs of one kind: kernels on the first, and NCCL collectives on up to `ranks` of them."""
    times = _times(min(ranks, count), "cuda")  # measured first: processes that are forked after CUDA has started cannot use CUDA
    (found,) = run_on_ranks(_measured, 1, "cuda:0", timeout_s=TIMEOUT_S)
    gpu = device(found["name"], found["memory_gib"], found["units"], found)
    linked = inside(times) if times else Inside({1: 1.0}, 10.0, 0.0, 1.0)
    between = Between(node_gb_s=25.0, device_gb_s=25.0, share=0.85, latency_us=14.0, tree_us=14.0)
    sources = (SOURCE, "between: one 200 Gb/s network card is assumed, not measured: correct it before planning for several nodes")
    return Cluster("machine", gpu, count, 1, linked, between, sources=sources)


# --- measurements on ranks -------------------------------------------------------------------------------------------


def _measured(_: int, place: str) -> dict[str, Any]:
    device = torch.device(place)
    with_bf16 = {"bf16": torch.bfloat16} if multiplies(torch.bfloat16, device) else {}
    found = kernels.measure(device, {"fp32": torch.float32, **with_bf16})
    if device.type == "cpu":
        return found
    made = torch.cuda.get_device_properties(device)
    return found | {"name": made.name, "memory_gib": made.total_memory / 2**30, "units": made.multi_processor_count}


def collectives(rank: int, ranks: int, place: str) -> dict[str, dict[int, float]]:
    """Measure every kind of collective on these ranks. Return a dict: kind -> (bytes -> median microseconds of a call). place: cpu or
    cuda."""
    device = torch.device(place, rank) if place == "cuda" else torch.device(place)
    group = dist.new_group(backend="nccl") if place == "cuda" else dist.group.WORLD
    found: dict[str, dict[int, float]] = {}
    for kind in KINDS:
        found[kind] = {}
        for size in SIZES:
            seconds = torch.tensor(_collective_seconds(kind, size, rank, ranks, device, group), dtype=torch.float64, device=device)
            dist.all_reduce(seconds, dist.ReduceOp.MAX, group=group)
            found[kind][size] = round(1e6 * median(seconds.tolist()), 1)
        for smaller, larger in reversed(list(pairwise(SIZES))):  # if fewer bytes took longer, another program disturbed that measurement
            found[kind][smaller] = min(found[kind][smaller], found[kind][larger])
    return found


def _collective_seconds(kind: str, size: int, rank: int, ranks: int, device: torch.device, group: Any) -> list[float]:
    """Return this rank's seconds for each of CALLS calls of a collective (kind: one of KINDS), after two warm-up calls. size: bytes of its
    input, output or message, as described at SIZES."""
    whole = torch.zeros(max(ranks, size // 4 // ranks * ranks), device=device)
    part = whole[: whole.numel() // ranks].clone()
    other = torch.empty_like(whole)
    seconds: list[float] = []
    for _ in range(CALLS + 2):
        dist.barrier(group=group)
        began = time.perf_counter()
        if kind == "all_reduce":
            dist.all_reduce(whole, group=group)
        elif kind == "all_gather":
            _all_gather(other, part, group=group)
        elif kind == "all_to_all":
            dist.all_to_all_single(other, whole, group=group)
        elif rank < 2:
            (dist.send if rank == 0 else dist.recv)(whole, 1 - rank, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return seconds[2:]


def _times(ranks: int, place: str) -> dict[int, dict[str, dict[int, float]]]:
    """Measure collectives. Return number of ranks (2, 4, 8 ... and `ranks`) -> kind -> bytes -> microseconds. place: cpu or cuda."""
    counts = sorted({n for n in (2, 4, 8, 16, 32, 64, ranks) if 1 < n <= ranks})
    return {n: run_on_ranks(collectives, n, n, place, timeout_s=TIMEOUT_S)[0] for n in counts}


def _threads(cores: int) -> dict[int, float]:
    """Measure a matrix product with 1, 2, 4, ... and `cores` threads. Return a dict: number of threads -> speed relative to one thread."""
    counts = sorted({n for n in (1, 2, 4, 8, 16, 32, 64, cores) if n <= cores})
    found = {count: run_on_ranks(_with_threads, 1, count, timeout_s=TIMEOUT_S)[0] for count in counts}
    return {count: round(found[1] / seconds, 3) for count, seconds in found.items()}


def _with_threads(_: int, count: int) -> float:
    torch.set_num_threads(count)
    m, n, k = THREADED
    a, b = torch.randn(m, k), torch.randn(k, n)
    return kernels.timed(lambda: torch.mm(a, b), own_step.CPU)


def sharded(kind: str) -> dict[str, Any]:
    """Return the recipe of a model with many small gathers in an FSDP step (section -> key -> value). kind: value of sharding.kind."""
    return recipe(*SHARDED) | {"sharding": {"kind": kind}, "pipeline": {"microbatches": 4}}


def recipe(layers: int, width: int, hidden: int, heads: int, length: int, sequences: int) -> dict[str, Any]:
    """Return the recipe of a dense fp32 model with these sizes on one rank (section -> key -> value)."""
    model = {"num_layers": layers, "d_model": width, "d_ff": hidden, "num_heads": heads, "max_length": length, "vocab_size": 512}
    train = {"global_batch": sequences, "eval_sequences": sequences}
    return {"model": model, "train": train, "precision": {"compute": "fp32"}, "optimizer": {"warmup_steps": 0}}


def _typical(found: list[Any]) -> Any:
    """Return the median over ranks of each measured value. found: the result of each rank: dicts, lists and numbers, equally nested."""
    first = found[0]
    if isinstance(first, dict):
        return {key: _typical([one[key] for one in found]) for key in first}
    return [_typical(list(of)) for of in zip(*found, strict=True)] if isinstance(first, list) else median(found)


# --- results as a cluster file -----------------------------------------------------------------------------------------


def device(name: str, memory_gib: float, units: int, found: dict[str, Any]) -> Device:
    """Return a Device from measurements. units: number of multiprocessors, 1 for a CPU core; found: the result of kernels.measure."""
    peaks = {kind: round(max(rates.values()), 4) for kind, rates in found["rates"].items()}
    kind = "bf16" if units > 1 and "bf16" in peaks else "fp32"
    times = found["attention"][kind]
    channels = 64  # head size for which Device.attention (a fraction of the fastest product's FLOP/s) is computed
    of_operation = (times[0] + times[1] / (4 * channels), times[2] + times[3] / (10 * channels))
    forward, backward = (min(1.0, round(1 / one / peaks[kind], 4)) for one in of_operation)
    rates = {kind: {flops: round(rate, 5) for flops, rate in rates.items()} for kind, rates in found["rates"].items()}
    attention: dict[str, Any] = {
        "attention": (forward, backward),
        "attention_times": {kind: [round(one, 3) for one in of] for kind, of in found["attention"].items()},
    }
    memory = {"memory_gib": round(memory_gib, 3), "memory_gb_s": round(found["memory_gb_s"], 3), "memory_share": 1.0}
    launch = round(found["launch_us"], 3)
    return Device(name=name, units=units, peak_tflops=peaks, rates=rates, sustained=1.0, launch_us=launch, **memory, **attention)


def inside(times: dict[int, dict[str, dict[int, float]]]) -> Inside:
    """Return bandwidth and latency inside one machine. times: number of ranks -> kind of collective -> bytes -> microseconds."""
    smallest, largest, two = min(SIZES), max(SIZES), times[min(times)]
    bus = {n: round((n - 1) / n * largest / found["all_gather"][largest] / 1e3, 4) for n, found in times.items()}
    tables = {kind: {n: found[kind] for n, found in times.items()} for kind in KINDS if kind != "send"}
    pair, tables["send"] = round(largest / two["send"][largest] / 1e3, 4), {2: two["send"]}
    return Inside(bus_gb_s=bus, latency_us=two["all_reduce"][smallest], hop_us=0.0, pair_gb_s=pair, times=tables)


def program(cluster: Cluster, at_once: int) -> dict[str, float]:
    """Return a cluster file's values launch_us, pointwise and step_ms by name. They are fitted to training steps of `at_once` processes,
    each of which trains its own model."""
    from scipy.optimize import nnls

    found = run_on_ranks(own_step.in_turn, at_once, at_once, [recipe(*size) for size in STEPS], True, timeout_s=TIMEOUT_S)
    measured = [median(of) for of in zip(*found, strict=True)]
    alone = replace(cluster, cores=1, devices_per_node=1)
    names = ("launch_us", "pointwise", "step_ms")
    rows, wanted = [], []
    for size, seconds in zip(STEPS, measured, strict=True):
        run = build_run(recipe(*size)).resolve(1)

        def predicted(run: Any = run, **constants: float) -> float:
            changed = replace(OWN_ON_CPU, **(dict.fromkeys(names, 0.0) | constants))  # type: ignore[arg-type]
            return step_time(network_of(run), plan_of(run), alone, changed).step

        base = predicted()
        rows.append([(predicted(**{name: 10.0}) - base) / 10.0 / seconds for name in names])
        wanted.append((seconds - base) / seconds)
    values, _ = nnls(rows, wanted)
    return {name: round(float(value), 4) for name, value in zip(names, values, strict=True)}


def gather_us(cluster: Cluster) -> float:
    """Return the host's microseconds for one FSDP gather, in addition to its collective. The value follows from the difference between FSDP
    and DDP steps measured on two ranks."""
    ENGINES[CUT].load()  # imported before ranks are forked, so that not every rank imports it
    measured = run_on_ranks(own_step.in_turn, 2, 2, [sharded(kind) for kind in (PLAIN, CUT)], timeout_s=TIMEOUT_S)[0]
    two = cluster.holding(2)

    def longer(microseconds: float) -> float:
        """Predicted seconds of FSDP's step minus DDP's, with gather_us = microseconds."""
        made = replace(own_program(two), gather_us=microseconds)
        runs = [build_run(sharded(kind)).resolve(2) for kind in (PLAIN, CUT)]
        plain, fsdp = (step_time(network_of(run), plan_of(run), two, made).step for run in runs)
        return fsdp - plain

    base = longer(0.0)
    each = longer(1.0) - base
    return round(max(0.0, float(measured[1] - measured[0]) - base) / each, 1)


def _lines(made: Cluster) -> Iterator[str]:
    one = made.device
    yield f"{made.devices_per_node} x {one.name}, {one.memory_gib:.1f} GiB" + (f", {counted(made.cores, 'core')}" if made.cores else "")
    for kind, rates in one.rates.items():
        listed = ", ".join(f"{1e3 * rate:.3g} at {flops / 1e6:.3g}" for flops, rate in sorted(rates.items()))
        yield f"products, {kind}: GFLOP/s by millions of operations: {listed}"
    shares = f"forward {one.attention[0]:.0%}, backward {one.attention[1]:.0%}"
    yield f"memory {one.memory_gb_s:.3g} GB/s; attention {shares} of the fastest product's rate"
    for kind, table in made.inside.times.items():
        for n, row in table.items():
            yield f"{kind}, {n} ranks: " + ", ".join(f"{us:.0f} us at {size // 1024} KiB" for size, us in row.items())
    if made.program:
        yield "constants of a step: " + ", ".join(f"{name} {value:.3g}" for name, value in made.program.items())
