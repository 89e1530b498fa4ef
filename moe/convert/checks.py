"""Checks of a conversion: the new models that can be made from a source checkpoint. All else is refused in one line (no torch here).

A layer is kept, grown (dense to experts) or shrunk (experts to fewer experts, or to one dense network). One conversion does not do both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Literal

from moe.recipe.sections import Latent, Rope, Router, Run, Scales, Swiglu
from moe.router.methods.catalog import method_of
from parallel.errors import BadInput
from parallel.fixes import Set
from parallel.mesh.mesh import divisors

Method = Literal["auto", "copy", "granular", "noise", "drop", "merge", "prune"]
GROWING: tuple[Method, ...] = ("copy", "granular", "noise", "drop")
SHRINKING: tuple[Method, ...] = ("merge", "prune")

# keys that a conversion keeps, even if another value would give the same shapes
SAME: tuple[str, ...] = (
    *(f"rope.{key}" for key in Rope.model_fields),
    *(f"swiglu.{key}" for key in Swiglu.model_fields),
    *(f"latent.{key}" for key in Latent.model_fields),
    *(f"scales.{key}" for key in Scales.model_fields),
    "kind",
    "num_layers",
    "encoder_layers",
    "d_model",
    "num_heads",
    "num_kv_heads",
    "head_size",
    "norm",
    "norm_eps",
    "qk_norm",
    "qkv_bias",
    "clip_qkv",
    "logit_cap",
    "out_bias",
    "attention_sinks",
    "sliding_window",
    "sliding_layers",
    "tied_embeddings",
    "positions",
    "ahead",
)
# keys that decide a router's tensors, compared for layers with experts on both sides
ROUTER: tuple[str, ...] = ("logits", "input_norm", "expert_scale")


@dataclass(frozen=True)
class Settings:
    """Settings of a conversion. `method` auto: copy or merge, whichever fits. `share` and `scale`: for noise and drop. `weights`: weights
    of the mean over experts. `approximate`: allows gates that do not sum to a constant.
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
    """Return the settings for the command line's values. The default method keeps the outputs unchanged. Raises BadInput."""
    takes = {"share": ("noise", "drop"), "scale": ("noise",), "weights": ("merge",), "moments": ("copy",)}
    for key, methods in takes.items():
        if key in given and "method" in given and given["method"] not in methods and given[key] != "fresh":
            raise BadInput(
                f"--{key}", got=f"it with --method {given['method']}", needed=f"--method {' or '.join(methods)}", fix=f"remove --{key}"
            )
        if key in given and "method" not in given and methods[0] not in ("copy", "merge"):
            raise BadInput(f"--{key}", got="no --method", needed=f"--method {' or '.join(methods)}", fix=f"--method {methods[0]}")
    if not 0 <= given.get("share", 0) <= 1:
        raise BadInput("--share", got=given["share"], needed="0 to 1", fix="--share 0.5")
    if given.get("scale", 0) < 0:
        raise BadInput("--scale", got=given["scale"], needed="at least 0", fix="--scale 0.01")
    return Settings(approximate=approximate, **given)


def experts_of(run: Run, layer: int) -> int:
    """Number of experts in a layer; 0 if it is dense."""
    layers = run.model.layers_with_experts()
    return run.experts.of_layer(layers.index(layer)) if layer in layers else 0


def change(before: Run, run: Run, layer: int) -> Literal["grow", "shrink"] | None:
    """Return how the conversion changes a layer; None if the layer is kept."""
    old, new = experts_of(before, layer), experts_of(run, layer)
    return None if old == new else "grow" if old == 0 else "shrink"


def layers_that(what: str | None, before: Run, run: Run) -> list[int]:
    """The layers for which `change` returns `what`: grow, shrink, or None for kept layers."""
    return [layer for layer in range(run.model.num_layers) if change(before, run, layer) == what]


def parts(before: Run, run: Run) -> int:
    """Return G, the number of shards into which one dense network is cut."""
    return max(1, before.model.d_ff // _units(run))


def gate_sum(router: Router) -> float | None:
    """Return the sum of a token's gates if nothing is dropped; None if it depends on the token, or if gates are no factors of outputs."""
    s = router
    one = s.gates != "as_is" or (s.score == "softmax" and s.softmax_over == "chosen")
    return s.gate_scale if one and method_of(s).tokens_choose and s.gate_on == "output" else None


def even_gate_sum(router: Router, num_experts: int) -> float:
    """Return the mean sum of a token's gates for a router without any preference."""
    s = router
    score = {"softmax": 1 / num_experts, "sigmoid": 0.5, "sqrt_softplus": math.sqrt(math.log(2))}[s.score]
    return gate_sum(router) or s.gate_scale * s.num_choices * score


def check_convertible(before: Run, run: Run, settings: Settings) -> Settings:
    """Return the settings with their method resolved. Raises BadInput for the first reason why the conversion is impossible."""
    _check_same(before, run)
    routed = any(experts_of(before, layer) and experts_of(run, layer) for layer in range(run.model.num_layers))
    if routed and before.router.bias_rate is not None and run.router.bias_rate is None:
        raise BadInput(
            "router.bias_rate", got="null", needed="a number: the source's routers have a selection bias", fix="--router.bias_rate 0"
        )
    grown, shrunk = layers_that("grow", before, run), layers_that("shrink", before, run)
    if not grown and not shrunk:
        raise BadInput("--to", got="a model with the source's layers", needed="one with other experts", fix="train it on: moe train RECIPE")
    if grown and shrunk:
        raise BadInput(
            "--to",
            got=f"more experts in layers {grown}, fewer in {shrunk}",
            needed="one of the two",
            fix="convert twice, with a recipe each",
        )
    for which, side in (("the source", before), ("the new model", run)):
        if side.experts.free and side.model.layers_with_experts():
            needed = "no such entries: the router's rows for them have no experts to convert"
            raise BadInput("experts.skip, experts.zero", got=f"{side.experts.free} in {which}", needed=needed, fix="keep the experts")
        if side.experts.biases and side.model.layers_with_experts():
            needed = "experts without biases: a dense network has none, and an expert's bias is multiplied by its gate"
            raise BadInput("experts.biases", got=f"true in {which}", needed=needed, fix="keep the experts, or --experts.biases false")
    fitting = GROWING if grown else SHRINKING
    settings = replace(settings, method=fitting[0]) if settings.method == "auto" else settings
    if settings.method not in fitting:
        raise BadInput(
            "--method", got=settings.method, needed=f"one of {', '.join(fitting)} for these recipes", fix=f"--method {fitting[0]}"
        )
    if settings.moments == "copy" and not {before.optimizer.kind, run.optimizer.kind} <= {"adamw", "kfac"}:
        got = f"copy with optimizer.kind {before.optimizer.kind} and {run.optimizer.kind}"
        raise BadInput(
            "--moments", got=got, needed="adamw or kfac on both sides: only they have first and second moments", fix="--moments fresh"
        )
    if settings.moments == "copy" and settings.method != "copy":
        raise BadInput("--moments", got=f"copy with --method {settings.method}", needed="--method copy", fix="--moments fresh")
    if grown:
        _check_grown(before, run, settings)
    else:
        _check_shrunk(before, run, settings, shrunk)
    return settings


def _check_same(before: Run, run: Run) -> None:
    pairs: list[tuple[str, Any, Any]] = [(f"model.{key}", attrgetter(key)(before.model), attrgetter(key)(run.model)) for key in SAME]
    pairs += [("model.vocab_size", before.vocab_size, run.vocab_size), ("data.tokenizer", before.data.tokenizer, run.data.tokenizer)]
    if layers_that(None, before, run):
        kept = (
            {(experts_of(run, layer) > 0) for layer in layers_that(None, before, run)}
            if before.model.num_layers == run.model.num_layers
            else set()
        )
        pairs += [("model.ffn", before.model.ffn, run.model.ffn)] if False in kept else []
        pairs += [("experts.ffn", _activation(before), _activation(run))] if True in kept else []
    if any(experts_of(before, layer) and experts_of(run, layer) for layer in range(min(before.model.num_layers, run.model.num_layers))):
        old_spec, new_spec = before.router, run.router
        keys = (*ROUTER, "noise") if "noisy_top_k" in (old_spec.noise, new_spec.noise) else ROUTER
        pairs += [(f"router.{key}", getattr(old_spec, key), getattr(new_spec, key)) for key in keys]
    for key, old, new in pairs:
        if old != new:
            raise BadInput(key, got=new, needed=f"the source's {old}", fix=f"--{key} {'null' if old is None else old}")


def _check_grown(before: Run, run: Run, settings: Settings) -> None:
    units, old = _units(run), before.model.d_ff
    if _activation(run) != before.model.ffn:
        raise BadInput(
            "experts.ffn", got=_activation(run), needed=f"the source's {before.model.ffn}", fix=f"--experts.ffn {before.model.ffn}"
        )
    if settings.method == "granular":
        _check_granular(before, run)
    elif units != old:
        granular = ", or --method granular" if old % units == 0 else ""
        raise BadInput("experts.d_ff", got=units, needed=f"the source's d_ff {old}", fix=f"--experts.d_ff {old}{granular}")
    if gate_sum(run.router) is None and not settings.approximate:
        raise BadInput(
            "router.preset",
            got=f"{run.router.preset}, whose gates of a token do not sum to a constant",
            needed="gates with sum 1, for an output equal to the source's",
            fix="--router.preset glam, or --approximate: the way down is scaled for a router without preference",
        )


def _check_granular(before: Run, run: Run) -> None:
    units, old, k = _units(run), before.model.d_ff, run.router.num_choices
    if old % units or old == units:
        fitting = [n for n in divisors(old) if n < old]
        raise BadInput("experts.d_ff", got=units, needed=f"a part of the source's d_ff {old}", fix=Set("it", *fitting[-4:]))
    g = parts(before, run)
    for key, values in (("experts.num_experts", run.experts.counts), ("router.num_choices", (k,))):
        if any(n % g for n in values):
            raise BadInput(
                key,
                got=", ".join(map(str, values)),
                needed=f"a multiple of the {g} shards of a network (d_ff {old} / {units})",
                fix=Set("it", g, said=f"a multiple of {g}") | Set("experts.d_ff", old // math.gcd(g, *values)),
            )
    s = run.router
    for key, value, needed in (("select", s.select, "top_k"), ("noise", s.noise, "none"), ("second", s.second, "always")):
        if value != needed:
            raise BadInput(
                f"router.{key}",
                got=f"{value} with --method granular",
                needed=f"{needed}: a token must choose all shards of a network",
                fix=f"--router.{key} {needed}",
            )
    if run.experts.residual:
        raise BadInput(
            "experts.residual", got="true with --method granular", needed="a residual network of the source's d_ff", fix="--method copy"
        )


def _check_shrunk(before: Run, run: Run, settings: Settings, layers: list[int]) -> None:
    old, dense = before.experts, [layer for layer in layers if not experts_of(run, layer)]
    for layer in layers:
        count, into = experts_of(before, layer), experts_of(run, layer)
        if into > count:
            raise BadInput(
                "experts.num_experts",
                got=f"{into} in layer {layer}",
                needed=f"at most the source's {count}",
                fix="upcycle a dense model instead",
            )
        if settings.method == "merge" and into and count % into:
            raise BadInput("experts.num_experts", got=into, needed=f"a divisor of the source's {count}", fix=Set("it", *divisors(count)))
    for layer_is_dense in {layer in dense for layer in layers}:
        wanted = _units(before) + (old.shared * (old.shared_d_ff or _units(before)) if layer_is_dense else 0)
        key, got = ("model.d_ff", run.model.d_ff) if layer_is_dense else ("experts.d_ff", _units(run))
        activation = run.model.ffn if layer_is_dense else _activation(run)
        if got != wanted:
            shared = " with its shared experts" if layer_is_dense and old.shared else ""
            raise BadInput(key, got=got, needed=f"{wanted}, the width of an expert of the source{shared}", fix=f"--{key} {wanted}")
        if activation != _activation(before):
            raise BadInput(
                key.replace("d_ff", "ffn"), got=activation, needed=f"the source's {_activation(before)}", fix="use the source's activation"
            )
    if not dense:
        return
    if old.residual or old.shared_gate:
        what = "residual network" if old.residual else "gated shared experts"
        raise BadInput(
            "--to",
            got=f"a dense layer for experts with a {what}",
            needed="experts alone: that mix depends on the token",
            fix="keep the experts",
        )
    learned = before.router.expert_scale == "learned"  # a new router's scales are 1, a trained one's are not
    if (learned or gate_sum(before.router) is None) and not settings.approximate:
        raise BadInput(
            "--to",
            got=f"dense layers from {before.router.preset}, whose gates of a token do not sum to a constant",
            needed="a source with gates that do",
            fix="--approximate: experts count as if their gates summed to 1",
        )


def _units(run: Run) -> int:
    """Number of hidden units of one expert."""
    return run.experts.d_ff or run.model.d_ff


def _activation(run: Run) -> str:
    return run.experts.ffn or run.model.ffn
