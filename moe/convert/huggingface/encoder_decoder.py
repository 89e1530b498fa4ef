"""T5 and Switch in transformers: config.json and tensor names. Encoder and decoder each number their layers from 0. Needs no torch.

    encoder.block.{i}.layer.0.SelfAttention.q.weight       layers.{i}.attention.q.weight
    decoder.block.{i}.layer.1.EncDecAttention.q.weight     layers.{n + i}.cross.q.weight       n: number of encoder layers
    ...layer.{1 or 2}.mlp.experts.expert_{e}.wi.weight     layers.{l}.experts.{e}.w1           transposed; l: i or n + i

Switch's `expert_capacity` is a number of slots that does not depend on the sequence's length. In a recipe it is router.min_capacity, with a
capacity_factor that gives less than one slot. If an expert has at least as many slots as a sequence has tokens, no token can be dropped, so
the recipe sets no capacity.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from moe.convert.huggingface.families import Family, Row
from moe.recipe.sections import Run
from moe.recipe.shapes import NORM_EPS

LENGTH = 512  # model.max_length if config.json has no n_positions: T5's positions have no limit, but recipes need one
NO_MORE = 1e-9  # a capacity factor that gives less than one slot: an expert then has router.min_capacity slots and no more


def for_layers(family: Family, config: dict[str, Any]) -> Family:
    """Return the family with its tensor names (`rows`) for this config's numbers of layers."""
    encoder = int(config["num_layers"])
    gated = str(config.get("feed_forward_proj", "relu")).startswith("gated")
    rows = tuple(_rows(encoder, _decoder_layers(config), switch=family.experts is not None, gated=gated))
    return replace(family, rows=rows)


def _decoder_layers(config: dict[str, Any]) -> int:
    there = config.get("num_decoder_layers")
    return int(config["num_layers"] if there is None else there)


def _rows(encoder: int, decoder: int, *, switch: bool, gated: bool) -> Iterator[Row]:
    yield Row("shared.weight", "embedding")
    yield Row("lm_head.weight", "head.weight")
    yield Row("shared.weight", "head.weight")  # a tied head without scaling, as transformers 5 writes T5 v1.1
    yield Row("encoder.final_layer_norm.weight", "encoder_norm.weight")
    yield Row("decoder.final_layer_norm.weight", "norm.weight")
    for number in range(encoder + decoder):
        half, i = ("encoder", number) if number < encoder else ("decoder", number - encoder)
        ours, theirs, last = f"layers.{number}.", f"{half}.block.{i}.layer.", 1 if half == "encoder" else 2
        parts = [("attention", "0.SelfAttention"), *([("cross", "1.EncDecAttention")] if half == "decoder" else [])]
        for part, there in parts:
            for a, b in zip(("q", "k", "v", "out"), "qkvo", strict=True):
                yield Row(f"{theirs}{there}.{b}.weight", f"{ours}{part}.{a}.weight")
            yield Row(f"{theirs}{there[0]}.layer_norm.weight", f"{ours}{part}_norm.weight")
        if i == 0:
            yield Row(f"{theirs}0.SelfAttention.relative_attention_bias.weight", f"{ours}attention.bias.weight")
        yield Row(f"{theirs}{last}.layer_norm.weight", f"{ours}ffn_norm.weight")
        dense = f"{theirs}{last}.{'mlp' if switch else 'DenseReluDense'}."
        for a, b in (*((("w1", "wi_0"), ("w3", "wi_1")) if gated else (("w1", "wi"),)), ("w2", "wo")):
            yield Row(f"{dense}{b}.weight", f"{ours}ffn.{a}.weight")
        if switch:
            yield Row(f"{dense}router.classifier.weight", f"{ours}router.weight")
            for a, b in (("w1", "wi"), ("w2", "wo")):
                yield Row(f"{dense}experts.expert_{{e}}.{b}.weight", f"{ours}experts.{{e}}.{a}", turned=True)


def recipe_values(family: Family, config: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return the recipe's values that the table of keys (families.py) does not give. `given`: recipe key -> value from the table."""
    encoder, decoder = int(config["num_layers"]), _decoder_layers(config)
    length = int(config.get("n_positions") or LENGTH)
    values: dict[str, Any] = {"model.num_layers": encoder + decoder, "model.encoder_layers": encoder, "model.max_length": length}
    values["data.objective"] = "span_corruption"
    if family.experts is None:
        return values
    sparse = _sparse(encoder, config.get("num_sparse_encoder_layers", 3))
    sparse += [encoder + i for i in _sparse(decoder, config.get("num_sparse_decoder_layers", 3))]
    capacity = int(config.get("expert_capacity", 64))
    factor, least = (NO_MORE, capacity) if capacity < max(LENGTH, length) else (None, 0)
    values |= {"model.moe_layers": sparse, "experts.dropout": given["model.dropout"]}
    return values | {"router.capacity_factor": factor, "router.eval_capacity_factor": factor, "router.min_capacity": least}


def config_of(family: Family, run: Run) -> dict[str, Any]:
    """Return the values of config.json that the table of keys (families.py) does not give."""
    m, spec = run.model, run.router
    encoder, decoder = m.decoder_begins, m.num_layers - m.decoder_begins
    values: dict[str, Any] = {"num_layers": encoder, "num_decoder_layers": decoder, "n_positions": m.max_length}
    values |= {"layer_norm_epsilon": m.norm_eps or NORM_EPS[m.norm], "is_encoder_decoder": True}
    values |= {"decoder_start_token_id": 0, "pad_token_id": 0}
    if family.experts is None:
        return values
    for half, layers in (("encoder", range(encoder)), ("decoder", range(encoder, m.num_layers))):
        wanted = [i for i, layer in enumerate(layers) if layer in m.layers_with_experts()]
        counts = [count for count in range(len(layers) + 1) if _sparse(len(layers), count) == wanted]
        values[f"num_sparse_{half}_layers"] = counts[0] if counts else len(wanted)
    values["expert_capacity"] = spec.min_capacity if spec.eval_capacity_factor == NO_MORE else max(LENGTH, m.max_length)
    return values


def _sparse(layers: int, count: int) -> list[int]:
    """Return the indices of the layers with experts in an encoder or decoder of `layers` layers, by transformers' rule. `count`: number
    of layers with experts; 0 is treated as 1, as in transformers."""
    step = layers // count if count > 0 else layers
    return [i for i in range(layers) if step > 0 and (i % step == 1 or step == 1)]
