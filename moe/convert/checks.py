"""Checks whether a source checkpoint can be converted to a recipe's model. Needs no torch.

A layer is unchanged, grown (dense to experts) or shrunk (experts to fewer experts, or to one dense network). A conversion may grow layers
or shrink layers, but not both.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from moe.recipe.keys import known_keys, value_of
from moe.recipe.sections import Router, Run
from moe.router.methods import method_of
from parallel.errors import BadInput, counted, some
from parallel.fixes import Set
from parallel.mesh.mesh import divisors

Method = Literal["auto", "copy", "granular", "noise", "drop", "merge", "prune"]
GROWING: tuple[Method, ...] = ("copy", "granular", "noise", "drop")
SHRINKING: tuple[Method, ...] = ("merge", "prune")

# keys in section `model` that a conversion may change; all other keys there must have the source's values
_FREE = ("vocab_size", "d_ff", "ffn", "max_length", "moe_every", "moe_layers", "document_mask", "document_separator", "ahead_weight",
         "dropout", "init_scale")  # fmt: skip
# router keys that decide which tensors a router has; must be equal in source and target if a layer has experts in both
ROUTER: tuple[str, ...] = ("logits", "input_norm", "expert_scale")


@dataclass(frozen=True)
class Settings:
    """Settings of a conversion, which are flags of `moe convert`. `method` auto: copy for layers that grow, merge for layers that shrink.

    `share`: fraction of the weights that get noise (method noise), or of the hidden units that are drawn anew (drop). `scale`: standard
    deviation of the noise, as a multiple of the matrix's standard deviation. `weights`: the mean of merged experts is uniform, or weighted
    by their load. `moments`: optimizer moments start at 0, or are copied. `approximate`: allow routers with gates that do not sum to a
    constant.
    """

    method: Method = "auto"
    share: float = 0.5
    scale: float = 0.01
    weights: Literal["uniform", "load"] = "uniform"
    moments: Literal["fresh", "copy"] = "fresh"
    approximate: bool = False

    @property
    def needs_load(self) -> bool:
        return self.method == "prune" or (self.method == "merge" and self.weights == "load")


def settings_of(given: dict[str, Any], *, approximate: bool) -> Settings:
    """Return the settings for `given`: flag -> value. approximate: see Settings. Raises BadInput for a flag that the method does not have,
    and for bad values."""
    takes = {"share": ("noise", "drop"), "scale": ("noise",), "weights": ("merge",), "moments": ("copy",)}
    for key, methods in takes.items():
        if key in given and "method" in given and given["method"] not in methods and given[key] != "fresh":
            got, needed = f"--{key} with --method {given['method']}", f"--method {' or '.join(methods)}"
            raise BadInput(f"--{key}", got=got, needed=needed, fix=f"remove --{key}")
        if key in given and "method" not in given and methods[0] not in ("copy", "merge"):
            raise BadInput(f"--{key}", got="no --method", needed=f"--method {' or '.join(methods)}", fix=f"--method {methods[0]}")
    if not 0 <= given.get("share", 0) <= 1:
        raise BadInput("--share", got=given["share"], needed="0 to 1", fix="--share 0.5")
    if given.get("scale", 0) < 0:
        raise BadInput("--scale", got=given["scale"], needed="at least 0", fix="--scale 0.01")
    return Settings(approximate=approximate, **given)


def experts_of(run: Run, layer: int) -> int:
    """Return the number of experts in a layer; 0 if it is dense."""
    layers = run.model.layers_with_experts()
    return run.experts.of_layer(layers.index(layer)) if layer in layers else 0


def change(before: Run, run: Run, layer: int) -> Literal["grow", "shrink"] | None:
    """Return "grow" for a layer that changes from dense to experts, "shrink" for one from experts to fewer or to dense; None if
    unchanged. before: the source's recipe. run: the new model's."""
    old, new = experts_of(before, layer), experts_of(run, layer)
    return None if old == new else "grow" if old == 0 else "shrink"


def layers_that(what: str | None, before: Run, run: Run) -> list[int]:
    """Return the indices of the layers for which `change` returns `what`: grow, shrink or None. before: the source's recipe. run: the new
    model's."""
    return [layer for layer in range(run.model.num_layers) if change(before, run, layer) == what]


def parts(before: Run, run: Run) -> int:
    """Return the number of shards into which the method granular cuts a dense network: its d_ff / an expert's d_ff. before: the source's
    recipe. run: the new model's."""
    return max(1, before.model.d_ff // _units(run))


def gate_sum(router: Router) -> float | None:
    """Return the sum of a token's gates if no choice is dropped; None if the sum depends on the token, or if gates multiply experts'
    inputs."""
    one = router.gates != "as_is" or (router.score == "softmax" and router.softmax_over == "chosen")
    return router.gate_scale if one and method_of(router).tokens_choose and router.gate_on == "output" else None


def even_gate_sum(router: Router, num_experts: int) -> float:
    """Return the sum of a token's gates. If it depends on the token, return the sum for equal logits of all experts."""
    score = {"softmax": 1 / num_experts, "sigmoid": 0.5, "sqrt_softplus": math.sqrt(math.log(2))}[router.score]
    return gate_sum(router) or router.gate_scale * router.num_choices * score


def check_convertible(before: Run, run: Run, settings: Settings) -> Settings:
    """Return the settings; `method` auto becomes the method that fits. Raises BadInput for the first reason why the conversion is
    impossible. before: the source's recipe. run: the new model's."""
    _check_same(before, run)
    routed = any(experts_of(before, layer) and experts_of(run, layer) for layer in range(run.model.num_layers))
    if routed and before.router.bias_rate is not None and run.router.bias_rate is None:
        needed = "a number: the source's routers have a selection bias"
        raise BadInput("router.bias_rate", got="null", needed=needed, fix="--router.bias_rate 0")
    grown, shrunk = layers_that("grow", before, run), layers_that("shrink", before, run)
    if not grown and not shrunk:
        fix = "to only train the source further: moe train RECIPE"
        raise BadInput("--to", got="the source's number of experts in each layer", needed="another number in some layers", fix=fix)
    if grown and shrunk:
        got, needed = f"more experts in layers {grown}, fewer in {shrunk}", "more experts in all changed layers, or fewer in all"
        raise BadInput("--to", got=got, needed=needed, fix="convert twice, each time with its own recipe")
    for which, side in (("the source", before), ("the new model", run)):
        if side.experts.free and side.model.layers_with_experts():
            got = f"{counted(side.experts.free, 'expert')} without parameters in {which}"
            needed = "0, because no weights can be converted to or from such experts"
            raise BadInput("experts.skip, experts.zero", got=got, needed=needed, fix="do not convert this model")
        if side.experts.biases and side.model.layers_with_experts():
            needed = "experts without biases: a dense network has none, and an expert's bias is multiplied by its gate"
            fix = "do not convert this model, or --experts.biases false"
            raise BadInput("experts.biases", got=f"true in {which}", needed=needed, fix=fix)
    fitting = GROWING if grown else SHRINKING
    settings = replace(settings, method=fitting[0]) if settings.method == "auto" else settings
    if settings.method not in fitting:
        needed = f"one of {some(fitting)} for these recipes"
        raise BadInput("--method", got=settings.method, needed=needed, fix=f"--method {fitting[0]}")
    if settings.moments == "copy" and not {before.optimizer.kind, run.optimizer.kind} <= {"adamw", "kfac"}:
        got = f"copy with optimizer.kind {before.optimizer.kind} and {run.optimizer.kind}"
        needed = "adamw or kfac in both recipes: only they have first and second moments"
        raise BadInput("--moments", got=got, needed=needed, fix="--moments fresh")
    if settings.moments == "copy" and settings.method != "copy":
        raise BadInput("--moments", got=f"copy with --method {settings.method}", needed="--method copy", fix="--moments fresh")
    if grown:
        _check_grown(before, run, settings)
    else:
        _check_shrunk(before, run, settings, shrunk)
    return settings


def _check_same(before: Run, run: Run) -> None:
    same = [key for key in known_keys() if key.startswith("model.") and key.removeprefix("model.") not in _FREE]
    pairs = [(key, value_of(before, key), value_of(run, key)) for key in same]
    pairs += [("model.vocab_size", before.vocab_size, run.vocab_size), ("data.tokenizer", before.data.tokenizer, run.data.tokenizer)]
    if before.model.num_layers == run.model.num_layers:
        kept = {experts_of(run, layer) > 0 for layer in layers_that(None, before, run)}
        pairs += [("model.ffn", before.model.ffn, run.model.ffn)] if False in kept else []
        pairs += [("experts.ffn", _activation(before), _activation(run))] if True in kept else []
    if any(experts_of(before, layer) and experts_of(run, layer) for layer in range(min(before.model.num_layers, run.model.num_layers))):
        keys = (*ROUTER, "noise") if "noisy_top_k" in (before.router.noise, run.router.noise) else ROUTER
        pairs += [(f"router.{key}", getattr(before.router, key), getattr(run.router, key)) for key in keys]
    for key, old, new in pairs:
        if old != new:
            value, got = (json.dumps(x) if x is None or isinstance(x, bool) else x for x in (old, new))
            raise BadInput(key, got=got, needed=f"the source's {value}", fix=f"--{key} {value}")


def _check_grown(before: Run, run: Run, settings: Settings) -> None:
    units, old, ffn = _units(run), before.model.d_ff, before.model.ffn
    if _activation(run) != ffn:
        raise BadInput("experts.ffn", got=_activation(run), needed=f"the source's {ffn}", fix=f"--experts.ffn {ffn}")
    if settings.method == "granular":
        _check_granular(before, run)
    elif units != old:
        granular = ", or --method granular" if old % units == 0 else ""
        raise BadInput("experts.d_ff", got=units, needed=f"the source's d_ff {old}", fix=f"--experts.d_ff {old}{granular}")
    if gate_sum(run.router) is None and not settings.approximate:
        got = f"{run.router.preset}, whose gates of a token do not sum to a constant"
        fix = "--router.preset glam, or --approximate: the scale of the down projection is then exact only for equal logits"
        raise BadInput("router.preset", got=got, needed="gates with sum 1, for an output equal to the source's", fix=fix)


def _check_granular(before: Run, run: Run) -> None:
    units, old, k = _units(run), before.model.d_ff, run.router.num_choices
    if old % units or old == units:
        fitting = [n for n in divisors(old) if n < old]
        raise BadInput("experts.d_ff", got=units, needed=f"a proper divisor of the source's d_ff {old}", fix=Set("it", *fitting[-4:]))
    g = parts(before, run)
    for key, values in (("experts.num_experts", run.experts.counts), ("router.num_choices", (k,))):
        if any(n % g for n in values):
            needed = f"a multiple of {g}, because each network of d_ff {old} is cut into {g} experts of d_ff {units}"
            fix = Set("it", g, said=f"a multiple of {g}") | Set("experts.d_ff", old // math.gcd(g, *values))
            raise BadInput(key, got=", ".join(map(str, values)), needed=needed, fix=fix)
    for key, wanted in {"select": "top_k", "noise": "none", "second": "always"}.items():
        if (value := getattr(run.router, key)) != wanted:
            needed = f"{wanted}: a token must choose all shards of a network"
            raise BadInput(f"router.{key}", got=f"{value} with --method granular", needed=needed, fix=f"--router.{key} {wanted}")
    if run.experts.residual:
        needed = "false: a residual network would have the experts' d_ff, not the source's"
        raise BadInput("experts.residual", got="true with --method granular", needed=needed, fix="--method copy")


def _check_shrunk(before: Run, run: Run, settings: Settings, layers: list[int]) -> None:
    old, dense = before.experts, [layer for layer in layers if not experts_of(run, layer)]
    for layer in layers:
        count, into = experts_of(before, layer), experts_of(run, layer)
        if into > count:
            here, needed = f"{into} in layer {layer}", f"at most the source's {count}"
            raise BadInput("experts.num_experts", got=here, needed=needed, fix="upcycle a dense model instead")
        if settings.method == "merge" and into and count % into:
            raise BadInput("experts.num_experts", got=into, needed=f"a divisor of the source's {count}", fix=Set("it", *divisors(count)))
    for layer_is_dense in {layer in dense for layer in layers}:
        wanted = _units(before) + (old.shared * (old.shared_d_ff or _units(before)) if layer_is_dense else 0)
        key, units = ("model.d_ff", run.model.d_ff) if layer_is_dense else ("experts.d_ff", _units(run))
        activation = run.model.ffn if layer_is_dense else _activation(run)
        if units != wanted:
            shared = " with its shared experts" if layer_is_dense and old.shared else ""
            raise BadInput(key, got=units, needed=f"{wanted}, the width of an expert of the source{shared}", fix=f"--{key} {wanted}")
        if activation != _activation(before):
            needed, fix = f"the source's {_activation(before)}", "use the source's activation"
            raise BadInput(key.replace("d_ff", "ffn"), got=activation, needed=needed, fix=fix)
    if not dense:
        return
    if old.residual or old.shared_gate:
        got = f"a dense layer from experts with {'a residual network' if old.residual else 'gated shared experts'}"
        needed = "no such network: its weight in the sum differs between tokens, so one dense network cannot replace it and the experts"
        raise BadInput("--to", got=got, needed=needed, fix="keep experts in these layers")
    learned = before.router.expert_scale == "learned"  # trained scales multiply the gates, so gates do not sum to a constant
    if (learned or gate_sum(before.router) is None) and not settings.approximate:
        got = f"dense layers from {before.router.preset}, whose gates of a token do not sum to a constant"
        fix = "--approximate: the dense network is then computed as if gates summed to 1"
        raise BadInput("--to", got=got, needed="a source with gates that sum to a constant", fix=fix)


def _units(run: Run) -> int:
    """Return the number of hidden units of one expert."""
    return run.experts.d_ff or run.model.d_ff


def _activation(run: Run) -> str:
    return run.experts.ffn or run.model.ffn
