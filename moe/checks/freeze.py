"""Checks of train.freeze: each part must exist in the model, some weights must stay trained, and other keys must allow frozen weights."""

from __future__ import annotations

from moe.checks.clash import check_others
from moe.recipe.frozen import PARTS, layers_of
from moe.recipe.sections import Run
from parallel.errors import BadInput, did_you_mean
from parallel.fixes import Fix, Remove, Set

_KEY = "train.freeze"


def check_freeze(run: Run) -> None:
    """Raise BadInput for parts that the model does not have, and for settings that do not work with frozen weights."""
    parts = run.train.freeze
    if not parts:
        return
    for part in parts:
        _check_part(run, part)
    _check_trained(run)
    check_others(run, _KEY, {"lora.rank": (0, "adapters freeze all other weights")}, Remove(_KEY))


def _check_part(run: Run, part: str) -> None:
    layers, depth = layers_of(part), run.model.num_layers
    if layers is None and part not in PARTS:
        near = did_you_mean(part, PARTS)
        needed = f"{', '.join(PARTS)}, layers.N or layers.N-M"
        raise BadInput(_KEY, got=part, needed=needed, fix=_with(run, part, near) if near else Remove(_KEY))
    if layers is not None and not 0 <= layers.start < layers.stop <= depth:
        raise BadInput(_KEY, got=part, needed=f"layers from 0 to {depth - 1}, as layers.FIRST-LAST", fix=_without(run, part))
    if part == "head" and run.model.tied_embeddings:
        raise BadInput(_KEY, got=part, needed="a head that is not tied to the embedding", fix=_with(run, part, "embedding"))
    if part in _lacking(run):
        needed = "layers without experts, shared experts or a residual network" if part == "dense" else "layers with experts"
        raise BadInput(_KEY, got=part, needed=needed, fix=_without(run, part))


def _check_trained(run: Run) -> None:
    """Raise BadInput if all weights are frozen, or if a pipeline stage could have only frozen weights, and so no backward pass."""
    parts, depth = run.train.freeze, run.model.num_layers
    layers = {layer for part in parts for layer in layers_of(part) or ()}
    inside = len(layers) == depth or {"attention", "dense", "experts", "router", "norms"} <= {*parts, *_lacking(run)}
    ends = {"embedding", "norms"} | (set() if run.model.tied_embeddings else {"head"})
    if inside and ends <= set(parts) and not run.model.ahead:
        got, needed = f"all of the model: {', '.join(parts)}", "some weights that are trained"
        raise BadInput(_KEY, got=got, needed=needed, fix=_without(run, parts[-1]))
    if run.degrees.pp > 1 and (layers or {"attention", "norms"} <= set(parts)):
        needed = "attention or norms trained in all layers: a stage without a trained weight has no backward pass"
        got = f"{', '.join(parts)} with degrees.pp={run.degrees.pp}"
        raise BadInput(_KEY, got=got, needed=needed, fix=Set("degrees.pp", 1) | Remove(_KEY))


def _lacking(run: Run) -> set[str]:
    """Return the parts that train.freeze may name and that no layer of this model has."""
    return (set() if run.model.layers_with_experts() else {"experts", "router"}) | (set() if run.has_dense_networks else {"dense"})


def _with(run: Run, part: str, other: str) -> Fix:
    return Set("it", list(dict.fromkeys(other if each == part else each for each in run.train.freeze)))


def _without(run: Run, part: str) -> Fix:
    return Set("it", rest) if (rest := [each for each in run.train.freeze if each != part]) else Remove(_KEY)
