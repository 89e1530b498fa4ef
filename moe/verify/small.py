"""Makes a user's recipe small for the oracle, with the user's own parts and plug-ins. Needs no torch.

    the recipe's choices (router, experts, layers, optimizer, dispatcher)   kept
    its sizes, text and degrees                                             from moe/verify/cases.py, and from each layout

The reference is the plain twin if it implements everything that the recipe asks for: built-in parts, and AdamW. No twin implements a part
of the user's own or another optimizer. Then the reference is one process of the trainer's own code, so faults that every layout shares are
not seen. The tolerance is then twice the deviation that other orders of the same sums cause, which is measured.
"""

from __future__ import annotations

from math import lcm
from typing import Any

from moe.recipe.load import load
from moe.recipe.sections import Run, Section
from moe.router.methods.catalog import method_of
from parallel.errors import BadInput

# keys of sizes, which moe/verify/cases.py sets; all other keys are choices
_SIZES_OF_MODEL = (
    "vocab_size num_layers encoder_layers d_model num_heads num_kv_heads head_size d_ff max_length moe_every moe_layers sliding_window "
    "sliding_layers"
)
_SIZES_OF_EXPERTS = "num_experts d_ff shared_d_ff rebalance_every kernels"
_WINDOW = 4  # sliding window, if layers have one; shorter than any case's sequence
# After a step, a parameter that began at 0 equals its update. An eps larger than most gradients keeps that update as exact as the
# gradients.
LINEAR = {"eps": 0.1}
_OF_OPTIMIZER = ("kind", "beta1", "beta2", "weight_decay", "kfac", "muon", "adafactor", "sgd")


def small(path: str, *, ep: int = 1) -> dict[str, dict[str, Any]]:
    """Return the choices of the recipe at `path` (section -> key -> value) without its sizes. A case of `moe verify`, one model on one
    layout of ranks, puts these values over its own.

    ep: number of expert-parallel ranks; the dispatcher is included above 1. Raises BadInput for a recipe that only the user's program can
    run.
    """
    run, _ = load(path)
    if run.optimizer.kind == "given":
        needed = "an optimizer by its name, so that ranks can import it"
        raise BadInput("optimizer.kind", got="given", needed=needed, fix="write module:name: docs/use/plugins.md")
    model, experts = _without(run.model, _SIZES_OF_MODEL), _without(run.experts, _SIZES_OF_EXPERTS)
    if run.model.kind == "encoder_decoder":
        model["num_layers"] = 4
    sparse = run.model.layers_with_experts()
    model["moe_every"] = 0 if not sparse else 1 if len(sparse) == run.model.num_layers else 2
    model["num_kv_heads"] = 2 if run.model.num_kv_heads not in (None, run.model.num_heads) else None
    if run.model.sliding_window is not None:
        model |= {"sliding_window": min(run.model.sliding_window, _WINDOW), "sliding_layers": _sliding_layers(run)}
    if run.experts.shared_d_ff is not None:
        experts["shared_d_ff"] = 12
    model["ahead"] = min(run.model.ahead, 2)
    if run.model.rope.fraction < 1:  # 2 or 4 of a head's 6 channels are rotated
        model["rope"]["fraction"] = min(2, max(1, round(3 * run.model.rope.fraction))) / 3
    if run.model.latent.key_rank is not None:
        model["latent"] = _latent(run)
    optimizer = {key: value for key, value in run.optimizer.model_dump().items() if key in _OF_OPTIMIZER}
    optimizer["clip_norm"] = None if run.optimizer.clip_norm is None else 0.5
    optimizer |= LINEAR if _begins_at_zero(run) else {}
    values = {"model": model, "experts": experts, "optimizer": optimizer, "data": {"objective": run.data.objective}}
    values["train"] = {"compile": run.train.compile}
    if sparse:
        values["router"] = _router(run)
        values |= {"dispatch": _dispatch(run, ep)} if ep > 1 else {}
        experts["num_experts"] = _num_experts(run)
    return values


def _begins_at_zero(run: Run) -> bool:
    """Return whether parameters begin at 0. After a step they equal their update, in which Adam keeps little but the gradient's sign."""
    m, x = run.model, run.experts
    return m.qkv_bias or m.out_bias or m.attention_sinks or x.biases or run.router.logits == "affine"


def _without(section: Section, keys: str) -> dict[str, Any]:
    return {key: value for key, value in section.model_dump().items() if key not in keys.split()}


def _sliding_layers(run: Run) -> tuple[int, ...] | None:
    """One of the two layers, if the recipe has layers with a window and layers without."""
    slide = run.model.sliding_layers
    return None if slide is None or len(slide) == run.model.num_layers else (min(layer % 2 for layer in slide),)


def _latent(run: Run) -> dict[str, Any]:
    """Latent sizes that differ from each other and from a head's 6 channels. Which of them are set is the recipe's choice."""
    given = run.model.latent
    return {
        "key_rank": 10,
        "query_rank": None if given.query_rank is None else 14,
        "rotary_size": 4,
        "value_size": None if given.value_size in (None, run.model.latent_sizes.content) else 5,
    }


def _router(run: Run) -> dict[str, Any]:
    """The recipe's router. Capacity and balance are counted over a sequence, because counts over a rank's tokens depend on the layout."""
    changed = {"preset": run.router.preset, "allow_noncausal": run.router.allow_noncausal} | run.router.own
    spec = run.router
    changed |= {"group": 1} if spec.group != "sequence" else {}
    changed |= {"hash_table": None} if spec.hash_table is not None else {}  # its vocabulary is another
    changed |= {"balance_scope": "sequence"} if spec.balance_scope == "micro_batch" else {}
    return changed | ({"min_capacity": 1} if spec.min_capacity > 1 else {})


def _dispatch(run: Run, ep: int) -> dict[str, Any]:
    """The recipe's dispatcher. For a hierarchical one, all ranks are one node."""
    return {"kind": run.dispatch.kind, "overlap_chunks": min(run.dispatch.overlap_chunks, 2)} | (
        {"node_size": ep} if run.dispatch.node_size else {}
    )


def _num_experts(run: Run) -> int:
    spec = run.router
    unit = lcm(4, spec.expert_groups)
    needed = method_of(spec).experts_needed(spec)
    return unit * max(1, -(-2 * needed // unit)) if needed * 2 > unit else unit


def not_compared(run: Run) -> list[str]:
    """Lines of text: settings of the recipe that the small recipe does not have."""
    lines = []
    if run.router.group == "rank" and run.model.layers_with_experts():
        lines.append(
            "not compared: router.group rank, which depends on the layout by definition; capacity is counted over a sequence instead"
        )
    if run.lora.rank:
        lines.append(f"not compared: lora.rank {run.lora.rank}; all weights are trained instead, without adapters")
    if run.router.hash_table is not None:
        lines.append("not compared: router.hash_table, which belongs to the recipe's vocabulary; a hash of the token id is used instead")
    named = [key for key in run.plugins() if key in ("data.source", "optimizer.schedule")]
    return lines + [f"not compared: {key} {run.plugins()[key]}, which no layout changes" for key in named]


def known(run: Run) -> bool:
    """Return whether the plain twin implements everything that decides the small recipe's numbers."""
    named = run.plugins().keys() - {"data.source", "optimizer.schedule", "dispatch.kind"}
    return run.optimizer.kind == "adamw" and not named
