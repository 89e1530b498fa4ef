"""The interface of dispatchers, which send tokens to the ranks that hold their experts. Each has a file of its own; __init__.py
lists them.

    dispatcher   made from the recipe's settings                     checks the settings; tells the planner what it sends
    exchange     dispatcher.open(mesh, sizes), once for a model      makes buffers, process groups and streams
    layer        exchange.layer("layers.3")                          y_TD = layer.run(x_TD, routing, experts)

A row is a copy of a token for one of its experts.

All dispatchers give the same results (GShard, arXiv 2006.16668). A new dispatcher is a file here, a line in __init__.py, and its name and
keys in moe/recipe/sections. Recipes are checked before torch is loaded, so these files import torch inside functions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from parallel.mesh.mesh import Axis, Mesh
from parallel.mesh.traffic import Load, Traffic

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from moe.experts.dispatch.network import Dropout
    from moe.experts.dispatch.placement import Placement
    from moe.experts.experts import Experts
    from moe.kernels.network import ByProduct
    from moe.recipe import sections
    from moe.router.routing import Routing

# T tokens, D model, R rows, E experts


class Sizes(NamedTuple):
    """Sizes of a model's MoE layers. `width`: d_model. `experts`: largest number of experts in a layer. `choices`: experts that a token
    chooses. `kernels`: a module of moe.kernels."""

    width: int
    experts: int
    choices: int
    kernels: ModuleType | ByProduct


@dataclass(frozen=True)
class Dispatcher(ABC):
    """A method of sending rows. `settings`: the recipe's section `dispatch`. Checks, planner and tables read the class attributes:

    `about`: when to use it. `reads`: key of `dispatch` that only this dispatcher reads -> why others do not. `examples`: name of a row in
    the table of `moe verify` -> {key of `dispatch`: value}; empty: one row with the dispatcher's name. `least_ranks`: smallest ep for which
    it differs from all_to_all. `returns_rows`: whether each row's result is sent back. If so, the rank that sent the row keeps the result
    for the backward pass. Otherwise only sums over rows are sent back, and the rank that computed the results keeps them."""

    settings: sections.Dispatch

    name: ClassVar[str]
    about: ClassVar[str]
    reads: ClassVar[Mapping[str, str]] = {}
    examples: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    least_ranks: ClassVar[int] = 2
    returns_rows: ClassVar[bool] = True

    @property
    def chunks(self) -> int:
        """Return the number of chunks into which a rank's experts are divided. Rows are sent chunk by chunk."""
        return 1

    def check(self, *, ranks: int, held: int) -> None:  # noqa: B027  not abstract: most dispatchers refuse nothing
        """Refuse settings that cannot work on `ranks` ranks of ep with `held` experts each. Raises BadInput."""

    @abstractmethod
    def traffic(self, load: Load) -> Traffic:
        """Return the messages that one layer sends for one rank's tokens and rows, whose numbers and sizes are in `load`. Not
        counted: the tokens' indices in the step, which are sent only with dropout, because its mask depends on them."""

    @abstractmethod
    def open(self, mesh: Mesh, sizes: Sizes) -> Exchange:
        """Prepare the exchange for all layers of a model. Collective over ep."""


@dataclass(frozen=True)
class Exchange(ABC):
    """An opened dispatcher: for all layers of a model, or for one layer if `layer` returned it. Only its buffers persist between calls.
    `axes`: axes over which rows are sent. `etp`: the axis over which each expert's matrices are sharded. `placement`: the expert at each
    place (a slot for one expert; places are numbered rank by rank over ep); None: expert p at place p. `meanwhile`: computes the part of
    the layer that needs no other rank. `run` may call it once, while rows are being sent; if `run` does not, the layer calls it.
    """

    axes: tuple[Axis, ...] = ()
    etp: Axis = Axis("etp")  # noqa: RUF009  a constant
    kernels: Any = None
    placement: Placement | None = None
    meanwhile: Callable[[], object] = lambda: None  # noqa: E731
    _places: dict[tuple[tuple[int, ...] | None, torch.device], Tensor] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def over(cls, axes: tuple[str, ...], mesh: Mesh, sizes: Sizes, **own: Any) -> Self:
        """Return the exchange over the named axes of the mesh. `own`: values of a subclass's own fields."""
        return cls(tuple(map(mesh.axis, axes)), mesh.axis("etp"), sizes.kernels, **own)

    def layer(self, label: str, placement: Placement | None = None) -> Self:
        """Return the exchange of one layer. `label`: its name in error messages and in the watchdog's record. `placement`: the expert at
        each place; None: expert p at place p."""
        axes = tuple(replace(axis, label=label) for axis in self.axes)
        return replace(self, axes=axes, etp=replace(self.etp, label=label), placement=placement, _places={})

    @property
    def axis(self) -> Axis:
        return self.axes[0]

    def places(self, routing: Routing, order: tuple[int, ...] | None = None) -> Tensor:
        """Return for each choice the place of its expert: the position in the order in which ranks hold experts, int64 [T,
        K]. `order`: new numbers of the places; place order[i] gets number i. None: the numbers stay."""
        import torch

        from moe.experts.dispatch.placement import place_of_expert
        from parallel.mesh.host import on_device

        expert_TK, num_experts = routing.expert_TK, routing.probs_TE.shape[1]
        if self.placement is None and order is None:
            return expert_TK
        if (order, expert_TK.device) not in self._places:  # copied to the device once, then reused in all passes
            place_E = torch.tensor(place_of_expert(num_experts, self.placement, order))
            self._places[order, expert_TK.device] = on_device(place_E, expert_TK.device)
        return self._places[order, expert_TK.device][expert_TK]

    @abstractmethod
    def run(self, x_TD: Tensor, routing: Routing, experts: Experts, *, dropout: Dropout | None = None) -> Tensor:
        """Return the sum of gate * expert(x) over each token's kept choices: [T, D] in x's dtype. A token without kept choices gets zeros.
        `experts`: this rank's. `dropout`: for the experts' hidden units; None: no dropout."""


class Local(Exchange):
    """The exchange of a rank that holds all experts, for every dispatch.kind: one fused kernel call, and nothing is sent."""

    def run(self, x_TD: Tensor, routing: Routing, experts: Experts, *, dropout: Dropout | None = None) -> Tensor:
        from moe.experts.experts import Routed

        plan = experts.kernels.plan(routing.expert_TK, routing.kept_TK, num_experts=routing.probs_TE.shape[1])
        dropped_RF = None if dropout is None else dropout.scale(dropout.position_T[plan.token_R])
        out: Tensor = experts(x_TD, counts=Routed(routing.gate_TK, plan), dropped_RF=dropped_RF)
        return out
