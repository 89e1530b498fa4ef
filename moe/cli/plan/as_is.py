"""`moe plan RECIPE --cluster NAME --as-is`: the recipe's own plan with its predicted seconds and bytes. No other plan is tried.

moe plan published/bloom_176b --cluster jeanzayx48 --as-is

A plan that does not fit is predicted nevertheless, and the output says that it does not fit. A recipe that the checks refuse is refused.
"""

from __future__ import annotations

from moe.checks.together import check_run
from moe.plan.choose.choose import Ranked, Ranking, described
from moe.plan.choose.legal import advice
from moe.plan.choose.planned import Planned, gib
from moe.plan.choose.predicted import held_bytes, stack_on
from moe.plan.job.of_recipe import network_of, plan_of
from moe.plan.machine.cluster import Cluster
from moe.plan.time.cost import step_time
from moe.recipe.sections import Run


def as_is(run: Run, cluster: Cluster) -> Planned:
    """The recipe's plan alone, on all devices of the cluster. Raises BadInput if the recipe's checks refuse it there."""
    made = check_run(run, cluster.world)
    network, plan = network_of(made), plan_of(made)
    held = held_bytes(network, plan, cluster)
    not_recommended = advice(network, plan, devices_per_node=cluster.devices_per_node)
    ranked = Ranked(plan, step_time(network, plan, cluster).step, held, not_recommended)
    fits = held <= cluster.memory_bytes()
    return Planned(network, cluster, Ranking(1, int(fits), (ranked,), ()), (made,))


def lines(made: Planned) -> list[str]:
    """The plan, its speed, and its bytes on every rank of the pipeline, as lines of text."""
    from moe.plan.memory.memory import memory
    from moe.report.planned import table

    (ranked,), cluster = made.found.ranked, made.cluster
    fits = "fits" if made.found.fitting else f"does not fit {cluster.memory_bytes() / 2**30:.4g} GiB"
    speed = made.speed(ranked)
    share = "" if speed.mfu is None else f" ({speed.mfu:.1%} of the peak)"
    fits += ", but tight: it uses the last tenth" if made.found.fitting and made.tight(ranked) else ""
    text = [
        f"the recipe's own plan: {described(ranked.plan)}",
        f"{ranked.seconds:.4g} s a step, {speed.tokens_per_s:,.0f} tokens/s, {speed.tflops:.4g} TFLOP/s a device{share}; "
        f"{gib(ranked.held_bytes)} GiB on the fullest rank: {fits}",
    ]
    if ranked.advice:
        text.append(f"not recommended: {ranked.advice}")
    parts = made.time(ranked.plan).parts
    shares = sorted(((name, s) for name, s in parts.items() if s >= 0.005 * ranked.seconds), key=lambda p: -p[1])
    text.append("time: " + ", ".join(f"{name} {s / ranked.seconds:.0%}" for name, s in shares))
    return [*text, "", table(memory(made.network, ranked.plan, stack_on(cluster)), context=not cluster.cores)]
