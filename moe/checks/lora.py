"""Checks of LoRA (lora.rank): refuses recipes in which adapters (moe/nn/lora.py) cannot be trained."""

from __future__ import annotations

from moe.checks.clash import check_others, clash
from moe.kernels.products import PRODUCTS
from moe.plan.job.cut import empty_rank
from moe.plan.pipeline import layers_of, schedule_of
from moe.recipe.sections import Run
from moe.recipe.shapes import MXFP4_BLOCK
from parallel.errors import BadInput
from parallel.fixes import Fix, Set, written


def check_lora(run: Run) -> None:
    """Raise BadInput for targets that the model does not have, and for settings with which adapters cannot be trained."""
    if not run.lora.rank:
        return
    _check_targets(run)
    works: dict[str, tuple[object, str]] = {
        "tiling.ffn": (1, "tiles of a matrix would need one A or B together, which no tile can gather and free for itself"),
        "train.audit_every": (0, "an audit needs weights that are in the run's own checkpoints"),
    }
    no_adapters = Set("lora.rank", 0)
    check_others(run, "lora.rank", works, no_adapters)
    _check_stages(run)
    _check_base(run)
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


def _check_base(run: Run) -> None:
    """Raise BadInput if the frozen experts cannot be kept in the blocks of lora.base."""
    form = run.lora.in_blocks
    if form is None:
        return
    whole = Set("lora.base", "whole")
    if not run.model.layers_with_experts():
        raise BadInput("lora.base", got=f"{form} in a dense model", needed="layers with experts, which alone are kept in blocks", fix=whole)
    works: dict[str, tuple[object, str]] = {
        "degrees.etp": (1, "blocks are of whole matrices, which etp would cut"),
        "experts.rebalance_every": (0, "experts in blocks stay on their ranks"),
        "experts.products": ("plain", "matrices are decoded for plain products"),
    }
    check_others(run, "lora.base", works, whole)
    if run.sharding.named.threads:
        needed = "ddp, fsdp or zero: the replicas of dp would need the blocks on each device"
        raise clash(run, "sharding.kind", "lora.base", "ddp", "", whole, needed=needed)
    sizes = {"model.d_model": run.model.d_model, "experts.d_ff": run.experts.d_ff or run.model.d_ff}
    for key, size in sizes.items() if form == "mxfp4" else ():
        if size % MXFP4_BLOCK:
            raise BadInput(key, got=f"{size} with lora.base=mxfp4", needed=f"a multiple of {MXFP4_BLOCK}, a block's elements", fix=whole)


def _check_stages(run: Run) -> None:
    """Raise BadInput if a rank of the pipeline could have no adapter: its optimizer would have nothing to update."""
    if run.degrees.pp == 1:
        return
    targets, sparse, besides = run.lora.targets, run.model.layers_with_experts(), run.experts.shared or run.experts.residual
    layers = range(run.model.num_layers)
    held = [bool({"attention", *(("experts", *["dense"] * bool(besides)) if n in sparse else ("dense",))} & {*targets}) for n in layers]
    if not all(held):
        got, needed = (
            f"{written(list(targets))} with degrees.pp={run.degrees.pp}",
            "adapters in every layer: a stage without them trains nothing",
        )
        raise BadInput("lora.targets", got=got, needed=needed, fix=Set("it", ["attention", *targets]) | Set("degrees.pp", 1))
    schedule = schedule_of(run)
    bare = empty_rank([len(part) for part in layers_of(run, schedule)], schedule.homes, ends=False)
    if bare is not None:
        got = f"{written(list(run.pipeline.layers or ()))}, which leaves rank {bare} of the pipeline without adapters"
        raise BadInput("pipeline.layers", got=got, needed="a layer on every rank", fix=Set("it", None, said="null, for a cut by FLOPs"))


def _without(target: str, targets: tuple[str, ...]) -> Fix:
    return Set("it", [each for each in targets if each != target] or ["attention"])
