"""A whole recipe, and what follows from several of its sections together."""

from __future__ import annotations

import math

from moe.recipe.plugin import is_plugin
from moe.recipe.section import Section
from moe.recipe.sections.experts import Dispatch, Experts, Router
from moe.recipe.sections.layout import Parallel, Pipeline, Precision, Recompute, Sequence, Sharding, Tensor, Tiling
from moe.recipe.sections.model import Model
from moe.recipe.sections.training import Data, Lora, Optimizer, Train
from parallel.errors import BadInput
from parallel.mesh.grids import GRIDS, LINES, grid_of
from parallel.mesh.mesh import Degrees, divisors
from parallel.tensor import linear_2p5d


class Run(Section):
    """A whole recipe."""

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
    def least_vocab_size(self) -> int:
        """Number of the tokenizer's ids and of the objective's sentinels after them."""
        return (256 if self.data.tokenizer == "bytes" else self.data.vocab_size) + self.num_sentinels

    @property
    def num_sentinels(self) -> int:
        """Number of ids at the end of the vocabulary that mark hidden spans."""
        return self.model.spans.num_spans if self.data.objective == "span_corruption" else 0

    def plugins(self) -> dict[str, str]:
        """Return the user's own parts that the recipe names, by key."""
        values = {
            "optimizer.kind": self.optimizer.kind,
            "optimizer.schedule": self.optimizer.schedule,
            "data.source": self.data.source,
            "dispatch.kind": self.dispatch.kind,
        }
        if self.model.layers_with_experts():
            values |= {"router.score": self.router.score, "router.select": self.router.select}
        return {key: value for key, value in values.items() if is_plugin(value)}

    def resolve(self, world_size: int) -> Run:
        """Return the run with `auto` degrees replaced by numbers for `world_size` processes."""
        tp, sp = max(1, self.degrees.tp), max(1, self.degrees.sp)
        dp = max(1, world_size // max(1, self.degrees.pp * tp * sp)) if self.degrees.dp == "auto" else self.degrees.dp
        ep = self.degrees.ep
        if ep == "auto":
            ep = math.gcd(max(1, dp * tp * sp // max(1, self.degrees.etp)), *self.experts.counts) if self.model.layers_with_experts() else 1
        return self.model_copy(update={"degrees": self.degrees.model_copy(update={"dp": dp, "ep": ep})})

    def tp_grid(self) -> tuple[int, int, int]:
        """Return the ranks of tp as (depth, rows, columns). Raises BadInput if they make no grid of tensor.kind."""
        tp, tensor = self.degrees.tp, self.tensor
        if tp > 1 and tensor.kind in GRIDS:
            heads = self.model.num_kv_heads or self.model.num_heads
            sides = [side for side in divisors(self.model.num_heads)[1:] if heads % side == 0 or side % heads == 0]
            return linear_2p5d.grid_of(tp, tensor.depth, sides=sides) if tensor.kind == "2.5d" else grid_of(tensor.kind, tp, sides=sides)
        return 1, tp, 1

    def sequence_parts(self) -> int:
        """Number of shards into which tp cuts the sequences that a data-parallel rank reads: 1, or the rows of all grids."""
        depth, rows, _ = self.tp_grid()
        return depth * rows if self.tensor.kind in GRIDS else 1

    def dense_parts(self) -> int:
        """Number of shards into which tp cuts heads, hidden units and the vocabulary."""
        return 1 if self.tensor.kind == "copied" else self.degrees.tp if self.tensor.kind in LINES else self.tp_grid()[2]

    def head_copies(self) -> int:
        """Number of ranks that hold the same key-value head, among the ranks that share heads: 1 unless heads are fewer than ranks."""
        heads, ways = self.model.num_kv_heads or self.model.num_heads, self.dense_parts()
        return ways // heads if self.tensor.kind != "dtensor" and ways > heads and ways % heads == 0 else 1

    def mesh_degrees(self) -> Degrees:
        """Return the resolved degrees. Call `resolve` first: raises BadInput if one is still `auto`."""
        d = self.degrees
        if d.dp == "auto" or d.ep == "auto":
            raise BadInput("degrees", got="auto", needed="numbers", fix="call run.resolve(world_size) first")
        inner, heads = (self.dispatch.node_size or 1) if d.ep > 1 else 1, self.sequence.heads_of(d.sp)
        (depth, _, columns), copies = self.tp_grid(), self.head_copies()
        along = {"tp_col_copies" if self.tensor.kind in ("2d", "2.5d") else "tp_row_copies": copies}
        return Degrees(
            dp=d.dp, pp=d.pp, tp=d.tp, sp=d.sp, ep=d.ep, etp=d.etp, ep_inner=inner, tp_col=columns, tp_depth=depth, sp_heads=heads, **along
        )
