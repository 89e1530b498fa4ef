"""DualPipe-V [2412.19437, section 3.2.1, cut in half]: ZB-V's placement, with forwards and backwards in pairs.

In the steady state a rank runs F of one chunk beside B of the other, in turn, each pair as one block. The exchange of one hides behind
the compute of its partner, which is why it was made for experts on many nodes. 2 p + 1 chunks in flight. Idle time, in times of one
chunk with B = I + W: (p - 1) (F&B + B - 3 W), where F&B is the time of a pair, if F = I. With `paired=False`, F and B run one after the
other and each result leaves at once: (p - 1) (F + I - W) if I is not longer than F. That is less, unless the block saves more than that.
"""

from __future__ import annotations

from dataclasses import replace

from parallel.errors import BadInput
from parallel.fixes import Set
from parallel.pipeline.schedule import Action, Node, Schedule, flushed, folded
from parallel.pipeline.schedules.counted import Counted
from parallel.pipeline.schedules.kind import Size


def dualpipe_v(ranks: int, microbatches: int, *, paired: bool = True) -> Schedule:
    """At least as many micro-batches as stages, of which there are two per rank."""
    pairs: set[Node] = set()
    orders = [_order(rank, ranks, microbatches, pairs) for rank in range(ranks)]
    return replace(flushed("dualpipe_v", folded(ranks), microbatches, orders), pairs=frozenset(pairs if paired else ()))


def dualpipe_v_refusal(size: Size) -> BadInput | None:
    """Fewer than two micro-batches a rank."""
    least = 2 * size.ranks
    if size.microbatches >= least:
        return None
    needed = f"at least {least}, two a rank, for dualpipe_v"
    return BadInput("microbatches", got=size.microbatches, needed=needed, fix=Set("it", least))


def _order(rank: int, ranks: int, microbatches: int, pairs: set[Node]) -> list[Action]:
    down, up, after = rank, 2 * ranks - 1 - rank, ranks - 1 - rank
    to = Counted()
    for _ in range(2 * after):
        to.forward(down)
    for _ in range(rank + 1):
        to.forward(down)
        to.forward(up)
    for _ in range(after):  # the ramp is over: each I is followed by its W, which delays nobody here
        to.input(up)
        to.weights()
        to.forward(up)
    for n in range(microbatches - 2 * ranks + rank + 1):
        _pair(to, down, up, rank, pairs if n > 0 or after > 0 else set())  # the last rank's first two stay apart: one ramp less
        _pair(to, up, down, rank, pairs)
    for _ in range(after):
        to.backward(up)
        _pair(to, up, down, rank, pairs)
    _drain(to, down, up, rank, after)
    return to.order


def _pair(to: Counted, forward: int, backward: int, rank: int, pairs: set[Node]) -> None:
    pairs.add(Node(rank, len(to.order)))
    to.forward(forward)
    to.backward(backward)


def _drain(to: Counted, down: int, up: int, rank: int, after: int) -> None:
    """The last 2 (rank + 1) backward passes: half of them whole, half with W deferred, to fill the waits that follow."""
    for n in range(2 * (rank + 1)):
        stage = up if n % 2 == 0 else down
        (to.input if n > rank else to.backward)(stage)
    for _ in range(after):
        to.weights()
        to.input(down)
    for _ in range(rank + 1):
        to.weights()
