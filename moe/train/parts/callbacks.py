"""Callbacks: a user's Python functions that are called after a step, an evaluation or a save.

    class Best(Callback):
        def on_evaluate(self, now):
            if now.record["validation_loss"] < 1.5:
                now.stop("good enough")                     saves, evaluates and ends the run

    train(run, callbacks=[Best()])                          the same callbacks in the same order on every rank

Every rank calls them, so a callback may use the model's shards or a collective. For an action on one rank alone, test `now.rank == 0`.
An exception on one rank ends the run on all ranks; if one rank calls `now.stop`, all ranks stop after this step.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from moe.recipe.sections import Run
from parallel.errors import BadInput, Ended, where
from parallel.mesh.collectives import largest
from parallel.mesh.mesh import Axis
from parallel.watch import watchdog
from parallel.watch.outcome import Failure, agree

EVENTS = ("on_train_begin", "on_step_end", "on_evaluate", "on_save", "on_train_end")


@dataclass
class Now:
    """State of a run that a callback can read. step: number of completed steps, out of `steps`. record: values of the event; `Callback`
    names them for each method. out: the run's folder. model: this rank's shard or copy of the model (a change of parameters must be made on
    every rank that has a copy). asked: reasons given to `stop`."""

    run: Run
    step: int
    record: Mapping[str, Any]
    rank: int
    world_size: int
    out: Path
    model: nn.Module
    asked: list[str] = field(default_factory=list)

    @property
    def steps(self) -> int:
        return self.run.train.steps

    def stop(self, reason: str = "") -> None:
        """End the run on all ranks after this step (in on_train_begin: before the first). The run is saved and evaluated as usual. reason:
        text for the run's records and display."""
        self.asked.append(reason)


class Callback:
    """Base class of callbacks: override the methods you need. Every rank calls each method, with the run's state."""

    def on_train_begin(self, now: Now) -> None:
        """Called before the first step of this process, also in a resumed run. now.record: empty."""

    def on_step_end(self, now: Now) -> None:
        """Called after each step, including skipped steps. now.record: the step's line of metrics.jsonl: loss, lr, skipped, ..., moe (by
        layer)."""

    def on_evaluate(self, now: Now) -> None:
        """Called after each evaluation on held-out text. now.record: the evaluation's line of metrics.jsonl, with validation_loss and, with
        cross-entropy as the loss, bits_per_byte."""

    def on_save(self, now: Now) -> None:
        """Called after a checkpoint is complete on disk; with train.save_mode async, this may be as late as the next save or the run's end.
        now.record: the save's line of metrics.jsonl, with step and path."""

    def on_train_end(self, now: Now) -> None:
        """Called at the end of the run, also if a callback has stopped it, but not after a signal. now.record: contents of summary.json."""


class Callbacks:
    """All callbacks of a run, which every rank calls at the same time. stopped: the reason, once a callback has stopped the run; else None.
    Raises BadInput if ranks have different callbacks."""

    def __init__(self, each: Sequence[Callback], world: Axis) -> None:
        self.each, self.world = tuple(each), world
        self.stopped: str | None = None
        names = float(zlib.crc32(" ".join(f"{type(one).__qualname__} {_overridden(one)}" for one in self.each).encode()))
        if largest(names, world) != -largest(-names, world):
            needed = "the same callbacks on every rank: ranks wait for one another after each"
            raise BadInput("callbacks", got="different ones on different ranks", needed=needed, fix="test now.rank == 0 inside a callback")

    def call(self, event: str, now: Now) -> None:
        """Call the method `event` of each callback that overrides it. Raises Ended on every rank if the method raised an exception on any
        rank. Collective."""
        for callback in self.each:
            if event not in _overridden(callback):
                continue
            name = f"callback {type(callback).__name__}.{event}"
            watchdog.enter(name, patience=watchdog.FIRST)
            training = now.model.training
            failure = agree(lambda c=callback: getattr(c, event)(now), self.world, said=where)  # type: ignore[misc]
            if now.model.training != training:  # a callback that generates text may have changed the mode
                now.model.train(training)
            if isinstance(failure, Failure):
                raised = f"{name} raised {failure.line}" + (f" on rank {failure.rank}" if self.world.size > 1 else "")
                line = f"{raised} at step {now.step}; correct the callback and start again: the run continues from its newest checkpoint"
                raise Ended(line, prints=failure.rank == self.world.index) from failure.error
            if largest(float(bool(now.asked)), self.world):
                reason = "; ".join(filter(None, now.asked))
                self.stopped = self.stopped or (f"{name}: {reason}" if reason else name)
        watchdog.enter("after the step", patience=1.0)


def _overridden(callback: Callback) -> list[str]:
    """Return the events whose method the callback's class, or the object itself, overrides."""
    return [event for event in EVENTS if getattr(getattr(callback, event), "__func__", None) is not getattr(Callback, event)]


def check(each: object) -> None:
    """Raise BadInput unless `each` is a list of Callback objects whose methods named on_... are all in EVENTS."""
    if not isinstance(each, list | tuple):
        got = f"a {type(each).__name__}"
        raise BadInput("callbacks", got=got, needed="a list of callbacks", fix="write callbacks=[...]")
    for one in each:
        if isinstance(one, type) and issubclass(one, Callback):
            raise BadInput("callbacks", got=f"the class {one.__name__}", needed="an instance of it", fix=f"write {one.__name__}()")
        if not isinstance(one, Callback):
            fix = "subclass moe.Callback and override on_step_end(self, now)"
            raise BadInput("callbacks", got=f"a {type(one).__name__}", needed="objects of subclasses of moe.Callback", fix=fix)
        wrong = next((name for name in dir(one) if name.startswith("on_") and name not in EVENTS and callable(getattr(one, name))), None)
        if wrong is not None:
            fix = f"rename {type(one).__name__}.{wrong}, or begin it with an underscore"
            raise BadInput("callbacks", got=f"a method {wrong}, which nothing calls", needed=f"one of {', '.join(EVENTS)}", fix=fix)
