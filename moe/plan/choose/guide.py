"""Rules of thumb for choosing a parallel strategy, each with the planner's predictions for the given model and cluster.

    one device      if the model does not fit: ZeRO with offload, then tiling
    one node        DDP or ZeRO;  if the model does not fit on one device: pipeline, ZeRO or tensor parallelism, depending on the links
    many nodes      fast network: ZeRO, or pipeline + tensor + data;  slow network: data + pipeline + tensor with ZeRO-1
    always          no pipeline with ZeRO-2 or 3;  bf16 rather than fp16

If the predictions contradict a rule, the guide says so. Sources: ZeRO (arXiv 1910.02054), Narayanan et al. (arXiv 2104.04473) sections 3
and 5, BLOOM (arXiv 2211.05100) section 3.3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from moe.plan.choose.choose import Ranked, described
from moe.plan.job.network import Plan
from moe.plan.machine.cluster import Cluster

_GIB = 2**30
ABOUT_EQUAL = 0.1  # two times are called about equal if they differ by less than this fraction
FAST_LINK = 50.0  # GB/s: links in a node are called fast if a device sends at least at this rate; NVLink has 100 and more, PCIe 10 to 30

# name of a family of plans, such as ZeRO -> function that returns whether a plan belongs to this family
FAMILIES: dict[str, Callable[[Plan], bool]] = {
    "DDP": lambda p: _data_alone(p) and p.stage == 0,
    "ZeRO": lambda p: _data_alone(p) and p.stage > 0,
    "tensor": lambda p: p.tp > 1 and p.pp == p.sp == p.dp == 1,
    "pipeline": lambda p: p.pp > 1 and p.tp == p.sp == p.dp == 1,
    "pipeline + tensor + data": lambda p: p.pp > 1 and p.tp > 1 and p.sp == 1 and p.stage <= 1,
    "pipeline + ZeRO-3": lambda p: p.pp > 1 and p.stage == 3,
    "pipeline + ZeRO-1": lambda p: p.pp > 1 and p.stage == 1,
}


def _data_alone(plan: Plan) -> bool:
    return plan.tp == plan.pp == plan.sp == 1


Best = Callable[[str, int], Ranked | None]  # (name in FAMILIES, number of devices) -> its fastest plan that fits; None if no plan fits


@dataclass(frozen=True)
class GuideRule:
    """One rule of thumb. numbers: a text with the predictions. holds: whether the predictions agree with the rule; None if the predictions
    allow no conclusion."""

    rule: str
    numbers: str
    holds: bool | None = None

    def __str__(self) -> str:
        judged = {True: "confirmed here", False: "not so here", None: "as a rule"}[self.holds]
        return f"{self.rule} [{judged}]\n    {self.numbers}"


def guide_rules(best: Best, cluster: Cluster, *, one_device: Ranked, offloaded: Ranked | None, compute: str) -> Iterator[GuideRule]:
    """Yield the rules of the strategy guide that apply to the cluster. best: finds the fastest plan of a family. compute: dtype in which
    the recipe computes.

    one_device: the plan for one device that needs the least device memory without offload, even if it does not fit. offloaded: the plan for
    one device with model states in the host's memory; None: there is none.
    """
    limit = cluster.memory_bytes()
    fits = one_device.held_bytes <= limit
    yield _single(one_device, offloaded, limit)
    node = cluster.devices_per_node
    yield from _node(best, node, fits=fits, link_gb_s=cluster.inside.bus(node) / 1e9)
    if cluster.nodes > 1:
        yield from _nodes(best, cluster)
    yield from _always(best, cluster)
    yield _precision(cluster.device.peak_tflops, compute)


def _single(one: Ranked, offloaded: Ranked | None, limit: float) -> GuideRule:
    need = f"{one.held_bytes / _GIB:.4g} GiB of {limit / _GIB:.4g}"
    if one.held_bytes <= limit:
        return GuideRule("One device holds the model: more devices are for speed.", f"{need}, {one.seconds:.4g} s a step", True)
    numbers = f"{need}, with full recompute"
    if offloaded is None:
        return GuideRule("One device does not hold the model: ZeRO with offload, then tiling of large matrices.", numbers)
    rest = "fits" if offloaded.held_bytes <= limit else "does not fit either: tile the largest matrices, or take more devices"
    numbers += f"; with states on the host {offloaded.held_bytes / _GIB:.4g} GiB, which {rest}, and {offloaded.seconds:.4g} s a step"
    return GuideRule(
        "One device does not hold the model: ZeRO with offload, then tiling of large matrices.", numbers, offloaded.held_bytes <= limit
    )


def _node(best: Best, devices: int, *, fits: bool, link_gb_s: float) -> Iterator[GuideRule]:
    if devices == 1:
        return
    found = {name: best(name, devices) for name in ("DDP", "ZeRO", "tensor", "pipeline")}
    numbers = _listed(found)
    copies = [r for r in (found["DDP"], found["ZeRO"]) if r is not None]
    cut = [r for r in (found["tensor"], found["pipeline"]) if r is not None]
    if fits:
        holds = bool(copies) and (not cut or min(r.seconds for r in copies) <= min(r.seconds for r in cut))
        yield GuideRule(f"One node of {devices}, and a device holds the model: DDP or ZeRO.", numbers, holds)
        return
    yield GuideRule(
        f"One node of {devices}, and no device holds the model: ZeRO, a pipeline or tensor parallelism.", numbers, bool(copies or cut)
    )
    tensor, pipeline = found["tensor"], found["pipeline"]
    if tensor is not None and pipeline is not None:
        apart = tensor.seconds / pipeline.seconds - 1
        words = "about equal" if abs(apart) < ABOUT_EQUAL else "slower" if apart > 0 else "faster"
        numbers = f"{link_gb_s:.4g} GB/s a device; tensor parallelism is {words} ({apart:+.0%})"
        if link_gb_s >= FAST_LINK:
            yield GuideRule(
                "Fast links within the node: tensor parallelism and a pipeline are about equal.", numbers, abs(apart) < ABOUT_EQUAL
            )
        else:
            yield GuideRule("Slow links within the node: the pipeline before tensor parallelism.", numbers, apart > 0)


def _nodes(best: Best, cluster: Cluster) -> Iterator[GuideRule]:
    found = {name: best(name, cluster.world) for name in ("ZeRO", "pipeline + tensor + data", "pipeline + ZeRO-1")}
    rate = cluster.between.node_gb_s / cluster.devices_per_node
    fast = rate >= 12.5  # GB/s, which is 100 Gbit/s for each device
    rule = (
        "Many nodes, a fast network: ZeRO, or pipeline + tensor + data parallelism."
        if fast
        else "Many nodes, a slow network: data + pipeline + tensor parallelism, with ZeRO-1."
    )
    three, zero = found["pipeline + tensor + data"] or found["pipeline + ZeRO-1"], found["ZeRO"]
    holds = None
    if three is not None or zero is not None:
        holds = fast or zero is None or (three is not None and three.seconds <= zero.seconds)
    yield GuideRule(rule, f"{rate:.4g} GB/s a device; {_listed(found)}", holds)


def _always(best: Best, cluster: Cluster) -> Iterator[GuideRule]:
    whole, sharded = best("pipeline + ZeRO-1", cluster.world), best("pipeline + ZeRO-3", cluster.world)
    if whole is not None and sharded is not None:
        apart = sharded.seconds / whole.seconds - 1
        yield GuideRule(
            "A pipeline goes with DDP or ZeRO-1: ZeRO-2 and 3 would scatter and gather for every micro-batch.",
            f"with ZeRO-3 the step takes {apart:+.1%} ({sharded.held_bytes / _GIB:.4g} GiB instead of {whole.held_bytes / _GIB:.4g})",
            apart >= 0,
        )


def _precision(peaks: dict[str, float], compute: str) -> GuideRule:
    rates = ", ".join(f"{kind} {peaks[kind]:.4g} TFLOP/s" for kind in ("bf16", "fp16", "fp32") if kind in peaks)
    numbers = f"at most {rates}; the recipe computes in {compute}"
    if "bf16" in peaks:
        rule = "The device has bf16: prefer it to fp16, which needs loss scaling."
        return GuideRule(rule, numbers, peaks["bf16"] >= peaks.get("fp16", 0.0))
    if compute == "bf16":
        numbers += ", which this device only emulates: it is slower than fp16, but is predicted to be as fast"
    return GuideRule("The device has no bf16: fp16 with precision.loss_scale=dynamic, or fp32.", numbers, None)


def _listed(found: dict[str, Ranked | None]) -> str:
    texts = [f"{name} " + (f"{r.seconds:.4g} s ({described(r.plan)})" if r else "does not fit or cannot run") for name, r in found.items()]
    return "; ".join(texts)
