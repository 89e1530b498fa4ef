"""How tokens reach the ranks that hold their experts: one object for each dispatcher, in a file of its own; catalog.py lists them.

    dispatcher   the recipe's settings, and facts                    what it refuses, sends and costs
    exchange     dispatcher.open(mesh, sizes), once for a model      buffers, process groups and streams are made here
    layer        exchange.layer("layers.3")                          y_TD = layer.run(x_TD, routing, experts)

All give the same results (GShard, arXiv 2006.16668). A new dispatcher is a file here, a line in catalog.py, and its name and keys in
moe/recipe/sections. Recipes are checked before torch is loaded, so these files import it inside functions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from parallel.mesh.mesh import Axis, Mesh
from parallel.mesh.traffic import Load, Traffic

if TYPE_CHECKING:
    from torch import Tensor

    from moe.experts.dispatch.network import Dropout
    from moe.experts.dispatch.placement import Placement
    from moe.experts.experts import Experts
    from moe.kernels.network import ByProduct
    from moe.recipe import sections
    from moe.router.router import Routing

# T tokens, D model, R rows, E experts


class Sizes(NamedTuple):
    """Sizes of a model's MoE layers: `width` of a row, largest number of `experts` of a layer, `choices` of a token. `kernels`: a module of
    moe.kernels."""

    width: int
    experts: int
    choices: int
    kernels: ModuleType | ByProduct


@dataclass(frozen=True)
class Dispatcher(ABC):
    """A method of sending rows, with the recipe's section `dispatch`. Its attributes are facts, which checks, planner and tables read.

    `about`: when to use it. `reads`: keys of `dispatch` that no other dispatcher reads -> the reason. `examples`: name of each of its
    rows in `moe verify` -> keys of `dispatch`; empty: one row, by its name. `least_ranks`: smallest ep for which it differs from
    all_to_all. `returns_rows`: results of rows are sent back, so the rank that sent the rows keeps them for the backward pass; False: the
    rank that computed them keeps them.
    """

    settings: sections.Dispatch

    name: ClassVar[str]
    about: ClassVar[str]
    reads: ClassVar[Mapping[str, str]] = {}
    examples: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    least_ranks: ClassVar[int] = 2
    returns_rows: ClassVar[bool] = True

    @property
    def chunks(self) -> int:
        """Return the number of chunks into which a rank's experts are cut."""
        return 1

    def check(self, *, ranks: int, held: int) -> None:  # noqa: B027  most refuse nothing
        """Refuse settings that cannot work on `ranks` ranks of ep with `held` experts each. Raises BadInput."""

    @abstractmethod
    def traffic(self, load: Load) -> Traffic:
        """Return the messages that one layer sends for one rank's tokens and rows, without dropout inside the experts."""

    @abstractmethod
    def open(self, mesh: Mesh, sizes: Sizes) -> Exchange:
        """Prepare the exchange for all layers of a model. Collective over ep."""


@dataclass(frozen=True)
class Exchange(ABC):
    """An opened dispatcher, for all layers of a model or, from `layer`, for one of them. It keeps nothing between calls but buffers.
    `axes`: axes over which rows are sent. `etp`: the axis over which each expert's matrices are sharded. `placement`: the expert at each
    place (placement.py); None: expert p at place p.
    """

    axes: tuple[Axis, ...] = ()
    etp: Axis = Axis("etp")  # noqa: RUF009  a constant
    kernels: Any = None
    placement: Placement | None = None

    @classmethod
    def over(cls, axes: tuple[str, ...], mesh: Mesh, sizes: Sizes, **own: Any) -> Self:
        return cls(tuple(map(mesh.axis, axes)), mesh.axis("etp"), sizes.kernels, **own)

    def layer(self, label: str, placement: Placement | None = None) -> Self:
        """Return the exchange of one layer. `label` names it in error messages and in the watchdog's record."""
        axes = tuple(replace(axis, label=label) for axis in self.axes)
        return replace(self, axes=axes, etp=replace(self.etp, label=label), placement=placement)

    @property
    def axis(self) -> Axis:
        return self.axes[0]

    def places(self, routing: Routing, order: tuple[int, ...] | None = None) -> Tensor:
        """Return the place of each choice's expert, int64 [T, K]. `order`: renumbers places, so that place order[i] becomes i."""
        from moe.experts.dispatch.placement import place_of

        return place_of(routing.expert_TK, num_experts=routing.probs_TE.shape[1], placement=self.placement, order=order)

    @abstractmethod
    def run(self, x_TD: Tensor, routing: Routing, experts: Experts, *, dropout: Dropout | None = None) -> Tensor:
        """Sum gate * expert(x) over each token's kept choices: [T, D] in x's dtype. A token without kept choices gets zeros."""


class Local(Exchange):
    """The exchange of a rank that holds all experts, whatever the recipe's dispatcher: one fused kernel call, and nothing is sent."""

    def run(self, x_TD: Tensor, routing: Routing, experts: Experts, *, dropout: Dropout | None = None) -> Tensor:
        from moe.experts.experts import Routed

        plan = experts.kernels.plan(routing.expert_TK, routing.kept_TK, num_experts=routing.probs_TE.shape[1])
        dropped_RF = None if dropout is None else dropout.scale(dropout.position_T[plan.token_R])
        out: Tensor = experts(x_TD, counts=Routed(routing.gate_TK, plan), dropped_RF=dropped_RF)
        return out
