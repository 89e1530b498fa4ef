"""K-FAC as units of work, each of which can run at any time before its deadline. PipeFisher (arXiv 2211.14133) runs them in a pipeline's
bubbles.

A refresh recomputes all factors and their inverses. A refresh begins every n steps (`refresh_every`) and takes d further steps (`delay`):

    step t, a multiple of n         forward    A of micro-batch i may start: sum of a a^T     a: input rows of a linear
                                    backward   G of micro-batch i may start: sum of g g^T     g: gradients of its output rows
    the end of step t + d // 2      all-reduce over the ranks with copies of a factor, then the running mean
    from then to the end of t + d   each A and G is inverted, on one of the ranks that hold it
    the end of step t + d           the inverses are sent to the other ranks that hold them, and replace the old ones

Results do not depend on the time at which a unit runs. The Fisher information is the empirical one: it is computed from the gradients of
the step.
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

# R rows, W width of a factor (I or O), E matrices of a stack, I input width, O output width


@dataclass(frozen=True)
class Settings:
    """Settings of K-FAC.

    damping: its square root is added to the eigenvalues of A and of G, relative to each factor's mean eigenvalue (factors.py). ema: weight
    of the old factor in the running mean. A refresh recomputes all factors and inverses. refresh_every: number of updates from one refresh
    to the next. delay: number of updates from the start of a refresh until its inverses are used."""

    damping: float
    ema: float
    refresh_every: int
    delay: int = 0


@dataclass(frozen=True)
class Linear:
    """A linear layer with a weight [O, I], or a stack of experts' linears with a weight [E, I, O].
    name: name of the weight. inputs: name of the linear layer whose factor A this layer uses. Layers that read the same input rows share
    one A."""

    name: str
    weight: nn.Parameter
    layout: Layout
    inputs: str

    @property
    def sizes(self) -> dict[str, int]:
        """Return {"A": input width, "G": output width}, the widths of the two factors."""
        inputs, outputs = self.weight.shape[-2:] if self.weight.ndim == 3 else reversed(self.weight.shape)
        return {"A": inputs, "G": outputs}

    def layout_of(self, factor: str) -> Layout:
        """Return the layout of factor "A" or "G", [E, W, W]. Factors of experts are sharded over ranks along dim 0, as the experts' weights
        are. The factor of a single linear layer (E = 1) is whole on every rank."""
        width = self.sizes[factor]
        stacked = {dim: axis for dim, axis in self.layout.split.items() if dim == 0 and self.weight.ndim == 3}
        return replace(self.layout, shape=(*(self.layout.shape[:-2] or (1,)), width, width), split=stacked)


class KfacUnit(NamedTuple):
    """One unit of K-FAC's work for factor "A" or "G" of the linear layer `name`. kind: "curvature" (add r r^T of all rows r of a
    micro-batch to the sum) or "inversion".
    microbatch: index of the layer's forward pass in the step; -1 for an inversion."""

    kind: str
    factor: str
    name: str
    microbatch: int = -1

    def __str__(self) -> str:
        of = "" if self.microbatch < 0 else f" micro-batch {self.microbatch}"
        return f"{self.kind} {self.factor} {self.name}{of}"


@dataclass
class Factor:
    """One Kronecker factor of one linear, as tensors [E, W, W] (W: input or output width). Zero for an expert without any token so far.
    running: running mean, scaled to a mean eigenvalue of 1. inverse: its damped inverse, as used in updates now. sums: sum of r r^T over
    the rows r of the current step; None: no rows yet. next: new inverse, not used yet; None: not computed yet."""

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
    `discard_step` if there is no update.

    linears: name -> linear. total: function of (name -> tensor, name -> layout) that all-reduces each tensor in place over the ranks with
    copies of its factor. place: layout of a factor -> (this rank's index among the ranks with copies, number of these ranks).
    at_once: True: curvature units run as soon as they are ready. False: a ready unit waits until the caller passes it to `run`, or until
    `finish` runs all units that are due. Inversions always wait like this.
    updates: number of updates so far. factors: ("A" or "G", name of a linear) -> factor."""

    linears: dict[str, Linear]
    settings: Settings
    total: Callable[[dict[str, Tensor], dict[str, Layout]], None]
    place: Callable[[Layout], tuple[int, int]] = lambda _: (0, 1)
    at_once: bool = True
    updates: int = 0
    factors: dict[tuple[str, str], Factor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._seconds: dict[tuple[str, str, str], list[float]] | None = None  # (kind, factor, linear) -> times; None: not measured
        self._open = False  # True within `recording`, if the step begins a refresh
        self._passes: Counter[str] = Counter()  # name of a linear -> number of its forward passes in this step
        self._sums_due = False  # True if a step was recorded, and its sums are not all-reduced yet
        self._inverses_due = False  # True if new inverses are only on the ranks that computed them
        self._rows: dict[KfacUnit, tuple[Tensor, Sequence[int] | None]] = {}  # unit -> its (rows [R, W], number of rows of each expert)
        self._queue: deque[KfacUnit] = deque()  # units that can run
        for linear in self.linears.values():
            for factor, name in (("A", linear.inputs), ("G", linear.name)):
                if (factor, name) not in self.factors:
                    width = linear.sizes[factor]
                    stack = len(linear.weight) if linear.weight.ndim == 3 else 1
                    zeros = torch.zeros(stack, width, width, device=linear.weight.device)
                    self.factors[factor, name] = Factor(linear.layout_of(factor), zeros, zeros.clone())
        self.inverts = self._own_inversions()

    def _own_inversions(self) -> frozenset[tuple[str, str]]:
        """Return the factors that this rank inverts. Factors with copies on the same ranks are dealt to them round-robin, largest first."""
        groups: dict[tuple[tuple[str, ...], tuple[int, ...]], list[tuple[str, str]]] = defaultdict(list)
        for key, factor in self.factors.items():
            groups[factor.layout.summed_over(), factor.layout.holders].append(key)
        mine: list[tuple[str, str]] = []
        for keys in groups.values():
            place, count = self.place(self.factors[keys[0]].layout)
            mine += sorted(keys, key=lambda key: (-self.factors[key].running.shape[-1], key))[place::count]
        return frozenset(mine)

    # --- recording of forward and backward passes ---------------------------------------------------------------------

    @property
    def records(self) -> bool:
        """Return True if a refresh begins in the current step, so that the step's rows are recorded."""
        return self.updates % self.settings.refresh_every == 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Return a context for one forward pass in training. Recomputed forward passes run outside of the context and are not recorded."""
        self._open = self.records
        self._sums_due |= self.records
        try:
            yield
        finally:
            self._open = False

    def watch(self, name: str, x: Tensor, y: Tensor, counts: Sequence[int] | None = None) -> None:
        """Record the input x and the output y of the linear `name`, both [..., width], one row a token. counts: for a stack of experts,
        the number of rows of each expert, in order."""
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

    # --- units of work: run when they are ready, or later while the rank waits ----------------------------------------

    def defer(self, *, timed: bool) -> None:
        """Set `at_once` to False: a unit of K-FAC's work (KfacUnit) then waits until the caller passes it to `run`, or until `finish` runs
        the units that are due. timed: measure the time of each unit until `times` is called."""
        self.at_once, self._seconds = False, {} if timed else None

    def times(self) -> dict[tuple[str, str, str], float]:
        """End the measurement. Return the median seconds of each unit of work, measured since `defer`:
        (kind of work, factor A or G, name of the linear) -> seconds."""
        assert self._seconds is not None
        found, self._seconds = {key: median(times) for key, times in self._seconds.items()}, None
        return found

    @property
    def waiting(self) -> tuple[KfacUnit, ...]:
        """Return the units that can run now, in the order in which they became ready."""
        return tuple(self._queue)

    def run(self, unit: KfacUnit) -> None:
        """Take this unit of work, which must be ready, out of `waiting`, and do it (`do`)."""
        self._queue.remove(unit)
        if self._seconds is None:
            return self.do(unit)
        device = self.linears[unit.name].weight.device
        started = _now(device)
        self.do(unit)
        self._seconds.setdefault((unit.kind, unit.factor, unit.name), []).append(_now(device) - started)

    def _run_all(self) -> None:
        while self._queue:
            self.run(self._queue[0])

    @torch.no_grad()
    def do(self, unit: KfacUnit) -> None:
        """Do a unit of work: add a micro-batch's products to the factor's sums, or invert the running factor."""
        factor = self.factors[unit.factor, unit.name]
        if unit.kind == "inversion":
            factor.next = damped_inverse(factor.running, damping=self.settings.damping)
            return
        products = summed_products(*self._rows.pop(unit))
        factor.sums = products if factor.sums is None else factor.sums.add_(products)

    # --- work at the end of a step ------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Do the part of a refresh (recomputation of all factors and inverses) that is due at the end of this step. Must be called before
        each update. Collective."""
        s = self.settings
        steps = self.updates % s.refresh_every  # since the refresh began
        if steps == s.delay // 2:
            self._reduce_sums()
        if steps == s.delay:
            self._share_inverses()
            for factor in self.factors.values():
                factor.inverse, factor.next = factor.inverse if factor.next is None else factor.next, None
        self.updates += 1
        self._passes.clear()

    def discard_step(self) -> None:
        """Discard the rows and sums that the current step recorded. Must be called if the step makes no update."""
        self._passes.clear()
        if self.records:
            self._sums_due = False
            self._rows.clear()
            self._queue.clear()
            for factor in self.factors.values():
                factor.sums = None

    def settle(self) -> None:
        """Do all pending work now, even if it is due later, so that the state can be saved between steps. Collective."""
        self._reduce_sums()
        self._share_inverses()

    @torch.no_grad()
    def _reduce_sums(self) -> None:
        """Run the curvature units of the last recorded step, all-reduce their sums, update running factors, and queue this rank's
        inversions. Do nothing if that is done already."""
        if not self._sums_due:
            return
        self._sums_due = False
        self._run_all()
        sums = {key: torch.zeros_like(factor.running) if factor.sums is None else factor.sums for key, factor in self.factors.items()}
        self._total(sums)
        for key, factor in self.factors.items():
            factor.running, factor.sums = averaged(factor.running, sums[key], ema=self.settings.ema), None
            if key in self.inverts:
                self._queue.append(KfacUnit("inversion", *key))
        self._inverses_due = True

    @torch.no_grad()
    def _share_inverses(self) -> None:
        """Compute all inverses that are still queued on this rank, then give each new inverse to all ranks that need it, by an
        all-reduce in which all ranks but the one that computed the inverse add zeros."""
        self._run_all()
        if not self._inverses_due:
            return
        self._inverses_due = False
        for factor in self.factors.values():
            factor.next = torch.zeros_like(factor.running) if factor.next is None else factor.next
        self._total({key: factor.next for key, factor in self.factors.items() if factor.next is not None})

    def _total(self, tensors: dict[tuple[str, str], Tensor]) -> None:
        named = {f"{factor} of {name}": (factor, name) for factor, name in tensors}
        layouts = {name: self.factors[key].layout for name, key in named.items()}
        self.total({name: tensors[key] for name, key in named.items()}, layouts)

    # --- inverses for the optimizer's update --------------------------------------------------------------------------

    def inverses(self, linear: Linear) -> tuple[Tensor, Tensor]:
        """Return (A^-1 [E, I, I], G^-1 [E, O, O]) of a linear; zeros for an expert without any token so far."""
        return self.factors["A", linear.inputs].inverse, self.factors["G", linear.name].inverse

    @property
    def has_inverses(self) -> bool:
        """Return True if the first refresh is complete, so that the inverses can be used. Valid after `finish` of the current step."""
        return self.updates > self.settings.delay

    # --- saving and loading of checkpoints ----------------------------------------------------------------------------

    def state(self) -> Iterator[tuple[str, str, Layout, Tensor]]:
        """Yield (kind, name of the linear, layout, this rank's shard) for each tensor that a checkpoint stores. Collective.
        kind: "A" (running factor), "A_inverse" (used now) or "A_next" (inverse not used yet); "G", "G_inverse" or "G_next"."""
        self.settle()
        for (factor, name), held in self.factors.items():
            for kind, tensor in held.tensors().items():
                yield factor + kind, name, held.layout, tensor

    def load(self, stored: Callable[[str, str, Layout], Tensor | None], *, updates: int) -> bool:
        """Load the tensors of a checkpoint that was made after `updates` updates. Return False if any tensor is missing.
        stored: (kind, name of the linear, layout), as from `state` -> this rank's shard; None if the checkpoint lacks it."""
        self.updates, complete = updates, True
        pending = 0 < updates % self.settings.refresh_every <= self.settings.delay
        for (factor, name), held in self.factors.items():
            running, inverse, coming = (
                stored(factor + kind, name, held.layout) if kind != "_next" or pending else None for kind in ("", "_inverse", "_next")
            )
            complete = complete and running is not None and inverse is not None and (coming is not None or not pending)
            if running is None or inverse is None:
                running, inverse = torch.zeros_like(held.running), torch.zeros_like(held.running)
            held.running, held.inverse = running.to(held.running), inverse.to(held.running)
            held.next = None if coming is None else coming.to(held.running)
        return complete


def _now(device: torch.device) -> float:
    """Return the current time in seconds, after waiting until the device has executed all queued kernels."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
