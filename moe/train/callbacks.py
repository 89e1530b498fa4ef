"""Callbacks: a user's own code after a step, an evaluation or a save, from Python.

    class Best(Callback):
        def on_evaluate(self, now):
            if now.record["validation_loss"] < 1.5:
                now.stop("good enough")                     saves, and ends the run as its last step would

    train(run, callbacks=[Best()])                          the same on every rank, in this order

Every rank calls them, so one may use the model's parts or a collective; for what is to happen once, ask `now.rank == 0`. After each call
ranks agree: what one raises ends the run on all of them, and where one asks to stop, all stop after this step.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from moe.recipe.sections import Run
from parallel import watchdog
from parallel.collectives import largest
from parallel.errors import BadInput, Ended, where
from parallel.mesh import Axis
from parallel.outcome import agree

EVENTS = ("on_train_begin", "on_step_end", "on_evaluate", "on_save", "on_train_end")


@dataclass
class Now:
    """Where a run is. `step`: so many are made, of `steps`; `record`: what this moment left, as metrics.jsonl and summary.json have it.

    | event | `record` |
    |---|---|
    | on_train_begin | empty |
    | on_step_end | kind train: loss, lr, grad_norm, tokens_per_second, dropped_share, load of each MoE layer under "moe" |
    | on_evaluate | kind eval: validation_loss, bits_per_byte |
    | on_save | kind event, "saved": step and path of the checkpoint that is there now |
    | on_train_end | the summary |

    `model`: what this rank holds of it. Its parameters are for reading: a change on one rank alone makes copies differ.
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
    """Override what is needed; each is called on every rank, with where the run is."""

    def on_train_begin(self, now: Now) -> None:
        """Before the first step of this process, of a run that goes on too."""

    def on_step_end(self, now: Now) -> None:
        """After each step, one whose gradients were dropped too ("skipped" in its record)."""

    def on_evaluate(self, now: Now) -> None:
        """After each evaluation on held-out text."""

    def on_save(self, now: Now) -> None:
        """When a checkpoint is whole on disk; with train.save_mode async that is a save later, or at the end."""

    def on_train_end(self, now: Now) -> None:
        """After the last step, or after a stop that a callback asked for; not after a signal."""


class Callbacks:
    """The callbacks of one rank, called together with those of the others. `stopped`: the reason, once any has asked."""

    def __init__(self, each: Sequence[Callback], world: Axis) -> None:
        self.each, self.world = tuple(each), world
        self.stopped: str | None = None
        names = float(zlib.crc32(" ".join(f"{type(one).__qualname__} {_overridden(one)}" for one in self.each).encode()))
        if largest(names, world) != -largest(-names, world):
            needed = "the same on every rank: ranks wait for one another after each"
            raise BadInput("callbacks", got="others on one rank than on another", needed=needed, fix="ask now.rank == 0 within one")

    def call(self, event: str, now: Now) -> None:
        """Call each that has overridden `event`. Raises Ended, on every rank, where one raised. Collective where there are any."""
        for callback in self.each:
            if event not in _overridden(callback):
                continue
            name = f"callback {type(callback).__name__}.{event}"
            watchdog.enter(name, patience=watchdog.FIRST)
            training = now.model.training
            outcome = agree(lambda c=callback: getattr(c, event)(now), self.world, said=where)  # type: ignore[misc]
            if now.model.training != training:  # a callback that generates or evaluates may leave it so
                now.model.train(training)
            if outcome.failure is not None:
                failure = outcome.failure
                on = f" on rank {failure.rank}" if self.world.size > 1 else ""
                line = f"{name} raised {failure.line}{on} at step {now.step}; the run goes on from its newest checkpoint when it is mended"
                raise Ended(line, speaker=failure.rank == self.world.index) from failure.error
            if largest(float(bool(now.asked)), self.world):
                reason = "; ".join(filter(None, now.asked))
                self.stopped = self.stopped or (f"{name}: {reason}" if reason else name)
        watchdog.enter("after the step", patience=1.0)


def _overridden(callback: Callback) -> list[str]:
    """A method of its class, or a function that was set on the object."""
    return [event for event in EVENTS if getattr(getattr(callback, event), "__func__", None) is not getattr(Callback, event)]


def check(each: object) -> None:
    """Raises BadInput for what is no callback: a class instead of an object of it, a function, a method whose name no event has."""
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
