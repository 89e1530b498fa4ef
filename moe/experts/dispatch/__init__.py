"""The dispatchers, which send tokens to the ranks that hold their experts, and results back, by their names in a recipe (`dispatch.kind`).
`auto` means the first, all_to_all. dispatcher.py has the interface."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moe.experts.dispatch.all_gather import AllGather
from moe.experts.dispatch.all_to_all import AllToAll
from moe.experts.dispatch.dispatcher import Dispatcher, Exchange, Local, Sizes
from moe.experts.dispatch.hierarchical import Hierarchical
from moe.experts.dispatch.padded import Padded
from moe.recipe.plugin import is_plugin, load_plugin
from parallel.errors import BadInput
from parallel.fixes import Set, written
from parallel.mesh.mesh import Mesh

if TYPE_CHECKING:
    from moe.recipe import sections

DISPATCHERS: dict[str, type[Dispatcher]] = {d.name: d for d in (AllToAll, Padded, AllGather, Hierarchical)}
PLAIN = AllToAll.name


class Own(AllToAll):
    """A user's own dispatcher, named in the recipe as `module:name`. Checks and the planner treat it as all_to_all and never call it."""

    name = "module:name"
    reads = {}

    def open(self, mesh: Mesh, sizes: Sizes) -> Exchange:
        made = load_plugin("dispatch.kind", self.settings.kind, arguments=1)(self.settings)
        if not isinstance(made, Dispatcher):
            got, needed = f"{self.settings.kind}, which gives a {type(made).__name__}", "a Dispatcher (moe/experts/dispatch/dispatcher.py)"
            raise BadInput("dispatch.kind", got=got, needed=needed, fix="see: docs/use/plugins.md")
        return made.open(mesh, sizes)


def dispatcher_of(settings: sections.Dispatch) -> Dispatcher:
    return Own(settings) if is_plugin(settings.kind) else DISPATCHERS.get(settings.kind, AllToAll)(settings)


def check_dispatch(settings: sections.Dispatch, *, ranks: int, held: int) -> None:
    """Raise BadInput for settings that the dispatcher does not read, or that do not work on `ranks` ep ranks with `held` experts each."""
    dispatcher = dispatcher_of(settings)
    for key, reason, name in [(key, reason, other.name) for other in DISPATCHERS.values() for key, reason in other.reads.items()]:
        value, default = getattr(settings, key), type(settings).model_fields[key].default
        if value != default and key not in dispatcher.reads:
            got, needed = f"{value} with dispatch.kind={settings.kind}", f"{written(default)}: {reason}"
            raise BadInput(f"dispatch.{key}", got=got, needed=needed, fix=Set("dispatch.kind", name) | Set(f"dispatch.{key}", default))
    dispatcher.check(ranks=ranks, held=held)


def open_exchange(settings: sections.Dispatch, mesh: Mesh, sizes: Sizes) -> Exchange:
    """Return the exchange of rows between ranks, for all layers of a model: from the recipe's dispatcher if ep is above 1, from all_to_all
    if only etp is above 1, and Local (nothing is sent) if both are 1. Collective."""
    if mesh.axis("ep").size > 1:
        return dispatcher_of(settings).open(mesh, sizes)
    return Local() if mesh.axis("etp").size == 1 else AllToAll(settings).open(mesh, sizes)


def examples() -> dict[str, dict[str, Any]]:
    """Return the settings that `moe verify` compares: name of a row of its table -> keys of the section `dispatch`."""
    found = {row: {"kind": d.name, **keys} for d in DISPATCHERS.values() for row, keys in (d.examples or {d.name: {}}).items()}
    return {row: found[row] for row in sorted(found, key=lambda row: row not in DISPATCHERS)}


def rows_for(ep: int) -> list[str]:
    """Return the names of the `examples` to compare on `ep` ranks. Examples that need more ranks to differ from all_to_all are left out
    (`least_ranks`). If none is left, return [all_to_all]."""
    return [row for row, section in examples().items() if ep >= DISPATCHERS[section["kind"]].least_ranks] or [PLAIN]
