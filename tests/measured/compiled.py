"""Measures a training step with compiled norms, activations and loss (`train.compile`), and compares it with the step without.

    plain       forward and backward pass, one process, one thread
    compiled    the same step, in which moe/parallelize/compiled.py compiles everything between matrix products
    whole       transformers' Llama of the same sizes, compiled as a whole by torch.compile; left out with `--peers none`

Ratios are of times in the same round; the table has their median and quartiles. FILE also has the seconds of the first step, in which
compilation happens. `python -m tests.measured compiled --rounds 15 --json FILE`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe.bench.timing import Race, conclude, importable, in_turn, race_row
from moe.model.transformer import Transformer
from moe.nn.context import Context
from moe.parallelize.compiled import compile_between_products
from moe.recipe import sections
from parallel.numerics.precision import DTYPES

LAYERS, HEADS, LENGTH, BATCH, VOCABULARY = 4, 4, 256, 4, 2048
WIDTHS = (256, 512)
Step = Callable[[], float]  # runs forward and backward and returns the loss


def main(*, rounds: int = 15, peers: str = "all", json: str | None = None) -> int:
    """Returns 1 if a compiled step's loss differs from the plain one, or if the compiled step is slower."""
    torch.set_num_threads(1)
    rows = [row for width in WIDTHS for precision in ("fp32", "bf16") for row in _rows(width, precision, rounds, with_peer=peers != "none")]
    sizes = {"layers": LAYERS, "sequences": BATCH, "length": LENGTH, "vocabulary": VOCABULARY}
    return conclude(json, "compiled", rows, rounds=rounds, **sizes)


def _rows(width: int, precision: str, rounds: int, *, with_peer: bool) -> list[dict[str, Any]]:
    tokens_BL = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    steps = {"plain": _ours(width, precision, tokens_BL, compiled=False), "compiled": _ours(width, precision, tokens_BL, compiled=True)}
    races = [Race(f"compiled over plain, {width} wide, {precision}", "compiled", "plain", 1.0)]
    if with_peer and importable("transformers"):
        steps["whole"] = _llama(width, precision, tokens_BL)
        races.append(Race(f"compiled over transformers compiled whole, {width} wide, {precision}", "compiled", "whole", None))
    first, losses = {}, {}
    for name, step in steps.items():
        began = time.perf_counter()
        losses[name] = step()
        first[f"{name}_first_seconds"] = time.perf_counter() - began
    near = abs(losses["compiled"] / losses["plain"] - 1) <= {"fp32": 1e-6, "bf16": 1e-3}[precision]
    seconds = in_turn(steps, rounds=rounds, warmups=1)
    about = {"width": width, "precision": precision, "loss": losses["compiled"], "plain_loss": losses["plain"]} | first
    rows = [race_row(race, seconds, ranks=1) | about for race in races]
    return [row | {"passed": row.get("passed", True) and near} for row in rows]


def _ours(width: int, precision: str, tokens_BL: Tensor, *, compiled: bool) -> Step:
    sizes: dict[str, Any] = {"num_layers": LAYERS, "d_model": width, "num_heads": HEADS, "d_ff": 3 * width, "max_length": LENGTH}
    config = sections.Model(ffn="swiglu", moe_every=0, tied_embeddings=False, **sizes)
    model = Transformer(config, vocab_size=VOCABULARY, compute=DTYPES[precision]).train()
    if compiled:
        compile_between_products(model)

    def step() -> float:
        loss = model(tokens_BL[:, :-1], Context.of(tokens_BL[:, :-1]), tokens_BL[:, 1:]).loss / (BATCH * LENGTH)
        return _through(model, loss)

    return step


def _llama(width: int, precision: str, tokens_BL: Tensor) -> Step:
    """Return a step of transformers' Llama. In bf16, weights stay in fp32 as in our model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "max_position_embeddings": LENGTH}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, hidden_size=width, intermediate_size=3 * width, **sizes)).train()
    fast: Any = torch.compile(model, dynamic=False)
    read_BL, next_BL = tokens_BL[:, :-1].contiguous(), tokens_BL[:, 1:].contiguous()  # Llama calls view on them

    def step() -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = fast(read_BL, labels=next_BL, shift_labels=next_BL, use_cache=False).loss
        return _through(model, loss)

    return step


def _through(model: torch.nn.Module, loss: Tensor) -> float:
    loss.backward()
    model.zero_grad(set_to_none=True)
    return loss.item()
