"""Compares the bytes that each MoE dispatcher sends with the dispatcher's formula, and its time with a plain all-to-all's.

    each dispatcher   balanced routing; experts return their input, so that all time is spent on sending rows to experts and back
    plain             four all_to_all_single with equal splits that together send as many bytes, as in a forward and a backward pass
    moved experts     skewed routing, real experts; measured before and after `balanced_placement` moves experts between ranks:
                      the largest number of rows on a rank, and the time

The command fails if a rank sends more or fewer bytes in forward and backward than the formula gives (`traffic`; docs/moe/dispatch.md).
Ratios of times are medians over rounds. Ranks are forked gloo processes with one thread each.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe.bench.layers.layers import Shape
from moe.bench.timing import conclude, in_turn, ratio
from moe.experts.dispatch import dispatcher_of, examples, open_exchange
from moe.experts.dispatch.dispatcher import Exchange, Sizes
from moe.experts.dispatch.placement import balanced_placement
from moe.experts.dispatch.steps import Steps
from moe.experts.experts import Experts, Routed
from moe.kernels import choose
from moe.kernels.cpu import combine, permute
from moe.recipe import sections
from moe.router.routing import Routing
from parallel.errors import BadInput
from parallel.mesh.collectives import max_over
from parallel.mesh.mesh import Axis, Degrees, Mesh, divisors
from parallel.mesh.traffic import Load
from parallel.process import process
from parallel.process.fork import run_on_ranks

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SPARE = 1.25  # padded dispatch: number of an expert's slots / number of its rows
SHAPE = Shape(tokens=2048, width=256, hidden=512, experts=16, k=2)


def load_of(shape: Shape, ranks: int, number_bytes: int) -> Load:
    """Return a rank's Load (numbers of tokens, rows and slots) with balanced routing. number_bytes: bytes of one element of a row."""
    slots, row_bytes = shape.experts * _slots(shape), shape.width * number_bytes

    def reached(targets: int) -> float:
        target_TK = _routing(shape).expert_TK * targets // shape.experts
        return sum(len(set(targets_K)) for targets_K in target_TK.tolist()) / shape.tokens

    return Load(shape.tokens, shape.k, shape.rows, slots, shape.width, row_bytes, shape.experts, ranks, reached=reached)


def _slots(shape: Shape) -> int:
    return math.ceil(SPARE * shape.rows / shape.experts)


def _routing(shape: Shape, *, skew: bool = False, rank: int = 0) -> Routing:
    """Return a Routing in which all experts are chosen equally often: E / k tokens choose k consecutive experts each, the next
    E / k tokens choose k experts that are E / k apart, and so on. With `skew`, expert e is chosen at random with weight 1 / (e + 1)."""
    if skew:
        weight_E = 1 / torch.arange(1, shape.experts + 1)
        weight_TE = weight_E.expand(shape.tokens, -1)
        expert_TK = torch.multinomial(weight_TE, shape.k, generator=torch.Generator().manual_seed(rank))
    else:
        order_E = torch.arange(shape.experts)
        both_NK = torch.cat((order_E.view(-1, shape.k), order_E.view(shape.k, -1).t()))
        expert_TK = both_NK.repeat(-(-shape.tokens // len(both_NK)), 1)[: shape.tokens]
    gate_TK = torch.full(expert_TK.shape, 1 / shape.k, requires_grad=True)
    scores_TE = torch.zeros(shape.tokens, shape.experts)
    return Routing(expert_TK, gate_TK, torch.ones_like(expert_TK, dtype=torch.bool), scores_TE, scores_TE, _slots(shape), 1)


class _Identity:
    """Experts that return their input rows / ranks. ranks: number of etp ranks, over which outputs are summed. With `counts` of type
    Routed, the input is tokens: they are permuted to rows, and combined with their gates."""

    hidden, kernels = slice(0, 1), choose("auto")

    def __init__(self, ranks: int = 1) -> None:
        self.ranks = ranks

    def __call__(self, rows_RD: Tensor, *, counts: Tensor | Routed, **_: Any) -> Tensor:
        if isinstance(counts, Routed):
            return combine(permute(rows_RD, counts.plan), counts.gate_TK, counts.plan)
        return rows_RD if self.ranks == 1 else rows_RD / self.ranks

    def chunks(self, count: int) -> list[None]:
        return [None] * count


def _pass(dispatcher: Exchange, experts: Any, routing: Routing, x_TD: Tensor) -> Callable[[], None]:
    """Return a function that runs forward and backward of a layer: `dispatcher` sends the tokens x to `experts` by `routing`, and back."""
    grad_TD = torch.ones_like(x_TD)

    def work() -> None:
        leaf_TD = x_TD.detach().requires_grad_()
        torch.autograd.backward(dispatcher.run(leaf_TD, routing, experts), grad_TD)

    return work


def _plain(axis: Axis, sent: int) -> Callable[[], None]:
    """Return a function that runs four all_to_all_single with equal splits, which together send about `sent` bytes from each rank."""
    size = max(1, round(sent / 4 / 4 / (axis.size - 1))) * axis.size
    rows, out = torch.ones(size), torch.empty(size)

    def work() -> None:
        for _ in range(4):
            dist.all_to_all_single(out, rows, group=axis.group)

    return work


def _exchanges(mesh: Mesh, by_hidden: Mesh, shape: Shape, number_bytes: int) -> dict[str, tuple[Exchange, _Identity, int]]:
    """Return a dict: name of a dispatcher -> (its Exchange, experts, bytes that a rank sends by its formula). mesh: all ranks are ep ranks.
    by_hidden: all ranks are etp ranks. number_bytes: bytes of one element of a row."""
    ranks, node = mesh.axis("ep").size, mesh.axis("ep_inner").size
    sizes, load = Sizes(shape.width, shape.experts, shape.k, choose("auto")), load_of(shape, ranks, number_bytes)
    found: dict[str, tuple[Exchange, _Identity, int]] = {}
    for name, section in examples().items():
        dispatcher = dispatcher_of(sections.Dispatch(**section | ({"node_size": node} if "node_size" in section else {})))
        found[name] = dispatcher.open(mesh, sizes), _Identity(), sum(message.sent for message in dispatcher.traffic(load).every)
    # with etp, a rank sends to every other rank: the rows; three tensors of the rows' shape in fp32 (partial outputs, gradients of rows
    # and of outputs); and 8 bytes for each expert
    split = (ranks - 1) * (shape.rows * (load.row_bytes + 3 * 4 * shape.width) + 8 * shape.experts)
    return found | {"etp": (open_exchange(sections.Dispatch(), by_hidden, sizes), _Identity(ranks), split)}


def measure(rank: int, ranks: int, rounds: int, shape: Shape) -> list[dict[str, Any]]:
    """Return a table row for each dispatcher and dtype: bytes that this rank sends, counted and by the formula, and seconds."""
    found, divide = [], divisors(ranks)
    degrees = (Degrees(dp=ranks, ep=ranks, ep_inner=divide[len(divide) // 2]), Degrees(dp=ranks, etp=ranks))
    mesh, by_hidden = (process.connect(d, process.World(rank, ranks)) for d in degrees)
    counters = (mesh.communicator, by_hidden.communicator)
    for dtype_name, dtype in DTYPES.items():
        x_TD = torch.ones(shape.tokens, shape.width, dtype=dtype)
        for kind, (exchange, experts, stated) in _exchanges(mesh, by_hidden, shape, dtype.itemsize).items():
            work = _pass(exchange, experts, _routing(shape), x_TD)
            for counter in counters:
                counter.reset_counts()
            work()
            sent = sum(c.sent for counter in counters for c in counter.counts().values())
            seconds = in_turn({"ours": work, "plain": _plain(mesh.axis("world"), sent)}, rounds=rounds)
            row = {"kind": kind, "ranks": ranks, "dtype": dtype_name, "measured_bytes": sent, "expected_bytes": stated}
            row |= {"error": sent / stated - 1, "seconds": statistics.median(seconds["ours"])}
            found.append(row | {"over_plain": ratio(seconds["ours"], seconds["plain"]), "passed": sent == stated})
    return found


def skewed(rank: int, ranks: int, rounds: int, s: Shape) -> dict[str, Any]:
    """Return three entries on the effect of moving experts, with skewed routing. largest_rank_before, largest_rank_after: largest number
    of rows on a rank / mean over ranks. over_before: seconds after the move / seconds before it.
    """
    mesh = process.connect(Degrees(dp=ranks, ep=ranks), process.World(rank, ranks))
    ep, routing = mesh.axis("ep"), _routing(s, skew=True, rank=rank)
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
        exchange = Steps.over(("ep",), mesh, sizes).layer("", placement)
        _, planned = exchange.planned(routing)
        fullest[when] = int(max_over(planned()[0].arrived.counts_PE.sum(), ep))
        work[when] = _pass(exchange, experts, routing, x_TD)
    seconds = in_turn(work, rounds=rounds)
    shares = {f"largest_rank_{when}": rows / s.rows for when, rows in fullest.items()}
    return shares | {"over_before": ratio(seconds["after"], seconds["before"])}


def main(*, nproc: int = 2, rounds: int = 21, json: str | None = None) -> int:
    """Run `moe bench exchange`: measure each dispatcher's bytes and time on `nproc` ranks, and print a table. Returns 1 if a dispatcher
    sends another number of bytes than its formula gives."""
    s = SHAPE
    if nproc < 2 or s.experts % (2 * nproc):
        fits = [n for n in divisors(s.experts // 2) if n > 1]
        needed = f"at least 2 ranks, with an even number of the {s.experts} experts on each"
        raise BadInput("--nproc", got=nproc, needed=needed, fix=f"--nproc {fits[0]} or {fits[1]}")
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = run_on_ranks(measure, nproc, nproc, rounds, s, timeout_s=600)[0]
    print(f"{nproc} ranks, each with {s.tokens} tokens of width {s.width}; top-{s.k} of {s.experts} experts; one layer, forward + backward")
    print(f"{'dispatcher':<14}{'dtype':<7}{'bytes sent':>14}{'formula':>14}{'seconds':>10}{'over plain':>12}")
    for r in rows:
        cells = f"{r['kind']:<14}{r['dtype']:<7}{r['measured_bytes']:>14,}{r['expected_bytes']:>14,}"
        print(f"{cells}{r['seconds']:>10.4f}{r['over_plain']:>12.2f}{'' if r['passed'] else '  FAIL'}")
    moved: dict[str, Any] = run_on_ranks(skewed, nproc, nproc, rounds, s, timeout_s=600)[0]
    before, after = moved["largest_rank_before"], moved["largest_rank_after"]
    print(f"skewed load: most rows on a rank / mean: {before:.2f} with experts in order, {after:.2f} after moving them;")
    print(f"the layer with its experts then takes {moved['over_before']:.2f} of its time before the move")
    return conclude(json, "exchange", rows, rounds=rounds, shape=vars(s), rebalancing=moved)
