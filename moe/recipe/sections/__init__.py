"""`Run`: a whole recipe, with values that are computed from several of its sections. moe/recipe/load.py reads a Run from YAML and flags.
`check_run` (moe/checks/together.py) refuses values that do not work together. In Python, `train(Run(...))` trains a recipe without a
command line.
"""

from __future__ import annotations

import math
from operator import attrgetter

from moe.recipe.plugin import GROUPS, is_plugin
from moe.recipe.section import Section
from moe.recipe.sections.experts import Dispatch, Experts, Router
from moe.recipe.sections.layout import Offload, Parallel, Pipeline, Precision, Recompute, Sequence, Sharding, Tensor, Tiling
from moe.recipe.sections.model import Latent, Model, Rope, Scales, Swiglu
from moe.recipe.sections.training import Data, Lora, Optimizer, Train
from parallel.data.kinds.kind import EngineKind
from parallel.errors import BadInput
from parallel.mesh.grids import Grid, grid_of
from parallel.mesh.mesh import Degrees, divisors

__all__ = [
    "Data", "Dispatch", "Experts", "Latent", "Lora", "Model", "Offload", "Optimizer", "Parallel", "Pipeline", "Precision", "Recompute",
    "Rope", "Router", "Run", "Scales", "Section", "Sequence", "Sharding", "Swiglu", "Tensor", "Tiling", "Train",
]  # fmt: skip


class Run(Section):
    """A whole recipe: one field for each section."""

    model: Model = Model()
    experts: Experts = Experts()
    router: Router = Router()
    dispatch: Dispatch = Dispatch()
    degrees: Parallel = Parallel()
    sharding: Sharding = Sharding()
    tensor: Tensor = Tensor()
    sequence: Sequence = Sequence()
    pipeline: Pipeline = Pipeline()
    tiling: Tiling = Tiling()
    recompute: Recompute = Recompute()
    precision: Precision = Precision()
    data: Data = Data()
    optimizer: Optimizer = Optimizer()
    lora: Lora = Lora()
    train: Train = Train()

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size or self.least_vocab_size

    @property
    def has_dense_networks(self) -> bool:
        """Whether any layer has a feed-forward network other than routed experts: a dense one, a shared expert or a residual network."""
        return len(self.model.layers_with_experts()) < self.model.num_layers or bool(self.experts.shared or self.experts.residual)

    @property
    def least_vocab_size(self) -> int:
        """Smallest possible size of the vocabulary: the tokenizer's ids and span corruption's sentinels."""
        return (256 if self.data.tokenizer == "bytes" else self.data.vocab_size) + self.num_sentinels

    @property
    def num_sentinels(self) -> int:
        """Number of sentinels: ids at the end of the vocabulary, each of which replaces a hidden span (0 without span corruption)."""
        return self.model.spans.num_spans if self.data.objective == "span_corruption" else 0

    def plugins(self) -> dict[str, str]:
        """Return the plugins that the recipe uses, as a dict: key, such as "train.loss" -> "module:name"."""
        keys = [key for key in GROUPS if not key.startswith("router.") or self.model.layers_with_experts()]
        values = {key: attrgetter(key)(self) for key in keys}
        return {key: value for key, value in values.items() if is_plugin(value)}

    def resolve(self, world_size: int) -> Run:
        """Return the run with `auto` degrees replaced by numbers for `world_size` processes."""
        d = self.degrees
        dp = max(1, world_size // (d.pp * d.tp * d.sp)) if d.dp == "auto" else d.dp
        ep = d.ep
        if ep == "auto":
            ep = math.gcd(max(1, dp * d.tp * d.sp // d.etp), *self.experts.counts) if self.model.layers_with_experts() else 1
        return self.model_copy(update={"degrees": d.model_copy(update={"dp": dp, "ep": ep})})

    def tp_grid(self) -> Grid:
        """Return the grid that the ranks of tp form. Raises BadInput if degrees.tp ranks cannot form a grid of tensor.kind."""
        heads = self.model.num_kv_heads or self.model.num_heads
        sides = [side for side in divisors(self.model.num_heads)[1:] if heads % side == 0 or side % heads == 0]
        return grid_of(self.tensor.kind, self.degrees.tp, self.tensor.depth, sides=sides)

    def head_copies(self) -> int:
        """Return the number of ranks of tp that hold the same key-value head. It is above 1 only if there are more ranks than heads."""
        heads, ways = self.model.num_kv_heads or self.model.num_heads, self.tp_grid().units
        return ways // heads if self.tensor.kind != "dtensor" and ways > heads and ways % heads == 0 else 1

    @property
    def carrier(self) -> EngineKind:
        """The data-parallel engine that the run uses, which may differ from the one that section `sharding` names."""
        return self.sharding.carrier(pp=self.degrees.pp, flat=self.is_flat)

    @property
    def engine_text(self) -> str:
        """Name of the recipe's engine (zero), and of the engine that runs instead, if any: "zero, carried out by fsdp"."""
        named, runs = self.sharding.named.name, self.carrier.name
        return named if named == runs else f"{named}, carried out by {runs}"

    @property
    def is_flat(self) -> bool:
        """Whether the optimizer can update flat ranges of fp32 elements, as DeepSpeed does: it needs no whole matrices, and
        precision.master is fp32."""
        return not self.optimizer.of_matrices and self.precision.master == "fp32"

    @property
    def reshards(self) -> bool:
        """Whether FSDP frees gathered weights after the forward pass; True for other engines. FSDP keeps them if it carries out ZeRO-1, or
        ZeRO-2 without pipeline stages."""
        keeps = "reshard" in self.carrier.keys and self.sharding.named.stage in ((1,) if self.degrees.pp > 1 else (1, 2))
        return self.sharding.reshard and not keeps

    def mesh_degrees(self) -> Degrees:
        """Return the resolved degrees. Call `resolve` first: raises BadInput if one is still `auto`."""
        d = self.degrees
        if d.dp == "auto" or d.ep == "auto":
            raise BadInput("degrees", got="auto", needed="numbers", fix="call run.resolve(world_size) first")
        inner, heads = (self.dispatch.node_size or 1) if d.ep > 1 else 1, self.sequence.heads_of(d.sp)
        grid, copies = self.tp_grid(), self.head_copies()
        along = {
            "tp_col_copies" if grid.kind in ("2d", "2.5d") else "tp_row_copies": copies,
            "tp_col": grid.columns,
            "tp_depth": grid.depth,
        }
        return Degrees(dp=d.dp, pp=d.pp, tp=d.tp, sp=d.sp, ep=d.ep, etp=d.etp, ep_inner=inner, sp_heads=heads, **along)
