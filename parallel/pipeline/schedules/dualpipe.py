"""DualPipe and DualPipe-V [2412.19437, section 3.2.1]: a forward pass F and the backward pass B of another micro-batch run as one block (a
pair), so that the communication of each overlaps with the compute of the other. B consists of I (gradients of inputs) and W (of weights).

DualPipe-V: rank r of p holds two chunks, stages r and 2 p - 1 - r. A rank keeps the activations of up to 2 p + 1 micro-batches, summed over
its chunks. In each step a rank is idle for (p - 1) (F&B + B - 3 W) if F = I. Here F, B, I and W are times of one chunk, and F&B is the time
of a pair. With `paired=False`, F and B run one after the other, and the idle time is (p - 1) (F + I - W) if I is not longer than F.

DualPipe: two pipelines in opposite directions, each with half of the micro-batches. Ranks r and p - 1 - r both hold stages r and p - 1 - r.
An action S all-reduces these stages' gradients between the two ranks. The first half of the ranks runs the actions of DualPipe-V on p / 2
ranks in the same order, with two directions instead of two chunks; the second half is its mirror image. A rank keeps the activations of up
to p + 1 micro-batches. The idle time is as above, with p / 2 - 1 in place of p - 1.
"""

from __future__ import annotations

from dataclasses import replace

from parallel.errors import BadInput
from parallel.fixes import Set
from parallel.pipeline.schedule import Action, Node, Op, Schedule, flushed, folded, stage_complete_at
from parallel.pipeline.schedules.kind import Size
from parallel.pipeline.schedules.zero_bubble import NumberedOrder


def dualpipe_v(ranks: int, microbatches: int, *, paired: bool = True) -> Schedule:
    """Build DualPipe-V. `microbatches` must be at least 2 * ranks. paired: a forward pass F and the backward pass B of another micro-batch
    run as one block; False: one after the other."""
    pairs: set[Node] = set()
    orders = [_v_order(rank, ranks, microbatches, pairs) for rank in range(ranks)]
    return replace(flushed("dualpipe_v", folded(ranks), microbatches, orders), pairs=frozenset(pairs if paired else ()))


def dualpipe_v_refusal(size: Size) -> BadInput | None:
    """Return an error for fewer than two micro-batches a rank."""
    least = 2 * size.ranks
    if size.microbatches >= least:
        return None
    needed = f"at least {least}, two a rank, for dualpipe_v"
    return BadInput("microbatches", got=size.microbatches, needed=needed, fix=Set("it", least))


def dualpipe(ranks: int, microbatches: int, *, paired: bool = True) -> Schedule:
    """Build DualPipe. `ranks` and `microbatches` must be even, and `microbatches` at least 2 * ranks. paired: a forward pass F and the
    backward pass B of another micro-batch run as one block; False: one after the other."""
    half = dualpipe_v(ranks // 2, microbatches // 2, paired=paired)
    orders = [_order(half.orders[min(rank, ranks - 1 - rank)], rank, ranks, microbatches // 2) for rank in range(ranks)]
    homes = [sorted((stage, ranks - 1 - stage)) for stage in range(ranks)]
    pairs = frozenset(Node(rank, at) for of, at in half.pairs for rank in (of, ranks - 1 - of))
    return replace(flushed("dualpipe", homes, microbatches, orders), pairs=pairs)


def dualpipe_refusal(size: Size) -> BadInput | None:
    """Return an error for an odd number of ranks or micro-batches, or for fewer than two micro-batches a rank."""
    ranks, microbatches = size.ranks, size.microbatches
    if ranks % 2:
        needed = "an even number for dualpipe, because its two directions meet in the middle"
        return BadInput("stages", got=ranks, needed=needed, fix=Set("it", *sorted({max(2, ranks - 1), ranks + 1})))
    if microbatches % 2 or microbatches < 2 * ranks:
        near = max(2 * ranks, microbatches + microbatches % 2)
        needed = f"an even number of at least {2 * ranks}, two a rank, for dualpipe"
        return BadInput("microbatches", got=microbatches, needed=needed, fix=Set("it", near))
    return None


def _v_order(rank: int, ranks: int, microbatches: int, pairs: set[Node]) -> list[Action]:
    """Return a DualPipe-V rank's order without updates. pairs: the function adds the node of each forward pass that runs as one block with
    the next action, a backward pass."""
    down, up = rank, 2 * ranks - 1 - rank  # stages of the rank's two chunks
    after = ranks - 1 - rank  # number of ranks after this one
    to = NumberedOrder()

    def pair(forward: int, backward: int) -> None:
        pairs.add(Node(rank, len(to.order)))
        to.forward(forward)
        to.backward(backward)

    for _ in range(2 * after):
        to.forward(down)
    for _ in range(rank + 1):
        to.forward(down)
        to.forward(up)
    for _ in range(after):
        to.input(up)
        to.weights()
        to.forward(up)
    for _ in range(microbatches - 2 * ranks + rank + 1):
        pair(down, up)
        pair(up, down)
    if not after:  # on the last rank, F and B of the first pair run separately, so that F's result is sent earlier
        pairs.discard(Node(rank, 2 * (rank + 1)))
    for _ in range(after):
        to.backward(up)
        pair(up, down)
    for n in range(2 * (rank + 1)):  # the last backward passes: half of them whole (B), then the rest split, so that W fills later waits
        stage = up if n % 2 == 0 else down
        (to.input if n > rank else to.backward)(stage)
    for _ in range(after):
        to.weights()
        to.input(down)
    for _ in range(rank + 1):
        to.weights()
    return to.order


def _order(side: tuple[Action, ...], rank: int, ranks: int, each: int) -> list[Action]:
    """Return the order of a DualPipe rank, without updates, made from `side`, the order of a DualPipe-V rank.
    each: number of micro-batches of each pipeline. Micro-batches 0 to `each` - 1 go down the ranks, the others up. The all-reduce S follows
    a stage's last B or W."""
    first_half, complete, found = 2 * rank < ranks, stage_complete_at(side), []
    for at, (op, stage, microbatch, _) in enumerate(side):
        if op is Op.U:
            continue
        down = (2 * stage < ranks) == first_half
        found.append(Action(op, stage, microbatch if down else each + microbatch))
        found += [Action(Op.S, stage, version=1)] * (at in complete)
    return found
