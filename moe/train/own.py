"""The parts of a run that its user's program brings, as objects: callbacks, samples instead of text, an optimizer.

A recipe says that they are there, `data.source: given` and `optimizer.kind: given`, so that a run's folder tells what it was trained with
and a start without them is refused.
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
from moe.train.callbacks import Callback, check
from moe.train.learning_rate import own_share
from parallel.collectives import largest
from parallel.errors import BadInput
from parallel.mesh import Axis, Mesh
from parallel.optim.given import Factory, Given
from parallel.outcome import of_all

GIVEN = "given"
# what the parts that a recipe names are called with (docs/use/plugins.md)
ARGUMENTS: dict[str, int | None] = {
    "optimizer.kind": 1, "optimizer.schedule": 2, "data.source": 1, "dispatch.kind": None, "router.score": 1, "router.select": 2
}  # fmt: skip


@dataclass(frozen=True)
class Own:
    """`data`: as of moe/data/given.py; `optimizer`: as of parallel/optim/given.py."""

    callbacks: Sequence[Callback] = ()
    data: Any = None
    optimizer: Factory | None = None

    def named_in(self, run: Run) -> Run:
        """The run that says what is given. Raises BadInput where it says so and nothing is, or says something else as well."""
        check(self.callbacks)
        rows = (("data.source", "data", self.data, run.data.source), ("optimizer.kind", "optimizer", self.optimizer, run.optimizer.kind))
        for key, argument, value, said in rows:
            section, name = key.split(".")
            if value is None and said == GIVEN:
                needed = f"it from Python: train(run, {argument}=...)"
                raise BadInput(key, got=GIVEN, needed=needed, fix=f"start the script that gives it, or set {key} to another one")
            if value is None:
                continue
            default = type(getattr(run, section)).model_fields[name].default
            if said not in (GIVEN, default):
                got = f"{said}, and train(run, {argument}=...) as well"
                raise BadInput(key, got=got, needed="one of the two", fix=f"leave {key} out, or {argument}=")
            run = run.model_copy(update={section: getattr(run, section).model_copy(update={name: GIVEN})})
        return run

    @staticmethod
    def code(run: Run) -> dict[str, str]:
        """The parts that the recipe names, imported, and a schedule tried: SHA-256 of each one's file by its key. Raises BadInput."""
        for key, value in run.plugins().items():
            load_plugin(key, value, arguments=ARGUMENTS[key])
        decayed = run.train.steps - run.optimizer.warmup_steps
        for update in (0, decayed // 2, decayed - 1) if is_plugin(run.optimizer.schedule) and decayed > 0 else ():
            own_share(run.optimizer.schedule, update, decayed)
        return {key: source_of(value) for key, value in run.plugins().items()}

    def rule(self, run: Run, mesh: Mesh) -> Given | None:
        """The optimizer, tried on small parameters with every name of the model's. Raises BadInput, on every rank alike."""
        if not run.optimizer.is_own:
            return None
        rule = optimizer_of(run.optimizer) if self.optimizer is None else given_of(run.optimizer, self.optimizer)
        assert isinstance(rule, Given)
        check_given(rule, run, whole_layouts(run), mesh)
        return rule


def the_same(read: Callable[[], Dataset], world: Axis) -> Dataset:
    """Samples of a user's program, opened. Collective. Raises BadInput on every rank where they cannot be on one, or are others there."""

    def opened() -> tuple[Dataset, bytes]:
        data = read()
        first = data.train.first().tobytes() if isinstance(data.train, Stream) else b""  # those with [] are in the key
        return data, data.key.encode() + first

    data, what = of_all(opened, world, what="data")
    seen = float(zlib.crc32(what))
    if largest(seen, world) != -largest(-seen, world):
        needed = "the same on every rank, which reads its own part of them"
        raise BadInput("data", got="other samples on one rank than on another", needed=needed, fix="give every rank all samples")
    return data
