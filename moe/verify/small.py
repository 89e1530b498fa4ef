"""Makes a small version of a user's recipe for `moe verify`, which still uses the user's plugins. Needs no torch.

Router, experts, layers, optimizer and dispatcher are as in the recipe; sizes, data and degrees come from a case (moe/verify/cases.py). If
the plain twin (the second implementation, moe/verify/twin.py) lacks a part of the recipe (`known`), layouts are compared with the trainer
on one process. Faults that all layouts share are then not found.
"""

from __future__ import annotations

from math import lcm
from typing import Any

from moe.plan.pipeline import continuous
from moe.recipe.frozen import layers_of
from moe.recipe.load import load
from moe.recipe.sections import Optimizer, Run
from moe.router.methods import method_of
from parallel.errors import BadInput

# keys that are not taken from the user's recipe: sizes, and a few settings that a case sets itself
_SIZES_OF_MODEL = {"vocab_size", "d_model", "num_heads", "num_kv_heads", "head_size", "d_ff", "max_length", "moe_every", "moe_layers"}
_SIZES_OF_MODEL |= {"num_layers", "encoder_layers", "sliding_window", "sliding_layers"}
_SIZES_OF_EXPERTS = {"num_experts", "d_ff", "shared_d_ff", "rebalance_every", "kernels"}
_WINDOW = 4  # largest sliding window of a small version; shorter than the sequences of all cases
_RANK = 3  # rank of a small version's LoRA adapters
# optimizer settings for models with parameters that begin at 0. Adam's first step makes them -lr g / (|g| + eps). With a small eps, a
# rounding error of a tiny gradient g would flip their sign
LINEAR = {"eps": 0.1}
_OF_OPTIMIZER = ("kind", "beta1", "beta2", "weight_decay", "kfac", "muon", "adafactor", "sgd")  # keys that are taken from the recipe


def small(path: str, *, ep: int = 1) -> dict[str, dict[str, Any]]:
    """Return the settings (section -> key -> value) of a small version of the recipe at `path`: the recipe's values, but small sizes. The
    section `dispatch` is included if the model has experts and ep > 1. Raises BadInput for an optimizer object of the user's program,
    which ranks cannot import.
    """
    run, _ = load(path)
    if run.optimizer.kind == "given":
        needed = "an optimizer by its name, so that ranks can import it"
        raise BadInput("optimizer.kind", got="given", needed=needed, fix="write optimizer.kind as module:name (docs/use/plugins.md)")
    m, x, sparse = run.model, run.experts, run.model.layers_with_experts()
    model = {key: value for key, value in m.model_dump().items() if key not in _SIZES_OF_MODEL}
    experts = {key: value for key, value in x.model_dump().items() if key not in _SIZES_OF_EXPERTS}
    model |= {"num_layers": 4} if m.kind == "encoder_decoder" else {}
    model["moe_every"] = 0 if not sparse else 1 if len(sparse) == m.num_layers else 2
    model["num_kv_heads"] = 2 if m.num_kv_heads not in (None, m.num_heads) else None
    if m.sliding_window is not None:  # if only some layers have a window, one of the small model's two layers has one
        some = m.sliding_layers is not None and len(m.sliding_layers) != m.num_layers
        layers = (min(layer % 2 for layer in m.sliding_layers or ()),) if some else None
        model |= {"sliding_window": min(m.sliding_window, _WINDOW), "sliding_layers": layers}
    experts |= {"shared_d_ff": 12} if x.shared_d_ff is not None else {}
    model["ahead"] = min(m.ahead, 2)
    if m.rope.fraction < 1:  # rotary positions on 2 or 4 of a head's 6 channels
        model["rope"]["fraction"] = min(2, max(1, round(3 * m.rope.fraction))) / 3
    if m.latent.key_rank is not None:
        # all sizes differ from each other and from a head's 6 channels; sizes that the recipe does not set stay None
        query, value = m.latent.query_rank is not None, m.latent.value_size not in (None, m.latent_sizes.content)
        model["latent"] = {"key_rank": 10, "query_rank": 14 if query else None, "rotary_size": 4, "value_size": 5 if value else None}
    optimizer = {key: value for key, value in run.optimizer.model_dump().items() if key in _OF_OPTIMIZER}
    optimizer["eps"] = max(run.optimizer.eps, Optimizer.model_fields["eps"].default)
    optimizer["clip_norm"] = None if run.optimizer.clip_norm is None else 0.5
    if m.qkv_bias or m.out_bias or m.attention_sinks or x.biases or run.router.logits == "affine":
        optimizer |= LINEAR
    values = {"model": model, "experts": experts, "optimizer": optimizer, "data": {"objective": run.data.objective}}
    if run.lora.rank:
        values["lora"] = {"rank": _RANK, "alpha": _RANK * run.lora.scale, "targets": run.lora.targets}
    freeze = [part for part in run.train.freeze if layers_of(part) is None]
    values["train"] = {"compile": run.train.compile, "loss": run.train.loss, "freeze": freeze}
    if sparse:
        values["router"] = _router(run)
        at_least = 2 * method_of(run.router).experts_needed(run.router)
        unit = lcm(4, run.router.expert_groups)
        experts["num_experts"] = unit * max(1, -(-at_least // unit))
        if ep > 1:
            values["dispatch"] = {"kind": run.dispatch.kind, "overlap_chunks": min(run.dispatch.overlap_chunks, 2)}
            values["dispatch"] |= {"node_size": ep} if run.dispatch.node_size else {}  # hierarchical: one node with all ranks
    return values


def _router(run: Run) -> dict[str, Any]:
    """Return the recipe's router settings. If capacity or balance is counted over a rank's tokens, which depends on the layout, it is
    counted over a sequence instead."""
    spec = run.router
    changed = {"preset": spec.preset, "allow_noncausal": spec.allow_noncausal} | spec.own
    changed |= {"group": 1} if spec.group != "sequence" else {}
    changed |= {"hash_table": None} if spec.hash_table is not None else {}  # the table is for the ids of the recipe's vocabulary
    changed |= {"balance_scope": "sequence"} if spec.balance_scope == "micro_batch" else {}
    return changed | ({"min_capacity": 1} if spec.min_capacity > 1 else {})


def not_compared(run: Run) -> list[str]:
    """Return lines of text for the user: one for each setting of the recipe that the comparison of its small version leaves out or
    replaces."""
    lines, by_definition = [], "which depends on the layout by definition; capacity is counted over a sequence instead"
    if run.router.group == "rank" and run.model.layers_with_experts():
        lines.append(f"not compared: router.group rank, {by_definition}")
    if layers := [part for part in run.train.freeze if layers_of(part) is not None]:
        lines.append(f"not compared: train.freeze {', '.join(layers)}; these layers are trained")
    if run.router.hash_table is not None:
        lines.append("not compared: router.hash_table, which belongs to the recipe's vocabulary; a hash of the token id is used instead")
    named = [key for key in run.plugins() if key in ("data.source", "optimizer.schedule")]
    return lines + [f"not compared: {key} {run.plugins()[key]}, which no layout changes" for key in named]


def known(run: Run) -> bool:
    """Return whether the plain twin (moe/verify/twin.py) implements the recipe: its optimizer is AdamW, Muon, Adafactor or K-FAC, and no
    plugin changes numbers, except a balance loss, which the twin calls with its own loads and probabilities."""
    named = run.plugins().keys() - {"data.source", "optimizer.schedule", "dispatch.kind", "router.balance_loss"}
    return run.optimizer.kind in ("adamw", "muon", "adafactor", "kfac") and not named


def not_in_the_twin(run: Run) -> str | None:
    """Return the first setting for which a recipe, used unchanged, cannot be compared with the twin (the plain reference model); None if
    there is none. An optimizer that the twin lacks is accepted in fp32: its update is compared with the trainer's on one process."""
    sparse, spec, rounded = bool(run.model.layers_with_experts()), run.router, run.precision.compute != "fp32"
    found = {
        "router.group rank": sparse and spec.group == "rank",
        "router.balance_scope micro_batch": sparse and spec.balance_scope == "micro_batch" and spec.asks_balance,
        "pipeline.vertical_sync": run.degrees.pp > 1 and run.pipeline.vertical_sync,
        "precision.master bf16": run.precision.master != "fp32",
        f"lora.base {run.lora.base}": run.lora.base != "whole",  # quantized blocks cannot hold random values exactly
        "precision.compute auto": run.precision.compute == "auto",
        f"optimizer.kind {run.optimizer.kind} in 16 bits": rounded and not known(run),
        f"optimizer.kind {run.optimizer.kind} with {run.pipeline.schedule}": continuous(run) and run.optimizer.kind != "adamw",
    }
    return next((name for name, there in found.items() if there), None)
