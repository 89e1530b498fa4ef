"""Callbacks: a user's own code after a step, an evaluation or a save, from Python.

    class Best(Callback):
        def on_evaluate(self, now):
            if now.record["validation_loss"] < 1.5:
                now.stop("good enough")                     saves, and ends the run as its last step would

    train(run, callbacks=[Best()])                          the same on every rank, in this order

Every rank calls them, so a callback may use the model's shards or a collective. For an action by one rank alone, test `now.rank == 0`.
After each call ranks agree: an exception on one rank ends the run on all, and if one asks to stop, all stop after this step.
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
from parallel.watch.outcome import agree

EVENTS = ("on_train_begin", "on_step_end", "on_evaluate", "on_save", "on_train_end")


@dataclass
class Now:
    """Progress of a run as a callback sees it. `step`: steps made, of `steps`. `record`: the new line of metrics.jsonl, or summary.json.

    | event | `record` |
    |---|---|
    | on_train_begin | empty |
    | on_step_end | kind train: loss, lr, grad_norm, tokens_per_second, dropped_share, load of each MoE layer under "moe" |
    | on_evaluate | kind eval: validation_loss, bits_per_byte |
    | on_save | kind event, "saved": step and path of the new checkpoint |
    | on_train_end | the summary |

    `model`: this rank's shard or copy. Its parameters are for reading: a change on one rank alone makes copies differ.
    """

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
        """End the run after this step (or before the first), on all ranks: it is saved and evaluated, and `train` returns its summary."""
        self.asked.append(reason)


class Callback:
    """Base class of callbacks: override the methods you need. Every rank calls each of them, with the run's progress."""

    def on_train_begin(self, now: Now) -> None:
        """Called before the first step of this process, also if the run is resumed."""

    def on_step_end(self, now: Now) -> None:
        """Called after each step, also if its gradients were dropped ("skipped" in its record)."""

    def on_evaluate(self, now: Now) -> None:
        """Called after each evaluation on held-out text."""

    def on_save(self, now: Now) -> None:
        """Called when a checkpoint is whole on disk. With train.save_mode async this is at the next save, or at the end."""

    def on_train_end(self, now: Now) -> None:
        """Called after the last step, or after a stop that a callback asked for; not after a signal."""


class Callbacks:
    """Callbacks of one rank, called at the same time as on the other ranks. `stopped`: the reason, once one has asked to stop."""

    def __init__(self, each: Sequence[Callback], world: Axis) -> None:
        self.each, self.world = tuple(each), world
        self.stopped: str | None = None
        names = float(zlib.crc32(" ".join(f"{type(one).__qualname__} {_overridden(one)}" for one in self.each).encode()))
        if largest(names, world) != -largest(-names, world):
            needed = "the same on every rank: ranks wait for one another after each"
            raise BadInput("callbacks", got="others on one rank than on another", needed=needed, fix="ask now.rank == 0 within one")

    def call(self, event: str, now: Now) -> None:
        """Call each callback that overrides `event`. Raises Ended, on every rank, if one raised. Collective if there are callbacks."""
        for callback in self.each:
            if event not in _overridden(callback):
                continue
            name = f"callback {type(callback).__name__}.{event}"
            watchdog.enter(name, patience=watchdog.FIRST)
            training = now.model.training
            outcome = agree(lambda c=callback: getattr(c, event)(now), self.world, said=where)  # type: ignore[misc]
            if now.model.training != training:  # a callback that generates or evaluates may leave another mode
                now.model.train(training)
            if outcome.failure is not None:
                failure = outcome.failure
                on = f" on rank {failure.rank}" if self.world.size > 1 else ""
                line = (
                    f"{name} raised {failure.line}{on} at step {now.step}; the run continues from its newest checkpoint when it is mended"
                )
                raise Ended(line, prints=failure.rank == self.world.index) from failure.error
            if largest(float(bool(now.asked)), self.world):
                reason = "; ".join(filter(None, now.asked))
                self.stopped = self.stopped or (f"{name}: {reason}" if reason else name)
        watchdog.enter("after the step", patience=1.0)


def _overridden(callback: Callback) -> list[str]:
    """Return the events that a method of its class overrides, or a function set on the object."""
    return [event for event in EVENTS if getattr(getattr(callback, event), "__func__", None) is not getattr(Callback, event)]


def check(each: object) -> None:
    """Refuse values that are no callbacks: a class instead of its object, a function, a method that no event calls. Raises BadInput."""
    if not isinstance(each, list | tuple):
        got = f"a {type(each).__name__}"
        raise BadInput("callbacks", got=got, needed="a list of them", fix="write callbacks=[...]")
    for one in each:
        if isinstance(one, type) and issubclass(one, Callback):
            raise BadInput("callbacks", got=f"the class {one.__name__}", needed="an object of it", fix=f"write {one.__name__}()")
        if not isinstance(one, Callback):
            fix = "subclass moe.Callback and override on_step_end(self, now)"
            raise BadInput("callbacks", got=f"a {type(one).__name__}", needed="objects of subclasses of moe.Callback", fix=fix)
        wrong = next((name for name in dir(one) if name.startswith("on_") and name not in EVENTS and callable(getattr(one, name))), None)
        if wrong is not None:
            fix = f"rename {type(one).__name__}.{wrong}, or begin it with an underscore"
            raise BadInput("callbacks", got=f"a method {wrong}, which nothing calls", needed=f"one of {', '.join(EVENTS)}", fix=fix)
