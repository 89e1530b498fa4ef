"""Combinations in which adapters on frozen weights cannot be trained (moe/nn/lora.py). Refused in one line, before torch is imported."""

from __future__ import annotations

from moe.recipe.sections import Run
from parallel.errors import BadInput
from parallel.fixes import Fix, Set


def check_lora(run: Run) -> None:
    """Refuse targets that the model lacks, and layouts that would cut an adapter's product. Raises BadInput."""
    lora = run.lora
    if not lora.rank:
        return
    _check_targets(run)
    s = run.sharding
    reasons: dict[str, tuple[object, object, str]] = {
        "degrees.tp": (run.degrees.tp, 1, "ranks that hold the matrices whole (ep and etp share experts)"),
        "degrees.pp": (run.degrees.pp, 1, "one stage"),
        "tiling.ffn": (run.tiling.ffn, 1, "whole matrices"),
        "experts.rebalance_every": (run.experts.rebalance_every, 0, "experts that stay on their ranks"),
        "sharding.offload.optimizer": (s.offload.optimizer, "none", "states on the device: adapters' are small"),
        "sharding.offload.parameters": (s.offload.parameters, "none", "states on the device"),
        "optimizer.kind": ("kfac" if run.optimizer.kind == "kfac" else "", "", "another kind: K-FAC's factors are of whole matrices"),
        "train.audit_every": (run.train.audit_every, 0, "weights that are in the run's own checkpoints"),
    }  # fmt: skip
    for key, (value, needed, why) in reasons.items():
        if value != needed:
            fix = Set("lora.rank", 0) | Set(key, {"optimizer.kind": "adamw"}.get(key, needed))
            raise BadInput(key, got=f"{value} with lora.rank={lora.rank}", needed=why, fix=fix)


def _check_targets(run: Run) -> None:
    m, x, targets = run.model, run.experts, run.lora.targets
    if not targets or len(set(targets)) < len(targets):
        raise BadInput(
            "lora.targets", got=list(targets), needed="some of attention, experts, dense, each once", fix=Set("it", ["attention"])
        )
    sparse = m.layers_with_experts()
    if "experts" in targets and not sparse:
        raise BadInput("lora.targets", got="experts in a dense model", needed="layers with experts", fix=_without("experts", targets))
    if "dense" in targets and len(sparse) == m.num_layers and not x.shared and not x.residual:
        needed = "layers without experts, shared experts or a residual network"
        raise BadInput("lora.targets", got="dense with experts in every layer", needed=needed, fix=_without("dense", targets))


def _without(target: str, targets: tuple[str, ...]) -> Fix:
    """Return the fix that leaves a target out."""
    return Set("it", [each for each in targets if each != target] or ["attention"])
