"""K-FAC as units of work whose time is free: PipeFisher (arXiv 2211.14133) puts them where a pipeline's ranks wait.

    step t, a multiple of n         forward    A of micro-batch i may start: sum of a a^T
                                    backward   G of micro-batch i may start: sum of g g^T
    the end of step t + d // 2      sums over the ranks that hold copies, then the running mean
    from then to the end of t + d   an inversion of each A and G, on one of the ranks that hold it
    the end of step t + d           the inverses go to the other ranks; the new inverses replace the old ones, all at once

n is `refresh_every`, d is `delay`. Inverses are stale in between; the direction (parallel/kfac/factors.py) is computed in every step.
Work due at the end of a step is done there if no bubble had room for it. Numbers never depend on where work was placed, and one
process with the same n and d is the twin of any pipeline. Sums and the exchange of inverses are collective, so they have a
fixed place.

The Fisher information is the empirical one, from the gradients that the step computes anyway, as in the paper's code. Rows are
kept from when they are made until their work is done: `kept_bytes`. In fp16, a step with a gradient that is not finite is discarded,
and the next step takes its place.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor, nn

from parallel.kfac.factors import averaged, damped_inverse, summed_products
from parallel.mesh.layout import Layout

# R rows, W width, E matrices of a stack, I in, O out


@dataclass(frozen=True)
class Settings:
    """K-FAC's settings. `damping`: relative to the mean eigenvalue of G (x) A. `ema`: share of the old factor kept at a refresh."""

    damping: float
    ema: float
    refresh_every: int
    delay: int = 0


@dataclass(frozen=True)
class Linear:
    """One linear layer: a weight [O, I], or a stack [E, I, O], by its parameter's name. Linears that read the same rows share `inputs`, the
    name of one of them; only that one reports the rows."""

    name: str
    weight: nn.Parameter
    layout: Layout
    inputs: str

    @property
    def stack(self) -> int:
        return len(self.weight) if self.weight.ndim == 3 else 1

    @property
    def sizes(self) -> dict[str, int]:
        """The widths of its two factors."""
        inputs, outputs = self.weight.shape[-2:] if self.weight.ndim == 3 else reversed(self.weight.shape)
        return {"A": inputs, "G": outputs}

    def layout_of(self, factor: str) -> Layout:
        """The layout of a factor on the mesh: split over experts like its stack, whole otherwise."""
        width = self.sizes[factor]
        stacked = {dim: axis for dim, axis in self.layout.split.items() if dim == 0 and self.weight.ndim == 3}
        return replace(self.layout, shape=(*(self.layout.shape[:-2] or (1,)), width, width), split=stacked)


class Item(NamedTuple):
    """A unit of work for factor A or G of one linear: "curvature" of a micro-batch (counted by the linear's forward passes in the step), or
    "inversion"."""

    kind: str
    factor: str
    name: str
    microbatch: int = -1

    def __str__(self) -> str:
        of = "" if self.microbatch < 0 else f" micro-batch {self.microbatch}"
        return f"{self.kind} {self.factor} {self.name}{of}"


@dataclass
class Factor:
    """One factor. `running`: its mean, scaled to a mean eigenvalue of 1. `sums`: of the current step. `inverse`: in use. `next`: the coming
    inverse. Zeros mean that no row has been seen, for each matrix of a stack."""

    layout: Layout
    running: Tensor
    inverse: Tensor
    sums: Tensor | None = None
    next: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        return {"": self.running, "_inverse": self.inverse} | ({} if self.next is None else {"_next": self.next})


@dataclass
class Rows:
    rows: Tensor
    counts: Sequence[int] | None


@dataclass
class Kfac:
    """All linears of a rank. `total(sums, layouts)` sums in place over the ranks that hold copies, by what the layouts say, and
    `place(layout)` is this rank's place among them and their number. `at_once`: work is done as soon as it can be; otherwise it waits
    for `do_next` or for the end of a step (`put_off`).

    A caller records its forward passes (`recording`), and calls `finish` before each update, or `forget` if there is no update.
    """

    linears: dict[str, Linear]
    settings: Settings
    total: Callable[[dict[str, Tensor], dict[str, Layout]], None]
    place: Callable[[Layout], tuple[int, int]] = lambda _: (0, 1)
    at_once: bool = True
    updates: int = 0
    factors: dict[tuple[str, str], Factor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._seconds: dict[tuple[str, str, str], list[float]] | None = None  # of each unit, while times are taken
        self._open = False
        self._passes: Counter[str] = Counter()
        self._unsummed = False  # whether a step was recorded and not yet summed over ranks
        self._unshared = False  # whether new inverses are only on the ranks that made them
        self._kept: dict[Item, Rows] = {}
        self._queue: deque[Item] = deque()
        for linear in self.linears.values():
            for factor, name in (("A", linear.inputs), ("G", linear.name)):
                if (factor, name) not in self.factors:
                    width = linear.sizes[factor]
                    zeros = torch.zeros(linear.stack, width, width, device=linear.weight.device)
                    self.factors[factor, name] = Factor(linear.layout_of(factor), zeros, zeros.clone())
        self.inverts = self._dealt()

    def _dealt(self) -> frozenset[tuple[str, str]]:
        """The factors that this rank inverts. Factors held by the same ranks are dealt to these in turn, the largest first."""
        alike: dict[tuple[tuple[str, ...], tuple[int, ...]], list[tuple[str, str]]] = defaultdict(list)
        for key, factor in self.factors.items():
            alike[factor.layout.summed_over(), factor.layout.holders].append(key)
        mine: list[tuple[str, str]] = []
        for keys in alike.values():
            place, count = self.place(self.factors[keys[0]].layout)
            mine += sorted(keys, key=lambda key: (-self.factors[key].running.shape[-1], key))[place::count]
        return frozenset(mine)

    # --- recording ----------------------------------------------------------------------------------------------------

    @property
    def records(self) -> bool:
        """Whether factors are taken in the current step."""
        return self.updates % self.settings.refresh_every == 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """A context for one forward pass in training. Recomputed passes, inside the backward pass, run outside of it."""
        self._open = self.records
        self._unsummed |= self.records
        try:
            yield
        finally:
            self._open = False

    def watch(self, name: str, x: Tensor, y: Tensor, counts: Sequence[int] | None = None) -> None:
        """Record what the linear `name` read (x) and gave (y), both [..., width], one row per token; `counts`: rows of each expert."""
        if not (self._open and y.requires_grad):
            return
        microbatch = self._passes[name]
        self._passes[name] += 1
        if self.linears[name].inputs == name:
            self._ready(Item("curvature", "A", name, microbatch), x.detach(), counts)
        item = Item("curvature", "G", name, microbatch)
        y.register_hook(lambda grad: self._ready(item, grad.detach(), counts))

    def _ready(self, item: Item, rows: Tensor, counts: Sequence[int] | None) -> None:
        self._kept[item] = Rows(rows.flatten(0, -2), counts)
        self._queue.append(item)
        if self.at_once:
            self.run(item)

    # --- work ---------------------------------------------------------------------------------------------------------

    @property
    def kept_bytes(self) -> int:
        """Bytes of the rows that wait for their work, each storage once. The backward pass may need some of these rows anyway."""
        storages = {rows.rows.untyped_storage().data_ptr(): rows.rows.untyped_storage().nbytes() for rows in self._kept.values()}
        return sum(storages.values())

    def put_off(self, *, timed: bool) -> None:
        """From now on work waits until it is asked for, or the step ends. `timed`: each unit's seconds are taken, until `times`."""
        self.at_once, self._seconds = False, {} if timed else None

    def times(self) -> dict[tuple[str, str, str], float]:
        """The median seconds of each unit by (kind, factor, linear) since `put_off`; no more are taken."""
        assert self._seconds is not None
        found, self._seconds = {key: median(times) for key, times in self._seconds.items()}, None
        return found

    @property
    def waiting(self) -> tuple[Item, ...]:
        """Units that can be done now, in the order in which they became ready."""
        return tuple(self._queue)

    def do_next(self) -> bool:
        """Do one unit of work. Returns False if there is none."""
        if self._queue:
            self.run(self._queue[0])
            return True
        return False

    def fill(self, until: Callable[[], bool]) -> int:
        """Do units of work until `until()` is true or none is left; for a rank that waits for a message. Returns the number done."""
        done = 0
        while not until() and self.do_next():
            done += 1
        return done

    def run(self, item: Item) -> None:
        """Take a unit of work from the queue and do it."""
        self._queue.remove(item)
        if self._seconds is None:
            self.do(item)
            return
        device = self.linears[item.name].weight.device
        started = _now(device)
        self.do(item)
        self._seconds.setdefault((item.kind, item.factor, item.name), []).append(_now(device) - started)

    @torch.no_grad()
    def do(self, item: Item) -> None:
        """Do a unit, whether it is in the queue or not."""
        factor = self.factors[item.factor, item.name]
        if item.kind == "inversion":
            factor.next = damped_inverse(factor.running, damping=self.settings.damping)
            return
        kept = self._kept.pop(item)
        products = summed_products(kept.rows, kept.counts)
        factor.sums = products if factor.sums is None else factor.sums.add_(products)

    # --- ends of steps ------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Do all work that is due. Call it before each update. Collective."""
        s = self.settings
        age = self.updates % s.refresh_every
        if age == s.delay // 2:
            self._sum()
        if age == s.delay:
            self._share()
            for factor in self.factors.values():
                factor.inverse, factor.next = factor.inverse if factor.next is None else factor.next, None
        self.updates += 1
        self._passes.clear()

    def forget(self) -> None:
        """Discard what the current step recorded. Call it if the step makes no update."""
        self._passes.clear()
        if self.records:
            self._unsummed = False
            self._kept.clear()
            self._queue.clear()
            for factor in self.factors.values():
                factor.sums = None

    def settle(self) -> None:
        """Do all existing work between steps, whenever it is due. Collective."""
        self._sum()
        self._share()

    def _work_off(self) -> None:
        while self.do_next():
            pass

    @torch.no_grad()
    def _sum(self) -> None:
        """Once per recorded step: finish its curvature, sum it over copies, update the running mean, and queue the inversions."""
        if not self._unsummed:
            return
        self._unsummed = False
        self._work_off()
        for factor in self.factors.values():
            factor.sums = torch.zeros_like(factor.running) if factor.sums is None else factor.sums
        self._total({key: factor.sums for key, factor in self.factors.items() if factor.sums is not None})
        for key, factor in self.factors.items():
            assert factor.sums is not None
            factor.running = averaged(factor.running, factor.sums, ema=self.settings.ema)
            factor.sums = None
            if key in self.inverts:
                self._queue.append(Item("inversion", *key))
        self._unshared = True

    @torch.no_grad()
    def _share(self) -> None:
        """Finish all waiting work, then give each new inverse to all ranks that hold the factor: a sum, to which the others add zeros."""
        self._work_off()
        if not self._unshared:
            return
        self._unshared = False
        for factor in self.factors.values():
            factor.next = torch.zeros_like(factor.running) if factor.next is None else factor.next
        self._total({key: factor.next for key, factor in self.factors.items() if factor.next is not None})

    def _total(self, tensors: dict[tuple[str, str], Tensor]) -> None:
        named = {f"{factor} of {name}": (factor, name) for factor, name in tensors}
        layouts = {name: self.factors[key].layout for name, key in named.items()}
        self.total({name: tensors[key] for name, key in named.items()}, layouts)

    # --- for the update -----------------------------------------------------------------------------------------------

    def inverses(self, linear: Linear) -> tuple[Tensor, Tensor]:
        """The A^-1 and G^-1 in use, [E, I, I] and [E, O, O]; zeros for matrices that never saw a row."""
        return self.factors["A", linear.inputs].inverse, self.factors["G", linear.name].inverse

    @property
    def has_inverses(self) -> bool:
        """Whether the first refresh is complete; ask after `finish`."""
        return self.updates > self.settings.delay

    # --- state --------------------------------------------------------------------------------------------------------

    def state(self) -> Iterator[tuple[str, str, Layout, Tensor]]:
        """(kind, parameter, layout, this rank's part) of everything that resuming needs beside `updates`. Collective."""
        self.settle()
        for (factor, name), held in self.factors.items():
            for kind, tensor in held.tensors().items():
                yield factor + kind, name, held.layout, tensor

    def load(self, stored: Callable[[str, str, Layout], Tensor | None], *, updates: int) -> bool:
        """Resume from what `state` gave: `stored(kind, parameter, layout)`, None if missing. Returns whether everything was there."""
        self.updates, whole = updates, True
        pending = 0 < updates % self.settings.refresh_every <= self.settings.delay
        for (factor, name), held in self.factors.items():
            found = {kind: stored(factor + kind, name, held.layout) for kind in ("", "_inverse", *(("_next",) if pending else ()))}
            whole = whole and all(tensor is not None for tensor in found.values())
            running, inverse, coming = (found.get(kind) for kind in ("", "_inverse", "_next"))
            both = running is not None and inverse is not None
            held.running, held.inverse = (
                t.to(held.running) if both and t is not None else torch.zeros_like(held.running) for t in (running, inverse)
            )
            held.next = None if coming is None else coming.to(held.running)
        return whole


def _now(device: torch.device) -> float:
    """The current time in seconds, after the device has finished its queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
