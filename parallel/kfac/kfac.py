"""K-FAC as units of work that can run at any time before a deadline: PipeFisher (arXiv 2211.14133) puts them into a pipeline's bubbles.

A refresh computes all factors and inverses anew. It begins every n steps (`refresh_every`) and takes d further steps (`delay`):

    step t, a multiple of n         forward    A of micro-batch i may start: sum of a a^T     a: input rows of a linear
                                    backward   G of micro-batch i may start: sum of g g^T     g: gradients of its output rows
    the end of step t + d // 2      sums over the ranks that hold copies, then the running mean
    from then to the end of t + d   an inversion of each A and G, on one of the ranks that hold it
    the end of step t + d           the inverses go to the other ranks, and all new inverses replace the old ones

The inverses are stale in between; the direction (parallel/kfac/factors.py) is computed in every step. Work that is due at the end of a
step and found no bubble is done there. Numbers never depend on when the work was done, and one process with the same n and d gives the same
numbers as any pipeline. Sums and the exchange of inverses are collective, so they always run at the end of their step.

The Fisher information is the empirical one, from the gradients that the step computes anyway, as in the paper's code. Rows are kept in
memory until the work on them is done. In fp16, a step with a gradient that is not finite is discarded, and the next step takes its place.
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
    """Settings of K-FAC.

    damping: number added to all eigenvalues of G (x) A, relative to their mean. ema: weight of the old factor at a refresh.
    refresh_every: number of updates between refreshes. delay: number of updates from a refresh to the use of its inverses.
    """

    damping: float
    ema: float
    refresh_every: int
    delay: int = 0


@dataclass(frozen=True)
class Linear:
    """One linear layer, with a weight [O, I], or a stack of them, [E, I, O].

    name: name of the weight. inputs: name of the linear whose input rows give factor A. Linears that read the same rows share it.
    """

    name: str
    weight: nn.Parameter
    layout: Layout
    inputs: str

    @property
    def num_matrices(self) -> int:
        return len(self.weight) if self.weight.ndim == 3 else 1

    @property
    def sizes(self) -> dict[str, int]:
        """Return the widths of the factors "A" and "G"."""
        inputs, outputs = self.weight.shape[-2:] if self.weight.ndim == 3 else reversed(self.weight.shape)
        return {"A": inputs, "G": outputs}

    def layout_of(self, factor: str) -> Layout:
        """Return the layout of a factor: sharded over ranks as the stacked weights of the experts are, otherwise whole on every rank."""
        width = self.sizes[factor]
        stacked = {dim: axis for dim, axis in self.layout.split.items() if dim == 0 and self.weight.ndim == 3}
        return replace(self.layout, shape=(*(self.layout.shape[:-2] or (1,)), width, width), split=stacked)


class KfacUnit(NamedTuple):
    """Unit of work for one factor ("A" or "G") of the linear `name`.

    kind: "curvature" or "inversion". microbatch: number of the linear's forward pass in the step; -1 for an inversion.
    """

    kind: str
    factor: str
    name: str
    microbatch: int = -1

    def __str__(self) -> str:
        of = "" if self.microbatch < 0 else f" micro-batch {self.microbatch}"
        return f"{self.kind} {self.factor} {self.name}{of}"


@dataclass
class Factor:
    """One Kronecker factor of one linear: a matrix [W, W] for each of the linear's E matrices (W: width of its input or output).

    The matrices of an expert that has never received a token are zero.

    running: running mean, scaled to a mean eigenvalue of 1. inverse: the inverse in use. sums: sums of r r^T over the current step's rows
    r; None: no rows yet. next: the inverse that will replace `inverse`; None: not computed yet.
    """

    layout: Layout
    running: Tensor
    inverse: Tensor
    sums: Tensor | None = None
    next: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        return {"": self.running, "_inverse": self.inverse} | ({} if self.next is None else {"_next": self.next})


@dataclass
class Kfac:
    """K-FAC for all linears of a rank. The caller runs forward passes within `recording`, and calls `finish` before each update, or
    `forget` if there is no update.

    linears: by name. total: (tensors by name, their layouts by name) -> None; sums them in place over the ranks that hold copies, which
    the layouts name. place: layout -> (this rank's index among the ranks that hold copies, their number).
    at_once: True: work is done as soon as possible; False: it waits for `run`, `do_next` or the end of the step.
    updates: number of updates so far. factors: ("A" or "G", name of a linear) -> factor.
    """

    linears: dict[str, Linear]
    settings: Settings
    total: Callable[[dict[str, Tensor], dict[str, Layout]], None]
    place: Callable[[Layout], tuple[int, int]] = lambda _: (0, 1)
    at_once: bool = True
    updates: int = 0
    factors: dict[tuple[str, str], Factor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._seconds: dict[tuple[str, str, str], list[float]] | None = None  # times by (kind, factor, linear); None: not measured
        self._open = False
        self._passes: Counter[str] = Counter()  # forward passes of each linear in this step
        self._unsummed = False  # True if a step was recorded and not yet summed over ranks
        self._unshared = False  # True if new inverses are only on the ranks that made them
        self._rows: dict[KfacUnit, tuple[Tensor, Sequence[int] | None]] = {}  # (rows [R, W], rows of each expert) of curvature to do
        self._queue: deque[KfacUnit] = deque()
        for linear in self.linears.values():
            for factor, name in (("A", linear.inputs), ("G", linear.name)):
                if (factor, name) not in self.factors:
                    width = linear.sizes[factor]
                    zeros = torch.zeros(linear.num_matrices, width, width, device=linear.weight.device)
                    self.factors[factor, name] = Factor(linear.layout_of(factor), zeros, zeros.clone())
        self.inverts = self._own_inversions()

    def _own_inversions(self) -> frozenset[tuple[str, str]]:
        """Return the factors that this rank inverts. The ranks that hold the same factors take turns, the largest factors first."""
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
        """Return True if a refresh begins in the current step, so that its rows are recorded."""
        return self.updates % self.settings.refresh_every == 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Return a context for one forward pass in training. Forward passes that are recomputed in the backward pass run outside of it."""
        self._open = self.records
        self._unsummed |= self.records
        try:
            yield
        finally:
            self._open = False

    def watch(self, name: str, x: Tensor, y: Tensor, counts: Sequence[int] | None = None) -> None:
        """Record the input x and the output y of the linear `name`, both [..., width], one row a token. counts: for a stack, the number
        of rows of each expert, in expert order."""
        if not (self._open and y.requires_grad):
            return
        microbatch = self._passes[name]
        self._passes[name] += 1
        if self.linears[name].inputs == name:
            self._ready(KfacUnit("curvature", "A", name, microbatch), x.detach(), counts)
        unit = KfacUnit("curvature", "G", name, microbatch)
        y.register_hook(lambda grad: self._ready(unit, grad.detach(), counts))

    def _ready(self, unit: KfacUnit, rows: Tensor, counts: Sequence[int] | None) -> None:
        self._rows[unit] = rows.flatten(0, -2), counts
        self._queue.append(unit)
        if self.at_once:
            self.run(unit)

    # --- units of work: done as they become ready, or deferred to times when the rank waits ---------------------------

    def defer(self, *, timed: bool) -> None:
        """Let work wait for `run`, `do_next` or the end of the step from now on. timed: measure each unit until `times` is called."""
        self.at_once, self._seconds = False, {} if timed else None

    def times(self) -> dict[tuple[str, str, str], float]:
        """End the measurement, and return (kind, factor, name of the linear) -> median seconds of its units since `defer`."""
        assert self._seconds is not None
        found, self._seconds = {key: median(times) for key, times in self._seconds.items()}, None
        return found

    @property
    def waiting(self) -> tuple[KfacUnit, ...]:
        """Return the units of work that can be done now, in the order in which they became ready."""
        return tuple(self._queue)

    def do_next(self) -> bool:
        """Do one unit of work. Returns False if there is none."""
        if self._queue:
            self.run(self._queue[0])
            return True
        return False

    def run(self, unit: KfacUnit) -> None:
        """Take a unit of work from the queue and do it."""
        self._queue.remove(unit)
        if self._seconds is None:
            self.do(unit)
            return
        device = self.linears[unit.name].weight.device
        started = _now(device)
        self.do(unit)
        self._seconds.setdefault((unit.kind, unit.factor, unit.name), []).append(_now(device) - started)

    @torch.no_grad()
    def do(self, unit: KfacUnit) -> None:
        """Do a unit of work, without taking it from the queue."""
        factor = self.factors[unit.factor, unit.name]
        if unit.kind == "inversion":
            factor.next = damped_inverse(factor.running, damping=self.settings.damping)
            return
        products = summed_products(*self._rows.pop(unit))
        factor.sums = products if factor.sums is None else factor.sums.add_(products)

    # --- work due at the ends of steps ------------------------------------------------------------------------------------------------

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
            self._rows.clear()
            self._queue.clear()
            for factor in self.factors.values():
                factor.sums = None

    def settle(self) -> None:
        """Between steps: do all work that exists, even if it is due later. Collective."""
        self._sum()
        self._share()

    def _work_off(self) -> None:
        while self.do_next():
            pass

    @torch.no_grad()
    def _sum(self) -> None:
        """If a recorded step is not summed yet, finish its curvature, sum it over copies, update running means, queue inversions."""
        if not self._unsummed:
            return
        self._unsummed = False
        self._work_off()
        sums = {key: torch.zeros_like(factor.running) if factor.sums is None else factor.sums for key, factor in self.factors.items()}
        self._total(sums)
        for key, factor in self.factors.items():
            factor.running, factor.sums = averaged(factor.running, sums[key], ema=self.settings.ema), None
            if key in self.inverts:
                self._queue.append(KfacUnit("inversion", *key))
        self._unshared = True

    @torch.no_grad()
    def _share(self) -> None:
        """Finish all waiting work, then send each new inverse to all ranks that hold the factor, by a sum to which the others add zeros."""
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
        """Return A^-1 [E, I, I] and G^-1 [E, O, O] in use; zeros for an expert that has never received a token."""
        return self.factors["A", linear.inputs].inverse, self.factors["G", linear.name].inverse

    @property
    def has_inverses(self) -> bool:
        """Return True if the first refresh is complete. Valid after `finish`."""
        return self.updates > self.settings.delay

    # --- state --------------------------------------------------------------------------------------------------------

    def state(self) -> Iterator[tuple[str, str, Layout, Tensor]]:
        """Yield (kind, linear, layout, this rank's part) of all tensors that resuming needs, in addition to `updates`. Collective.

        kind: factor and suffix, such as "A", "A_inverse" or "G_next".
        """
        self.settle()
        for (factor, name), held in self.factors.items():
            for kind, tensor in held.tensors().items():
                yield factor + kind, name, held.layout, tensor

    def load(self, stored: Callable[[str, str, Layout], Tensor | None], *, updates: int) -> bool:
        """Resume after `updates` updates. stored: (kind, linear, layout) of `state` -> tensor, or None. Returns False if any is missing."""
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
    """Return the current time in seconds, after the device has executed its queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
