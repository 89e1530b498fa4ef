"""A user's own dispatcher, named in the recipe as `module:name` (docs/use/plugins.md): a subclass of Dispatcher.

A recipe is checked without its code, so checks and the planner take it for an all_to_all.
"""

from __future__ import annotations

from parallel.mesh.mesh import Mesh

from moe.experts.dispatch.all_to_all import AllToAll
from moe.experts.dispatch.dispatcher import Exchange, Sizes
from moe.recipe.plugin import load_plugin
from parallel.errors import BadInput


class Own(AllToAll):
    """The class that `dispatch.kind` names."""

    name = "module:name"
    reads = {}

    def open(self, mesh: Mesh, sizes: Sizes) -> Exchange:
        kind = self.settings.kind
        make = load_plugin("dispatch.kind", kind, arguments=1)
        made = make(self.settings)
        if not callable(getattr(made, "open", None)):
            got = f"{kind}, which gives a {type(made).__name__} without open()"
            needed = "a Dispatcher (moe/experts/dispatch/dispatcher.py)"
            raise BadInput("dispatch.kind", got=got, needed=needed, fix="see: docs/use/plugins.md")
        opened: Exchange = made.open(mesh, sizes)
        return opened
