"""Objects that a user's program gives to `train`: callbacks, samples instead of text, an optimizer.

The run's recipe then has `data.source: given` or `optimizer.kind: given`. A later start that does not give the object is refused.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from moe.data import Dataset, Stream
from moe.parallelize.build import whole_layouts
from moe.parallelize.engines import check_given, given_of, optimizer_of
from moe.recipe.plugin import is_plugin, load_plugin, source_of
from moe.recipe.sections import Run
from moe.train.parts.callbacks import Callback, check
from moe.train.parts.learning_rate import own_share
from parallel.errors import BadInput
from parallel.fixes import Remove
from parallel.mesh.collectives import largest
from parallel.mesh.mesh import Axis, Mesh
from parallel.optim.given import Factory, Given
from parallel.watch.outcome import of_all

GIVEN = "given"
# key that accepts a plugin -> number of arguments with which the plugin is called (docs/use/plugins.md)
ARGUMENTS: dict[str, int | None] = {
    "optimizer.kind": 1, "optimizer.schedule": 2, "data.source": 1, "train.loss": 1, "dispatch.kind": 1,
    "router.score": 1, "router.select": 2, "router.balance_loss": 2,
}  # fmt: skip


@dataclass(frozen=True)
class Own:
    """Objects that a user's program gives. data: samples (moe/data/given.py). optimizer: a function that makes the optimizer
    (parallel/optim/given.py)."""

    callbacks: Sequence[Callback] = ()
    data: Any = None
    optimizer: Factory | None = None

    def named_in(self, run: Run) -> Run:
        """Return `run` with data.source "given" if samples are given, and optimizer.kind "given" if an optimizer is. Raises BadInput if the
        recipe names another source or optimizer, or says "given" without an object."""
        check(self.callbacks)
        rows = (("data.source", "data", self.data, run.data.source), ("optimizer.kind", "optimizer", self.optimizer, run.optimizer.kind))
        for key, argument, value, said in rows:
            section, name = key.split(".")
            if value is None and said == GIVEN:
                needed = f"the object itself, from Python: train(run, {argument}=...)"
                raise BadInput(key, got=GIVEN, needed=needed, fix=f"start the Python script that passes {argument}=" | Remove(key))
            if value is None:
                continue
            default = type(getattr(run, section)).model_fields[name].default
            if said not in (GIVEN, default):
                got = f"{said}, and train(run, {argument}=...) as well"
                raise BadInput(key, got=got, needed="one of the two", fix=Remove(key) | f"leave out {argument}=")
            run = run.model_copy(update={section: getattr(run, section).model_copy(update={name: GIVEN})})
        return run

    @staticmethod
    def code(run: Run) -> dict[str, str]:
        """Import the plugins that the recipe names. If one is a learning-rate schedule, call it for three updates as a test. Return a
        dict: recipe key -> SHA-256 of the plugin's file. Raises BadInput if a plugin cannot be imported or fails the test."""
        for key, value in run.plugins().items():
            load_plugin(key, value, arguments=ARGUMENTS[key])
        decayed = run.train.steps - run.optimizer.warmup_steps
        for update in (0, decayed // 2, decayed - 1) if is_plugin(run.optimizer.schedule) and decayed > 0 else ():
            own_share(run.optimizer.schedule, update, decayed)
        return {key: source_of(value) for key, value in run.plugins().items()}

    def rule(self, run: Run, mesh: Mesh) -> Given | None:
        """Return the user's optimizer, tested on small parameters that have the model's names; None if the recipe names an optimizer of
        this project. Raises BadInput on all ranks."""
        if not run.optimizer.is_own:
            return None
        rule = optimizer_of(run.optimizer) if self.optimizer is None else given_of(run.optimizer, self.optimizer)
        assert isinstance(rule, Given)
        check_given(rule, run, whole_layouts(run), mesh)
        return rule


def the_same(read: Callable[[], Dataset], world: Axis) -> Dataset:
    """Call `read` and return the data set. Collective. Raises BadInput on all ranks if `read` fails on one rank, or if ranks have different
    samples."""

    def opened() -> tuple[Dataset, bytes]:
        data = read()
        # data.key is a hash of the samples only if they are in memory, so for a stream the first sample is compared too
        first = data.train.first().tobytes() if isinstance(data.train, Stream) else b""
        return data, data.key.encode() + first

    data, what = of_all(opened, world, what="data")
    seen = float(zlib.crc32(what))
    if largest(seen, world) != -largest(-seen, world):
        needed = "the same samples on every rank: each rank reads its own part"
        raise BadInput(
            "data",
            got="different samples on different ranks",
            needed=needed,
            fix="give every rank all samples, or files of equal content",
        )
    return data
