"""Counted bytes that one layer's exchange sends, compared with theory; and its time compared with a plain all-to-all of the same bytes.

    each dispatcher   balanced routing; the experts' network is the identity, so that all time is spent on sending rows and returning them
    plain             four all_to_all with equal parts that send the same number of bytes (two in the forward pass, two in the backward)
    moved experts     a skewed load: rows of the fullest rank with experts in order, and after moving them; with real experts

Bytes leaving a rank for one layer are counted, forward and backward. They must equal exactly what the dispatcher states (`traffic`;
docs/moe/dispatch.md has the formulas).
A ratio of times is the median over interleaved pairs. Ranks are forked gloo processes with one thread each.
`moe bench exchange --nproc 2 --json FILE`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe.bench.timing import in_turn, ratio
from moe.experts.dispatch.catalog import dispatcher_of, examples, open_exchange
from moe.experts.dispatch.dispatcher import Exchange, Sizes
from moe.experts.dispatch.placement import balanced_placement
from moe.experts.dispatch.steps import Steps
from moe.experts.experts import Experts
from moe.kernels import choose
from moe.recipe import sections
from moe.records.results import write_json
from moe.router.router import Routing
from parallel.errors import BadInput
from parallel.mesh.collectives import max_over
from parallel.mesh.mesh import Axis, Degrees, Mesh, divisors
from parallel.mesh.traffic import Load
from parallel.process import process
from parallel.process.fork import run_on_ranks
from parallel.process.process import World

CPU = torch.device("cpu")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SPARE = 1.25  # slots of a padded block, relative to the filled ones


@dataclass(frozen=True)
class Shape:
    """Sizes on one rank: tokens, width, hidden units of an expert; the total number of experts, and the choices of a token."""

    tokens: int = 2048
    width: int = 256
    hidden: int = 512
    experts: int = 16
    k: int = 2

    @property
    def rows(self) -> int:
        return self.tokens * self.k

    @property
    def slots(self) -> int:
        return math.ceil(SPARE * self.rows / self.experts)

    def load(self, ranks: int, number_bytes: int) -> Load:
        """A rank's work under balanced routing."""
        slots = self.experts * self.slots
        return Load(self.tokens, self.k, self.rows, slots, self.width, self.width * number_bytes, self.experts, ranks)


def routing_of(shape: Shape, *, skew: bool = False, rank: int = 0) -> Routing:
    """Routing that chooses every expert equally often; with `skew`, expert e about 1 / (e + 1) times as often as the first."""
    if skew:
        weight_E = 1 / torch.arange(1, shape.experts + 1)
        weight_TE = weight_E.expand(shape.tokens, -1)
        expert_TK = torch.multinomial(weight_TE, shape.k, generator=torch.Generator().manual_seed(rank))
    else:
        expert_TK = torch.arange(shape.rows).view(shape.tokens, shape.k) % shape.experts
    gate_TK = torch.full(expert_TK.shape, 1 / shape.k, requires_grad=True)
    scores_TE = torch.zeros(shape.tokens, shape.experts)
    return Routing(expert_TK, gate_TK, torch.ones_like(expert_TK, dtype=torch.bool), scores_TE, scores_TE, shape.slots, 1)


class Free:
    """Experts without cost: they return their rows. If an expert is split over `ranks`, each rank returns its share of the sum."""

    hidden = slice(0, 1)

    def __init__(self, ranks: int = 1) -> None:
        self.ranks = ranks

    def __call__(self, rows_RD: Tensor, **_: Any) -> Tensor:
        return rows_RD if self.ranks == 1 else rows_RD / self.ranks

    def chunks(self, count: int, _: torch.dtype) -> list[None]:
        return [None] * count


def work_of(dispatcher: Exchange, experts: Any, routing: Routing, x_TD: Tensor) -> Callable[[], None]:
    """One layer's forward and backward pass as a function."""
    grad_TD = torch.ones_like(x_TD)

    def work() -> None:
        leaf_TD = x_TD.detach().requires_grad_()
        torch.autograd.backward(dispatcher.run(leaf_TD, routing, experts), grad_TD)

    return work


def plain_of(axis: Axis, sent: int) -> Callable[[], None]:
    """Four exchanges of equal parts that together send `sent` bytes, rounded to equal parts."""
    size = max(1, round(sent / 4 / 4 / (axis.size - 1))) * axis.size
    rows, out = torch.ones(size), torch.empty(size)

    def work() -> None:
        for _ in range(4):
            dist.all_to_all_single(out, rows, group=axis.group)

    return work


def ways(mesh: Mesh, by_hidden: Mesh, shape: Shape, number_bytes: int) -> dict[str, tuple[Exchange, Free, int]]:
    """Each dispatcher's exchange, its experts, and the bytes that it states. `mesh` splits experts, `by_hidden` their
    hidden units.
    """
    ranks, node = mesh.axis("ep").size, mesh.axis("ep_inner").size
    sizes, load = Sizes(shape.width, shape.experts, shape.k, choose("auto")), shape.load(ranks, number_bytes)
    found: dict[str, tuple[Exchange, Free, int]] = {}
    for name, section in examples().items():
        dispatcher = dispatcher_of(sections.Dispatch(**section | ({"node_size": node} if "node_size" in section else {})))
        found[name] = dispatcher.open(mesh, sizes), Free(), sum(message.sent for message in dispatcher.traffic(load).every)
    # rows and fp32 sums of all ranks, and backward fp32 for both; counts of all experts
    split = (ranks - 1) * (shape.rows * (load.row_bytes + 3 * 4 * shape.width) + 8 * shape.experts)
    return found | {"etp": (open_exchange(sections.Dispatch(), by_hidden, sizes), Free(ranks), split)}


def measure(rank: int, ranks: int, rounds: int, shape: list[int]) -> list[dict[str, Any]]:
    """The rows of all dispatchers and dtypes, measured by this rank. Bytes are equal on all ranks; times are this rank's."""
    s, found, node = Shape(*shape), [], divisors(ranks)[len(divisors(ranks)) // 2]
    mesh, by_hidden = (
        process.connect(d, World(rank, ranks)) for d in (Degrees(dp=ranks, ep=ranks, ep_inner=node), Degrees(dp=ranks, etp=ranks))
    )
    counters = (mesh.communicator, by_hidden.communicator)
    for dtype_name, dtype in DTYPES.items():
        x_TD = torch.ones(s.tokens, s.width, dtype=dtype)
        for kind, (exchange, experts, stated) in ways(mesh, by_hidden, s, dtype.itemsize).items():
            work = work_of(exchange, experts, routing_of(s), x_TD)
            for counter in counters:
                counter.reset_counts()
            work()
            sent = sum(c.sent for counter in counters for c in counter.counts().values())
            seconds = in_turn({"ours": work, "plain": plain_of(mesh.axis("world"), sent)}, rounds=rounds, device=CPU)
            row = {"kind": kind, "ranks": ranks, "dtype": dtype_name, "measured_bytes": sent, "expected_bytes": stated}
            row |= {"error": sent / stated - 1, "seconds": statistics.median(seconds["ours"])}
            found.append(row | {"over_plain": ratio(seconds["ours"], seconds["plain"]), "passed": sent == stated})
    return found


def skewed(rank: int, ranks: int, rounds: int, shape: list[int]) -> dict[str, Any]:
    """Rows of the fullest rank with experts in order and after moving them, and the ratio of the layer's time after to before."""
    s = Shape(*shape)
    mesh = process.connect(Degrees(dp=ranks, ep=ranks), World(rank, ranks))
    ep, routing = mesh.axis("ep"), routing_of(s, skew=True, rank=rank)
    load_E = torch.bincount(routing.expert_TK.flatten(), minlength=s.experts)
    dist.all_reduce(load_E)
    experts = Experts(s.experts, d_model=s.width, d_ff=s.hidden, ffn="gelu")
    experts.hold(range(s.experts // ranks))
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    x_TD, sizes = torch.ones(s.tokens, s.width), Sizes(s.width, s.experts, s.k, experts.kernels)
    work: dict[str, Callable[[], object]] = {}
    fullest: dict[str, int] = {}
    for when, placement in (("before", None), ("after", balanced_placement(load_E.tolist(), ranks))):
        way = open_exchange(sections.Dispatch(), mesh, sizes).layer("", placement)
        assert isinstance(way, Steps)
        fullest[when] = int(max_over(torch.tensor(sum(way.route(way, routing).counts)), ep))
        work[when] = work_of(way, experts, routing, x_TD)
    seconds = in_turn(work, rounds=rounds, device=CPU)
    even = s.rows  # rows of each rank with an even load
    return {f"largest_rank_{when}": rows / even for when, rows in fullest.items()} | {
        "over_before": ratio(seconds["after"], seconds["before"])
    }


def main(*, nproc: int = 2, rounds: int = 21, json: str | None = None) -> int:
    """`moe bench exchange`: returns 1 if a dispatcher sends another number of bytes than theory."""
    s = Shape()
    if nproc < 2 or s.experts % (2 * nproc):
        fits = [n for n in divisors(s.experts // 2) if n > 1]
        raise BadInput(
            "--nproc", got=nproc, needed=f"at least 2 ranks, which share {s.experts} experts", fix=f"--nproc {fits[0]} or {fits[1]}"
        )
    torch.set_num_threads(1)
    sizes = [s.tokens, s.width, s.hidden, s.experts, s.k]
    rows: list[dict[str, Any]] = run_on_ranks(measure, nproc, nproc, rounds, sizes, timeout_s=600)[0]
    print(f"{nproc} ranks; of each {s.tokens} tokens of width {s.width}, top-{s.k} of {s.experts} experts; one layer, forward + backward")
    print(f"{'dispatcher':<14}{'dtype':<7}{'bytes sent':>14}{'theory':>14}{'seconds':>10}{'over plain':>12}")
    for r in rows:
        said = "" if r["passed"] else "  FAIL"
        print(
            f"{r['kind']:<14}{r['dtype']:<7}{r['measured_bytes']:>14,}{r['expected_bytes']:>14,}{r['seconds']:>10.4f}{r['over_plain']:>12.2f}{said}"
        )
    moved: dict[str, Any] = run_on_ranks(skewed, nproc, nproc, rounds, sizes, timeout_s=600)[0]
    before, after = moved["largest_rank_before"], moved["largest_rank_after"]
    print(f"skewed load: the fullest rank computes {before:.2f} of an even share with experts in order, {after:.2f} after moving them;")
    print(f"the layer with its experts then takes {moved['over_before']:.2f} of the time")
    if json:
        write_json(json, verb="bench exchange", rows=rows, rounds=rounds, shape=vars(s), rebalancing=moved)
    return 0 if all(r["passed"] for r in rows) else 1
