"""Fabricates a plausible run without training: the lines that a real run would write, to test code that reads them."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from moe.records.metrics import write_summary

RECIPE = 'model:\n  d_model: 256  # dense_tiny.yaml\nrouter:\n  preset: "switch"  # <switch_tiny> & co\n'


def layer_line(rng: random.Random, *, layer: int, experts: int, progress: float, tokens: int) -> dict[str, Any]:
    """Return the figures of one MoE layer in one step. Loads become equal as `progress` goes from 0 to 1, but expert 0 of layer 1 stays
    underused; kept + dropped = tokens."""
    skew = 1.6 * math.exp(-8 * progress) + 0.15
    weights = [math.exp(skew * math.sin(7.1 * expert + layer) + 0.05 * rng.gauss(0, 1)) for expert in range(experts)]
    if layer == 1 and progress > 0.5:
        weights[0] *= 0.1
    load = [w / sum(weights) for w in weights]
    dropped = round(tokens * sum(max(0.0, share - 1.25 / experts) for share in load))
    balance = experts * sum(share * share for share in load)
    entropy = -sum(share * math.log(share) for share in load)
    return {
        "layer": layer,
        "load": load,
        "kept": tokens - dropped,
        "dropped": dropped,
        "balance_loss": 0.01 * balance,
        "z_loss": 0.002 * (1 + progress),
        "entropy": entropy,
        "bias_min": -0.05 * progress * (layer + 1),
        "bias_max": 0.02 * progress,
        "bias_mean_abs": 0.01 * progress,
    }


def step_line(
    step: int, *, steps: int = 300, experts: int = 8, layers: tuple[int, ...] = (1, 3), seed: int = 0, gain: float = 0.0, fp16: bool = False
) -> dict[str, Any]:
    """Return one training line. gain: lowers the loss, as a better model does. fp16: with a dynamic loss scale and skipped steps."""
    rng, tokens, progress = random.Random(1000 * seed + step), 8192, step / steps
    parts = {"dense": 0.9 * math.exp(-2 * progress) + 0.3 + 0.1 * rng.random()}
    moe = [layer_line(rng, layer=layer, experts=experts, progress=progress, tokens=tokens) for layer in layers]
    if moe:
        parts |= {"router": 0.05 + 0.02 * rng.random(), "expert": 0.4 * math.exp(-progress) + 0.05 * rng.random()}
    skipped = fp16 and step in (3, 4, 120)
    return {
        "step": step,
        "kind": "train",
        "loss": curve(progress, gain=gain) + 0.06 * rng.gauss(0, 1),
        "balance_loss": sum(m["balance_loss"] for m in moe),
        "z_loss": sum(m["z_loss"] for m in moe) if moe else 0.0,
        "grad_norm": None if skipped else math.sqrt(sum(p * p for p in parts.values())),
        "grad_norm_parts": {} if skipped else parts,
        "lr": 0.002 * min(1.0, step / 50) * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress))),
        "tokens": tokens,
        "tokens_per_second": (4000 if step == 1 else 20400) * (1 + 0.03 * rng.gauss(0, 1)),
        "step_seconds": 2.0 if step == 1 else 0.4,
        "memory_bytes": 5.1e8 + 2e7 * min(step, 5),
        "loss_scale": 65536.0 / (4 if step > 4 else 1) if fp16 else 1.0,
        "skipped": skipped,
        "skipped_total": sum(s <= step for s in (3, 4, 120)) if fp16 else 0,
        "dropped_share": sum(m["dropped"] for m in moe) / (tokens * len(moe)) if moe else 0.0,
        "moe": moe,
        "time": 1.8e9 + 0.4 * step,
    }


def curve(progress: float, *, gain: float = 0.0) -> float:
    """Return the loss without noise at `progress` from 0 to 1, which begins at log(256). gain: lowers it."""
    return 1.7 + 3.85 * math.exp(-9 * progress) - gain * progress


def eval_line(step: int, *, steps: int = 300, gain: float = 0.0, shift: float = 0.0) -> dict[str, Any]:
    loss = curve(step / steps, gain=gain) + 0.08 + shift
    return {"step": step, "kind": "eval", "validation_loss": loss, "bits_per_byte": loss / math.log(2), "time": 1.8e9 + 0.4 * step}


def run_lines(steps: int = 300, *, eval_every: int = 50, upto: int | None = None, **options: Any) -> list[dict[str, Any]]:
    """Return the lines of a run of `steps` steps that has reached step `upto`."""
    lines = []
    for step in range(1, (upto or steps) + 1):
        lines.append(step_line(step, steps=steps, **options))
        if step % eval_every == 0 or step == steps:
            lines.append(eval_line(step, steps=steps, gain=options.get("gain", 0.0)))
        if step % 100 == 0:
            lines.append({"step": step, "kind": "event", "event": "saved", "path": f"checkpoints/step-{step}", "time": 1.8e9 + 0.4 * step})
    return lines


def summary(steps: int = 300) -> dict[str, Any]:
    return {
        "recipe": "switch_tiny",
        "steps": steps,
        "validation_loss": 1.7812,
        "bits_per_byte": 2.5697,
        "tokens_per_second": 20412.3,
        "train_seconds": 131.2,
        "dropped_share": 0.0312,
        "peak_memory_bytes": 6.1e8,
        "parameters_total": 10_621_184,
        "parameters_active": 3_280_128,
        "flops_per_token": 2.1e7,
        "matmul_share": 0.41,
        "sample": "def __init__(self, name):\n    if name is None:\n        raise ValueError('<b>name</b> & value')\n",
        "world": 2,
        "commit": "0123abc",
        "hardware": "2 CPU cores, 8 GB",
    }


def run_folder(out: Path, *, finished: bool = True, lines: list[dict[str, Any]] | None = None, **options: Any) -> Path:
    """Write a run's folder as training does, but without TensorBoard's files, and return its path."""
    out.mkdir(parents=True, exist_ok=True)
    lines = run_lines(**options) if lines is None else lines
    (out / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (out / "recipe.yaml").write_text(RECIPE)
    if finished:
        write_summary(out, summary(options.get("steps", 300)))
    return out
