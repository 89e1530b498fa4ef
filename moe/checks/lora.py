"""Checks of LoRA (lora.rank): refuses recipes in which adapters (moe/nn/lora.py) cannot be trained."""

from __future__ import annotations

from moe.checks.clash import check_others, clash
from moe.kernels.products import PRODUCTS
from moe.recipe.sections import Run
from parallel.errors import BadInput
from parallel.fixes import Fix, Set


def check_lora(run: Run) -> None:
    """Raise BadInput for targets that the model does not have, and for settings with which adapters cannot be trained."""
    if not run.lora.rank:
        return
    _check_targets(run)
    works: dict[str, tuple[object, str]] = {
        "degrees.tp": (1, "ranks must hold whole matrices (ep and etp share experts)"),
        "degrees.pp": (1, "adapters need all layers in one stage"),
        "tiling.ffn": (1, "adapters need whole matrices"),
        "experts.rebalance_every": (0, "adapters need experts that stay on their ranks"),
        "sharding.offload.optimizer": ("none", "optimizer states on the device: an adapter's states are small"),
        "sharding.offload.parameters": ("none", "adapters need the frozen weights on the device"),
        "train.audit_every": (0, "an audit needs weights that are in the run's own checkpoints"),
    }
    no_adapters = Set("lora.rank", 0)
    check_others(run, "lora.rank", works, no_adapters)
    if run.optimizer.kind == "kfac":
        needed = "another kind: K-FAC preconditions whole matrices"
        raise clash(run, "optimizer.kind", "lora.rank", "adamw", "", no_adapters, needed=needed)


def _check_targets(run: Run) -> None:
    targets = run.lora.targets
    if not targets or len(set(targets)) < len(targets):
        needed = "some of attention, experts, dense, each once"
        raise BadInput("lora.targets", got=list(targets), needed=needed, fix=Set("it", ["attention"]))
    if "experts" in targets and not run.model.layers_with_experts():
        raise BadInput("lora.targets", got="experts in a dense model", needed="layers with experts", fix=_without("experts", targets))
    if "experts" in targets and not (products := PRODUCTS[run.experts.products]).fused:
        got, needed = f"experts with {products.name} products", "plain products: adapters of experts support no others"
        raise BadInput("lora.targets", got=got, needed=needed, fix=_without("experts", targets))
    if "dense" in targets and not run.has_dense_networks:
        needed = "layers without experts, shared experts or a residual network"
        raise BadInput("lora.targets", got="dense with experts in every layer", needed=needed, fix=_without("dense", targets))


def _without(target: str, targets: tuple[str, ...]) -> Fix:
    return Set("it", [each for each in targets if each != target] or ["attention"])
