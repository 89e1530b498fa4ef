"""Measures the time of sequence-parallel attention, forward and backward, and compares it with other methods that give the same result.

    ring      contiguous and striped       compared with ring-attention-pytorch on the same gloo ranks
    zigzag, lightseq                       compared with the contiguous ring, in which ranks have unequal amounts of work
    ulysses                                compared with gathering all keys and values, as Llama 3 does

Each method runs once in every round. A ratio compares two times of the same round; the table has the median and quartiles over rounds
(moe/bench/timing.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from moe.bench.timing import Race, conclude, importable, in_turn, race_row, slowest
from parallel.mesh.collectives import all_gather
from parallel.mesh.mesh import Axis, Degrees
from parallel.process import process
from parallel.process.fork import run_on_ranks
from parallel.sequence.balanced import Balanced
from parallel.sequence.order import Order
from parallel.sequence.ring import Ring
from parallel.sequence.ulysses import Ulysses

BATCH, LENGTH, HEADS, KV_HEADS, HEAD_SIZE = 1, 2048, 8, 4, 64

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v [batch, heads, positions of a rank, head size] -> output, shaped as q
RACES = (  # Race(name, our method, the method that it is compared with, largest allowed ratio of seconds; None: no limit)
    Race("ring contiguous", "contiguous", "peer contiguous", 1.0),
    Race("ring striped", "striped", "peer striped", 1.0),
    Race("zigzag over contiguous", "zigzag", "contiguous", None),
    Race("lightseq over contiguous", "lightseq", "contiguous", None),
    Race("ulysses over gathered", "ulysses", "gathered", 1.0),
)


def main(*, nproc: int = 2, rounds: int = 15, peers: str = "all", json: str | None = None) -> int:
    """`moe bench sequence`. Returns 1 if, for a race of RACES, the lower quartile of the ratios of seconds is above the race's limit.
    peers: all, or none to leave ring-attention-pytorch out."""
    torch.set_num_threads(1)
    with_peer = peers != "none" and importable("ring_attention_pytorch")
    times = slowest(run_on_ranks(_times, nproc, nproc, rounds, with_peer, timeout_s=600))
    rows = [race_row(race, times, ranks=nproc) for race in RACES if {race.ours, race.theirs} <= times.keys()]
    return conclude(json, "sequence", rows, shape=[BATCH, LENGTH, HEADS, KV_HEADS, HEAD_SIZE], rounds=rounds)


def _times(rank: int, ranks: int, rounds: int, with_peer: bool) -> dict[str, list[float]]:
    axis = process.connect(Degrees(sp=ranks), process.World(rank, ranks)).axis("sp")
    held = LENGTH // ranks
    generator = torch.Generator().manual_seed(rank)
    q, k, v = (torch.randn(BATCH, n, held, HEAD_SIZE, generator=generator).requires_grad_() for n in (HEADS, KV_HEADS, KV_HEADS))

    def both_ways(attend: Attend) -> None:
        dist.barrier()
        attend(q, k, v).sum().backward()

    work = {name: partial(both_ways, attend) for name, attend in _methods(axis, with_peer).items()}
    return in_turn(work, rounds=rounds, warmups=1)


def _methods(axis: Axis, with_peer: bool) -> dict[str, Attend]:
    alone = Ring(Axis("alone"), Order("contiguous", 1, LENGTH))
    found: dict[str, Attend] = {kind: Ring(axis, Order(kind, axis.size, LENGTH)) for kind in ("contiguous", "striped", "zigzag")}
    found |= {"lightseq": Balanced(axis, Order("contiguous", axis.size, LENGTH))}
    if KV_HEADS % axis.size == 0:
        found |= {"ulysses": Ulysses(axis, alone), "gathered": partial(_gathered, axis)}
    if with_peer:
        found |= {f"peer {kind}": partial(_peers, axis, kind) for kind in ("contiguous", "striped")}
    return found


def _gathered(axis: Axis, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """All-gather the keys and values, then compute the attention output of this rank's queries."""
    k, v = (all_gather(x, axis, dim=2).repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    place = torch.arange(q.shape[2]) + axis.index * q.shape[2]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.arange(LENGTH) <= place.unsqueeze(1))


def _peers(axis: Axis, kind: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from ring_attention_pytorch.ring_flash_attention import ring_flash_attn

    striped = kind == "striped"
    q, k, v = (rearrange(x, "b h l c -> b l h c") for x in (q, k, v))
    found: Tensor = ring_flash_attn(q, k, v, None, True, q.shape[1] if striped else 512, True, striped, None, axis.size)
    return found
