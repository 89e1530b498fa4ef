"""The GPU kernels, in Triton. Matrix products gather their input rows while loading. The backward pass recomputes the activations.

    router.py    route: scores to gates, losses
    routing.py   top_k, kept, queues, plan; permute, reorder, combine
    moves.py     kernels that count and sort choices, and move rows
    network.py   grouped_ffn, routed_ffn       gemm.py    kernels of matrix products
    jitter.py    jittered                      device.py  tile sizes, and the device a kernel runs on

Deterministic: no atomics, one writer per element, sums in fp32 in a fixed order. Importing this package imports triton.
Sources: SonicMoE (arXiv 2512.14080), ScatterMoE (arXiv 2403.08245), MegaBlocks (arXiv 2211.15841).
"""

from __future__ import annotations

from moe.kernels.triton.jitter import jittered
from moe.kernels.triton.network import grouped_ffn, routed_ffn
from moe.kernels.triton.router import route
from moe.kernels.triton.routing import by_bin, combine, kept, permute, plan, queues, reorder, top_k

__all__ = ["by_bin", "combine", "grouped_ffn", "jittered", "kept", "permute", "plan", "queues", "reorder", "route", "routed_ffn", "top_k"]
