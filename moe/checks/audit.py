"""Combinations in which a step cannot be computed twice with the same bits: for `train.audit_every` and `train.deterministic`."""

from __future__ import annotations

from moe.plan.pipeline import continuous
from moe.recipe.sections import Run
from parallel.errors import BadInput
from parallel.fixes import Set


def check_audit(run: Run) -> None:
    """Refuse audits of steps that cannot be computed again, and `deterministic` with sums in no fixed order. Raises BadInput."""
    threads = "one order of sums: replicas' gradients are added as their threads end"
    if run.train.deterministic and run.sharding.named.threads:
        raise BadInput(
            "train.deterministic",
            got="true with sharding.kind=dp",
            needed=threads,
            fix=Set("sharding.kind", "ddp") | Set("train.deterministic", False),
        )
    if not run.train.audit_every:
        return
    offload = run.sharding.offload
    reasons = {
        f"it with pipeline.schedule={run.pipeline.schedule}": (continuous(run), "a step that ends before its update, to be computed twice"),
        "it with sharding.kind=dp": (run.sharding.named.threads, f"{threads} (sharding.kind ddp has one)"),
        "it with optimizer.kind=kfac": (
            run.optimizer.kind == "kfac",
            "passes that leave nothing but gradients: K-FAC's factors would count a batch twice",
        ),
        "it with states on nvme": ("nvme" in (offload.optimizer, offload.parameters), "states in memory, which can be compared"),
    }
    for got, (refused, needed) in reasons.items():
        if refused:
            raise BadInput("train.audit_every", got=got, needed=needed, fix=Set("train.audit_every", 0))
