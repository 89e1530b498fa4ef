"""Checks of frozen weights: lora.rank freezes all weights but the LoRA adapters (moe/nn/lora.py), and train.freeze freezes the named parts
of the model. These parts must exist, some weights must stay trained, and other keys must allow frozen weights."""

from __future__ import annotations

from moe.checks.clash import check_others, clash
from moe.kernels.products import PRODUCTS
from moe.plan.job.cut import empty_rank
from moe.plan.pipeline import layers_of, schedule_of
from moe.recipe.frozen import PARTS
from moe.recipe.frozen import layers_of as frozen_layers_of
from moe.recipe.sections import Run
from moe.recipe.shapes import MXFP4_BLOCK
from parallel.errors import BadInput, did_you_mean
from parallel.fixes import Fix, Remove, Set, written

_FREEZE = "train.freeze"
_NETWORKS = "dense layers, shared experts or a residual network"


def check_lora(run: Run) -> None:
    """Raise BadInput for targets that the model does not have, and for settings with which adapters cannot be trained."""
    if not run.lora.rank:
        return
    _check_targets(run)
    no_adapters = Set("lora.rank", 0)
    tiles = "tiles of a matrix would share its LoRA factors, which no tile can gather and free for itself"
    check_others(run, "lora.rank", {"tiling.ffn": (1, tiles)}, no_adapters)
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
        raise BadInput("lora.targets", got="experts in a dense model", needed="layers with experts", fix=_targets(run, "experts"))
    if "experts" in targets and not (products := PRODUCTS[run.experts.products]).fused:
        got, needed = f"experts with {products.name} products", "experts.products=plain, the only value that LoRA on experts allows"
        raise BadInput("lora.targets", got=got, needed=needed, fix=_targets(run, "experts"))
    if "dense" in targets and not run.has_dense_networks:
        raise BadInput("lora.targets", got="dense in a model with experts in every layer", needed=_NETWORKS, fix=_targets(run, "dense"))


def _check_base(run: Run) -> None:
    """Raise BadInput if the frozen matrices cannot stay in the MXFP4 or FP8 blocks that lora.base names."""
    form, whole = run.lora.base, Set("lora.base", "whole")
    if not run.lora.blocks_of:
        return
    if form != "fp8_all" and not run.model.layers_with_experts():
        needed = "layers with experts: only matrices of experts are kept in these blocks"
        raise BadInput("lora.base", got=f"{form} in a dense model", needed=needed, fix=whole)
    works: dict[str, tuple[object, str]] = {
        "degrees.etp": (1, "MXFP4 and FP8 blocks are made of whole matrices, which etp would cut"),
        "experts.products": ("plain", "matrices are decoded for plain products"),
    }
    check_others(run, "lora.base", works, whole)
    if form == "fp8_all":
        check_others(run, "lora.base", {"degrees.tp": (1, "blocks are made of whole matrices, which tp cuts")}, Set("lora.base", "fp8"))
    sizes = {"model.d_model": run.model.d_model, "experts.d_ff": run.experts.d_ff or run.model.d_ff}
    for key, size in sizes.items() if form == "mxfp4" else ():
        if size % MXFP4_BLOCK:
            raise BadInput(key, got=f"{size} with lora.base=mxfp4", needed=f"a multiple of {MXFP4_BLOCK}, the size of a block", fix=whole)


def _check_stages(run: Run) -> None:
    """Raise BadInput with DeepSpeed if a pipeline rank could have no adapter, because its optimizer would have nothing to update."""
    if run.degrees.pp == 1 or run.carrier.steps != "elements":
        return
    targets, sparse = run.lora.targets, run.model.layers_with_experts()
    beside_experts = {"dense"} if run.experts.shared or run.experts.residual else set[str]()
    parts = [{"attention", "experts"} | beside_experts if n in sparse else {"attention", "dense"} for n in range(run.model.num_layers)]
    if any(of_layer.isdisjoint(targets) for of_layer in parts):
        got = f"{written(list(targets))} with degrees.pp={run.degrees.pp} and {run.carrier.name}"
        needed = "adapters in every layer: DeepSpeed's optimizer needs a trained weight on every rank"
        fix = Set("it", ["attention", *targets]) | Set("sharding.kind", "ddp") | Set("degrees.pp", 1)
        raise BadInput("lora.targets", got=got, needed=needed, fix=fix)
    schedule = schedule_of(run)
    bare = empty_rank([len(part) for part in layers_of(run, schedule)], schedule.homes, ends=False)
    if bare is not None:
        got = f"{written(list(run.pipeline.layers or ()))}, which gives rank {bare} of the pipeline no layer and so no adapters to train"
        fix = Set("it", None, said="null, for a cut by FLOPs")
        raise BadInput("pipeline.layers", got=got, needed="at least one layer on every rank", fix=fix)


def _targets(run: Run, without: str) -> Fix:
    """Return the fix that takes `without` out of lora.targets."""
    return Set("it", [each for each in run.lora.targets if each != without] or ["attention"])


def check_freeze(run: Run) -> None:
    """Raise BadInput for parts that the model does not have, and for settings that do not work with frozen weights."""
    parts = run.train.freeze
    if not parts:
        return
    for part in parts:
        _check_part(run, part)
    _check_trained(run)
    check_others(run, _FREEZE, {"lora.rank": (0, "adapters freeze all other weights")}, Remove(_FREEZE))


def _check_part(run: Run, part: str) -> None:
    layers, depth = frozen_layers_of(part), run.model.num_layers
    if layers is None and part not in PARTS:
        near = did_you_mean(part, PARTS)
        needed = f"{', '.join(PARTS)}, layers.N or layers.N-M"
        raise BadInput(_FREEZE, got=part, needed=needed, fix=_with(run, part, near) if near else Remove(_FREEZE))
    if layers is not None and not 0 <= layers.start < layers.stop <= depth:
        raise BadInput(_FREEZE, got=part, needed=f"layers from 0 to {depth - 1}, as layers.FIRST-LAST", fix=_without(run, part))
    if part == "head" and run.model.tied_embeddings:
        raise BadInput(_FREEZE, got=part, needed="a head that is not tied to the embedding", fix=_with(run, part, "embedding"))
    if part in _lacking(run):
        needed = _NETWORKS if part == "dense" else "layers with experts"
        raise BadInput(_FREEZE, got=part, needed=needed, fix=_without(run, part))


def _check_trained(run: Run) -> None:
    """Raise BadInput if all weights are frozen, or, with DeepSpeed, all weights of a pipeline stage could be."""
    parts, depth = run.train.freeze, run.model.num_layers
    layers = {layer for part in parts for layer in frozen_layers_of(part) or ()}
    inside = len(layers) == depth or {"attention", "dense", "experts", "router", "norms"} <= {*parts, *_lacking(run)}
    ends = {"embedding", "norms"} | (set() if run.model.tied_embeddings else {"head"})
    if inside and ends <= set(parts) and not run.model.ahead:
        got, needed = f"all of the model: {', '.join(parts)}", "some weights that are trained"
        raise BadInput(_FREEZE, got=got, needed=needed, fix=_without(run, parts[-1]))
    if run.degrees.pp > 1 and run.carrier.steps == "elements" and (layers or {"attention", "norms"} <= set(parts)):
        got = f"{', '.join(parts)} with degrees.pp={run.degrees.pp} and {run.carrier.name}"
        needed = "attention or norms trained in all layers: DeepSpeed's optimizer needs a trained weight on every rank"
        raise BadInput(_FREEZE, got=got, needed=needed, fix=Set("sharding.kind", "ddp") | Set("degrees.pp", 1) | Remove(_FREEZE))


def _lacking(run: Run) -> set[str]:
    """Return the parts that train.freeze may name and that no layer of this model has."""
    return (set() if run.model.layers_with_experts() else {"experts", "router"}) | (set() if run.has_dense_networks else {"dense"})


def _with(run: Run, part: str, other: str) -> Fix:
    """Return the fix that replaces `part` by `other` in train.freeze."""
    return Set("it", list(dict.fromkeys(other if each == part else each for each in run.train.freeze)))


def _without(run: Run, part: str) -> Fix:
    """Return the fix that takes `part` out of train.freeze."""
    return Set("it", rest) if (rest := [each for each in run.train.freeze if each != part]) else Remove(_FREEZE)
