"""`python -m tests.campaigns corruption`: flips bits in audited runs (moe/train/parts/audit.py) and reports the outcome of the step.

A flip changes one bit of one number on one rank: of a weight or moment between steps or during the passes, of a layer's output, of a
gradient, or of a weight just after the update. The following step is audited and compared with the same step without the flip:

    repaired   found, and weights and moments after the step are bitwise equal to the undisturbed step
    ended      found, and the run ended with one line because no copy was known to be intact
    masked     not found, but bitwise equal: the number was not used, or rounding hid the bit
    missed     not found, and numbers differ

A try passes if its outcome is `masked`, or `repaired`; with only two copies, `ended`. A tensor without copies cannot be compared, so a
flip between steps is missed there; such rows say `cannot be seen`. Further rows: steps without a fault, which must raise no alarm, and
the cost of `train.audit_every: 100` as a share of a run's time.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # torch imports it with the first optimizer, in 1.5 s; imported once, before ranks are forked
from torch import Tensor, nn

from moe.bench.timing import in_turn, ratio
from moe.checks.together import check_run
from moe.data.token_shard import TokenShard
from moe.experts.experts import Experts
from moe.nn.linear import Linear
from moe.parallelize.build import build
from moe.parallelize.sequence import shard_of
from moe.recipe.load import build_run
from moe.recipe.sections import Run
from moe.train.loop.step import accumulate, finish
from moe.train.parts.audit import Auditor
from moe.train.parts.executor import Executor, start_executor
from moe.train.parts.numbers import Numbers
from parallel.data.load import given
from parallel.errors import Ended
from parallel.mesh.mesh import Mesh
from parallel.numerics.precision import LossScale
from parallel.process import process
from parallel.process.fork import each_on_ranks
from parallel.process.process import World
from tests.campaigns.faults import Row

CPU = torch.device("cpu")
TINY: dict[str, Any] = {
    "model": {"num_layers": 2, "d_model": 16, "num_heads": 2, "d_ff": 24, "max_length": 12, "moe_every": 2, "dropout": 0.1},
    "degrees": {"ep": 1},
    "experts": {"num_experts": 4},
    "router": {"jitter": 0.1},
    "train": {"global_batch": 12, "eval_sequences": 12, "audit_every": 1},
}
LARGER: dict[str, Any] = {
    "model": {"num_layers": 4, "d_model": 256, "num_heads": 4, "d_ff": 1024, "max_length": 256, "moe_every": 2},
    "experts": {"num_experts": 4},
    "train": {"global_batch": 8, "audit_every": 1},
}
MOST_SHARE = 0.015  # largest cost of audits, as a share of a run's time, if one step in a hundred is audited
WHERE = ("sign", "exponent", "high mantissa", "low mantissa")


@dataclass(frozen=True)
class Fault:
    """A kind of flip. `what`: kind of tensor and moment, a key of `_PUT`. `expected`: the outcome that passes, in addition to masked.
    `few`, `full`: number of flips by default and with --full."""

    what: str
    ranks: int
    sections: dict[str, Any] = field(default_factory=dict)
    layout: str = "ddp"
    expected: str = "repaired"
    few: int = 6
    full: int = 50

    def __str__(self) -> str:
        seen = {"ended": ", two copies", "missed": ", held once: cannot be seen"}.get(self.expected, "")
        return f"{self.what} ({self.layout}, {self.ranks} rank{'s' if self.ranks > 1 else ''}{seen})"


_FSDP = {"sharding": {"kind": "fsdp"}}
_ZERO = {"sharding": {"kind": "zero", "stage": 1}}
_EP: dict[str, Any] = {"degrees": {"ep": 2}}
FAULTS = (
    Fault("weight at rest", 3, full=60),
    Fault("moment at rest", 3, full=60),
    Fault("weight at rest", 2, expected="ended", full=30),
    Fault("weight at rest", 2, _ZERO, "zero1", full=30),
    Fault("part at rest", 2, _FSDP, "fsdp", expected="missed", few=3, full=20),
    Fault("weight during the passes", 2, full=40),
    Fault("moment during the passes", 2, full=20),
    Fault("product, forward", 1, full=40),
    Fault("product, forward", 2, _EP, "ddp, ep 2", full=40),
    Fault("product, backward", 2, full=40),
    Fault("product, backward", 2, _FSDP, "fsdp", full=30),
    Fault("gradient, before the sum", 2, full=30),
    Fault("gradient, after the sum", 2, full=30),
    Fault("weight after the update", 3, full=30),
)
CLEAN: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("ddp", 3, {}),
    ("ddp, ep 2", 2, _EP),
    ("fsdp", 2, _FSDP),
    ("zero1", 2, _ZERO),
    ("one process", 1, {}),
)


def rows(*, full: bool = False, rounds: int | None = None, only: str = "") -> Iterator[Row]:
    """Yield a row for each kind of flip, rows for steps without a flip, and rows for the cost of audits."""
    if any("zero" in fault.layout and only in str(fault) for fault in FAULTS):
        from parallel.data.deepspeed import load_deepspeed

        load_deepspeed()  # imported before forking, because it takes seconds
    for fault in FAULTS:
        if only in str(fault):
            yield _row(fault, rounds or (fault.full if full else fault.few))
    for layout, ranks, sections in CLEAN:
        name = f"no fault ({layout}, {ranks} rank{'s' if ranks > 1 else ''}): no alarm"
        if only in name:
            yield _clean(name, ranks, sections, rounds or (200 if full else 4))
    for ranks in (1, 2):
        name = f"time at audit_every 100 ({ranks} rank{'s' if ranks > 1 else ''})"
        if only in name:
            yield _cost(name, ranks, rounds or (15 if full else 2))


# --- on one rank ------------------------------------------------------------------------------------------------------------


class Trained:
    """A model after some steps, which is restored before every fault. `events`: events that its auditor recorded."""

    def __init__(self, rank: int, ranks: int, values: dict[str, Any], *, steps: int = 2) -> None:
        self.run: Run = check_run(build_run(values), ranks)
        self.mesh: Mesh = process.connect(self.run.mesh_degrees(), World(rank, ranks, rank, ranks))
        model, layouts = build(self.run, self.mesh, device=CPU)
        self.executor: Executor = start_executor(self.run, model, layouts, self.mesh)
        self.engine, self.model, self.scale = self.executor.engine, model, LossScale()
        self.shard: TokenShard = shard_of(self.run, self.mesh, self.run.train.global_batch)
        self.events: list[dict[str, Any]] = []
        self.auditor = Auditor(self.engine, self.mesh, every=1, record=self.events.append, note=lambda _: None, folder=Path("/nowhere"))
        self.steps = steps
        for step in range(steps):
            self.step(step)
        self.begun = self.state()

    def passes(self, step: int) -> Numbers:
        draw = torch.Generator().manual_seed(step)
        sequences = torch.randint(256, (self.run.train.global_batch, self.run.model.max_length + 1), generator=draw)
        mine = self.shard.of_batch(sequences)
        return accumulate(self.executor, mine, shard=self.shard, microbatches=1, seed=0, step=step)

    def step(
        self, step: int, *, audited: bool = False, compute: Callable[[], Numbers] | None = None, then: Callable[[], object] = int
    ) -> None:
        compute = compute or partial(self.passes, step)
        numbers = self.auditor.passes(compute, step=step + 1) if audited else compute()
        finish(self.engine, numbers, world=self.mesh.axis("world"), scale=self.scale, lr=1e-2, clip_norm=1.0, device=CPU)
        then()
        if audited:
            self.auditor.compare_copies(step + 1, "after the update")

    def state(self) -> dict[str, dict[str, Tensor]]:
        return {name: {kind: t.detach().clone() for kind, t in self.engine.state(name).items()} for name in self.engine.layouts}

    def again(self) -> None:
        """Restore the state in which faults begin."""
        self.engine.drop_gradients()
        self.engine.load_state(self.begun, given(self.begun), steps=self.steps)
        self.events.clear()

    def is_as(self, other: dict[str, dict[str, Tensor]]) -> bool:
        mine = self.state()
        return all(torch.equal(_bits(mine[name][kind]), _bits(t)) for name, kinds in other.items() for kind, t in kinds.items())


def _bits(tensor: Tensor) -> Tensor:
    """Return the bits of an fp32 tensor as int32, which compare NaN as equal to itself and 0.0 as different from -0.0."""
    return tensor.contiguous().reshape(-1).view(torch.int32)


def flip(tensor: Tensor, bit: int, at: float) -> None:
    """Flip one bit of one element of an fp32 tensor, in place. `at`: the element's position as a share of the tensor's length."""
    with torch.no_grad():
        number = int(at * tensor.numel())
        flat = tensor.detach().contiguous().reshape(-1)
        flat.view(torch.int32)[number] ^= torch.tensor(1 << bit if bit < 31 else -(2**31), dtype=torch.int32)
        tensor.detach().copy_(flat.view(tensor.shape))


def once(trained: Trained, what: str, seed: str, wanted: dict[str, dict[str, Tensor]]) -> dict[str, Any]:
    """Make one flip, train its step, and return this rank's results. All ranks draw the same random numbers; one rank makes the flip."""
    rng = random.Random(seed)
    bit, at, place, rank, call = (
        rng.randrange(32),
        rng.random(),
        rng.random(),
        rng.randrange(trained.mesh.axis("world").size),
        rng.randrange(2),
    )
    trained.again()
    started, ended = time.perf_counter(), ""
    put = _PUT[what](trained, partial(flip, bit=bit, at=at), place, call) if rank == trained.mesh.rank else Put()
    calls = iter(range(99))

    def compute() -> Numbers:
        with put.around(next(calls)):
            return trained.passes(trained.steps)

    try:
        put.before()
        trained.step(trained.steps, audited=True, compute=compute, then=put.after)
    except Ended as line:
        ended = str(line)
    seconds = time.perf_counter() - started
    equal = not ended and trained.is_as(wanted)
    found = bool(trained.events)
    return {"bit": bit, "found": found, "ended": ended, "equal": equal, "rank": rank, "seconds": seconds}


@dataclass
class Put:
    """Hooks that put a fault into a step: `before` the step, around its forward and backward pass (`passes`), or `after` its update."""

    before: Callable[[], object] = lambda: None
    passes: Callable[[ExitStack, int], object] = lambda stack, number: None
    after: Callable[[], object] = lambda: None

    def around(self, number: int) -> ExitStack:
        stack = ExitStack()
        self.passes(stack, number)
        return stack


Flip = Callable[[Tensor], None]


def _kept(trained: Trained, kind: str, place: float) -> Tensor:
    """Return this rank's tensor at `place`, from 0 to 1, of a kind: "weight" or "moment" with copies on other ranks, or "part": without."""
    held = []
    for one in trained.engine.tensors():
        copies = bool(one.axes) and trained.mesh.axis(*one.axes).size > 1
        if one.tensor.ndim and one.tensor.numel() and kind == ("part" if not copies else "weight" if one.kind == "weight" else "moment"):
            held.append(one.tensor)
    return held[int(place * len(held))]


def _at_rest(kind: str) -> Callable[[Trained, Flip, float, int], Put]:
    return lambda trained, strike, place, call: Put(before=lambda: strike(_kept(trained, kind, place)))


def _meanwhile(kind: str) -> Callable[[Trained, Flip, float, int], Put]:
    """Return a function that makes the hooks of a flip at the beginning of a forward pass. kind: of the tensor, as in `_kept`."""

    def put(trained: Trained, strike: Flip, place: float, call: int) -> Put:
        def around(stack: ExitStack, number: int) -> None:
            if number == call:
                handle = trained.model.layers[0].register_forward_pre_hook(lambda *_: strike(_kept(trained, kind, place)))  # type: ignore[index]
                stack.callback(handle.remove)

        return Put(passes=around)

    return put


def _changed(tensor: Tensor, strike: Flip) -> Tensor:
    other = tensor.clone()
    strike(other)
    return other


def _product(backward: bool) -> Callable[[Trained, Flip, float, int], Put]:
    def put(trained: Trained, strike: Flip, place: float, call: int) -> Put:
        layers = [m for m in trained.model.modules() if isinstance(m, Linear | Experts)]
        layer = layers[int(place * len(layers))]

        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            if not output.numel():
                return output
            if not backward:
                return _changed(output, strike)
            output.register_hook(lambda grad: _changed(grad, strike))
            return output

        def around(stack: ExitStack, number: int) -> None:
            if number == call:
                stack.callback(layer.register_forward_hook(hook).remove)

        return Put(passes=around)

    return put


def _own_gradient(trained: Trained, strike: Flip, place: float, call: int) -> Put:
    parameters = list(trained.model.parameters())
    parameter = parameters[int(place * len(parameters))]

    def around(stack: ExitStack, number: int) -> None:
        if number == call:
            stack.callback(parameter.register_hook(lambda grad: _changed(grad, strike)).remove)

    return Put(passes=around)


def _summed_gradient(trained: Trained, strike: Flip, place: float, call: int) -> Put:
    def around(stack: ExitStack, number: int) -> None:
        def after() -> None:
            grads = [one.tensor for one in trained.engine.summed_gradients()]
            strike(grads[int(place * len(grads))])

        if number == call:
            stack.callback(after)

    return Put(passes=around)


def _updated(trained: Trained, strike: Flip, place: float, call: int) -> Put:
    return Put(after=lambda: strike(_kept(trained, "weight", place)))


_PUT: dict[str, Callable[[Trained, Flip, float, int], Put]] = {
    "weight at rest": _at_rest("weight"),
    "moment at rest": _at_rest("moment"),
    "part at rest": _at_rest("part"),
    "weight during the passes": _meanwhile("weight"),
    "moment during the passes": _meanwhile("moment"),
    "product, forward": _product(backward=False),
    "product, backward": _product(backward=True),
    "gradient, before the sum": _own_gradient,
    "gradient, after the sum": _summed_gradient,
    "weight after the update": _updated,
}


# --- rows --------------------------------------------------------------------------------------------------------------------


def _row(fault: Fault, tries: int) -> Row:
    def work(rank: int) -> Iterator[Any]:
        trained = Trained(rank, fault.ranks, TINY | fault.sections)
        trained.step(trained.steps)
        wanted = trained.state()
        yield [once(trained, fault.what, f"{fault} {number}", wanted) for number in range(tries)]

    ranks = next(each_on_ranks(work, fault.ranks, timeout_s=60 + 5 * tries))
    results = [judged(fault, [rank[number] for rank in ranks]) for number in range(tries)]
    row = Row.of(str(fault), tries, lambda number: (results[number][2], results[number][3]))
    by_bit: dict[str, Counter[str]] = {where: Counter() for where in WHERE}
    for outcome, bit, _, _ in results:
        by_bit[place_of(bit)][outcome] += 1
    row.more = {"outcomes": dict(Counter(r[0] for r in results)), "by_bit": {where: dict(n) for where, n in by_bit.items() if n}}
    return row


def judged(fault: Fault, ranks: list[dict[str, Any]]) -> tuple[str, int, str, float]:
    """Return (outcome, bit, problem or "", seconds) of one flip. ranks: each rank's result of `once`."""
    first = ranks[0]
    equal, ended = all(rank["equal"] for rank in ranks), first["ended"]
    outcome = "ended" if ended else ("repaired" if equal else "wrong") if first["found"] else "masked" if equal else "missed"
    alike = len({rank["ended"] for rank in ranks}) == 1 and len({rank["found"] for rank in ranks}) == 1
    right = outcome in (fault.expected, "masked") and alike and len(ended.splitlines()) <= 1
    said = "" if right else f"bit {first['bit']} on rank {first['rank']}: {outcome}{'' if alike else ', and ranks differ'} {ended}"
    return outcome, first["bit"], said, first["seconds"]


def place_of(bit: int) -> str:
    """Return the name, in WHERE, of the part of an fp32 number to which the bit belongs."""
    return WHERE[0] if bit == 31 else WHERE[1] if bit >= 23 else WHERE[2] if bit >= 12 else WHERE[3]


def _clean(name: str, ranks: int, sections: dict[str, Any], steps: int) -> Row:
    def work(rank: int) -> Iterator[Any]:
        trained, seconds = Trained(rank, ranks, TINY | sections, steps=0), []
        for step in range(steps):
            started = time.perf_counter()
            trained.step(step, audited=True)
            seconds.append(time.perf_counter() - started)
        yield {"alarms": [str(event["found"]) for event in trained.events], "seconds": seconds}

    (first, *_) = next(each_on_ranks(work, ranks, timeout_s=60 + 2 * steps))
    alarms = first["alarms"] + [""] * steps
    return Row.of(name, steps, lambda number: (alarms[number], first["seconds"][number]))


def _cost(name: str, ranks: int, rounds: int) -> Row:
    def work(rank: int) -> Iterator[Any]:
        trained = Trained(rank, ranks, LARGER, steps=0)
        yield in_turn(
            {"plain": lambda: trained.step(1), "audited": lambda: trained.step(1, audited=True)}, rounds=rounds, device=CPU, warmups=1
        )

    (first, *_) = next(each_on_ranks(work, ranks, timeout_s=60 + 60 * rounds))
    share = (ratio(first["audited"], first["plain"]) - 1) / 100
    row = Row.of(name, 1, lambda _: ("" if share <= MOST_SHARE else f"{share:.2%} of a run's time", sum(first["audited"]) / rounds))
    row.more = {"share_of_time": round(share, 5), "rounds": rounds, "plain_seconds": sum(first["plain"]) / rounds}
    return row
