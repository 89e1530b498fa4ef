"""Measures the cost of `moe.verify.record`: seconds of a recorded step over an ordinary one, and host memory over the model's.

Ranks train a plain Transformer of torch under DDP. Seconds are of the processor, so that other work on the machine does not count.
Memory is the growth of a rank's largest resident size during recorded steps, over the bytes of its weights, gradients and Adam's moments.
Passes if a recorded step takes at most 2 times an ordinary step, a step after it at most 1.2 times, and memory grows by at most 20 %.
"""

from __future__ import annotations

import resource
import statistics
import tempfile
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from moe.records.results import write_json
from moe.verify import record
from parallel.process.fork import run_on_ranks


def main(*, nproc: int = 2, width: int = 768, layers: int = 4, rounds: int = 5, json: str | None = None) -> int:
    """Print the table row. Returns 1 if it does not pass (see above)."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_on_ranks(measured, nproc, folder, width, layers, rounds, timeout_s=600)
    row: dict[str, Any] = {"ranks": nproc, **{name: max(rank[name] for rank in ranks) for name in ranks[0]}}
    row["time"], row["after"] = row["recorded_seconds"] / row["plain_seconds"], row["after_seconds"] / row["plain_seconds"]
    row["memory"] = 1 + row["grown_bytes"] / row["model_bytes"]
    row["passed"] = row["time"] <= 2 and row["memory"] <= 1.2 and row["after"] <= 1.2
    print("; ".join(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()))
    if json:
        write_json(json, verb="measured recording", rows=[row])
    return 0 if row["passed"] else 1


def measured(rank: int, folder: str, width: int, layers: int, rounds: int) -> dict[str, float]:
    """Train on this rank: plain steps, recorded steps, plain steps. Return medians of seconds, and bytes."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
    net = nn.Sequential(nn.TransformerEncoder(layer, layers, enable_nested_tensor=False), nn.Linear(width, 1000))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = torch.randn(4, 64, width), torch.randint(1000, (256,))

    def step(on: bool) -> float:
        began = time.process_time()
        for _ in record(folder, model, optimizer, on=on):
            optimizer.zero_grad()
            F.cross_entropy(model(x).flatten(0, 1), y).backward()
            optimizer.step()
        return time.process_time() - began

    plain = [step(False) for _ in range(rounds + 1)][1:]
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    recorded = [step(True) for _ in range(rounds)]
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - size) * 1024
    after = [step(False) for _ in range(rounds)]
    seconds = {name: statistics.median(of) for name, of in (("plain", plain), ("recorded", recorded), ("after", after))}
    bytes_of_model = 16 * sum(p.numel() for p in model.parameters())
    return {**{f"{name}_seconds": s for name, s in seconds.items()}, "model_bytes": float(bytes_of_model), "grown_bytes": float(grown)}
