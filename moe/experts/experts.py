"""The experts of one layer: feed-forward networks, with each matrix stacked over experts in one tensor [experts, in, out].

A rank allocates only the experts that it holds, with all their hidden units or a shard of them (columns of w1 and w3, rows of w2). Tiling
cuts these hidden units: each tile has a part of the units of every expert, and the tiles' outputs are summed (parallel/data/tiling.py).
Weights are read in `forward`, because FSDP and ZeRO-3 gather them by hooks on `forward`. Without tiles, the method `chunks`, which divides
the experts into groups, reads them earlier.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from moe.kernels import choose
from moe.kernels.activation import GATED, Activation
from moe.kernels.network import ByProduct, Counts, Network
from moe.kernels.products import PRODUCTS
from moe.kernels.rows import Plan
from moe.nn.blocks import Blocks, Form
from moe.nn.linear import Linear
from moe.nn.lora import frozen_product, grouped_product
from parallel.data.tiling import summed, take
from parallel.mesh.layout import Layout, Tile
from parallel.mesh.regions import in_region

if TYPE_CHECKING:
    from moe.recipe.sections import Swiglu

# R rows, D model, F hidden units, E experts on this rank

MATRICES = ("w1", "w2", "w3")
# the dim of hidden units in each stacked tensor [E, ...]; the adapters w1_a, w3_a and w2_b (moe/nn/lora.py) have no such dim
HIDDEN_DIM = {"w1": 2, "w2": 1, "w3": 2, "b1": 1, "b3": 1, "w1_b": 2, "w2_a": 1, "w3_b": 2}
ExpertChunk = Network | slice | None  # some of this rank's experts, as a Network or, with tiles, as a range of indices; None: all


class Routed(NamedTuple):
    """Argument `counts` of Experts.forward if its input is tokens [T, D] instead of rows sorted by expert: the plan of the rows, and the
    gate of each choice, fp32 [T, K]."""

    gate_TK: Tensor
    plan: Plan


def _with_adapters(network: Network, scale: float, name: str, rows_RI: Tensor, weight_EIO: Tensor, counts: list[int]) -> Tensor:
    """Return each row times its expert's matrix `name` (`weight_EIO`), plus the product with LoRA's adapters if the network has them.
    `scale`: LoRA's factor of this product. `counts`: number of rows of each expert."""
    if not network.adapters:
        return frozen_product(rows_RI, cast(Blocks, weight_EIO), counts)
    return grouped_product(rows_RI, weight_EIO, counts, *network.adapters[name], scale=scale)


def in_blocks(model: nn.Module) -> Iterator[tuple[str, Blocks, Layout]]:
    """Yield (name, blocks, layout) of each frozen matrix of the model that is held in quantized blocks instead of a parameter."""
    for path, module in model.named_modules():
        for name, (blocks, layout) in module.blocks.items() if isinstance(module, Experts | Linear) else ():
            yield f"{path}.{name}", blocks, layout


class Experts(nn.Module):
    """The experts of this rank: `w1` [E, D, F], `w2` [E, F, D], and `w3` [E, D, F] for gated activations. If `tiles` is above 1, modules
    in `self.tiles` have chunks of these matrices, and their outputs are summed. `hidden`: this rank's range of the `d_ff` hidden units;
    None: all. `biases`: add `b1` [E, F] after w1 and `b3` [E, F] after w3; the layer adds the bias after w2 (moe/experts/layer.py).
    `swiglu`: alpha, limit and offset of a bounded swiglu. `products`: which operands of matrix products are quantized, a name in PRODUCTS.

    The attribute `blocks` has the frozen matrices that are quantized blocks (moe/nn/blocks.py) instead of parameters: name -> (its blocks,
    its layout).
    """

    def __init__(
        self,
        num_experts: int,
        *,
        d_model: int,
        d_ff: int,
        ffn: str,
        kernels: str = "auto",
        tiles: int = 1,
        hidden: slice | None = None,
        biases: bool = False,
        swiglu: Swiglu | None = None,
        products: str = "plain",
    ) -> None:
        super().__init__()
        self.biases, self.activation = biases, Activation(ffn, swiglu)
        self.blocks: dict[str, tuple[Blocks, Layout]] = {}
        self.rank, self.scale = 0, 1.0  # rank and scale of LoRA's adapters, set by `adapt`; rank 0: no adapters
        self.num_experts, self.d_model, self.d_ff, self.num_tiles = num_experts, d_model, d_ff, tiles
        self.kernels_name, self.products = kernels, (policy := PRODUCTS[products])
        self.kernels: ModuleType | ByProduct = choose(kernels)
        if not policy.fused:
            self.kernels = ByProduct(self.kernels, lambda _, *operands: policy.product(*operands))
        self.tiles = nn.ModuleList()
        self.hold(range(num_experts), hidden=hidden)

    def hold(self, held: Sequence[int], *, hidden: slice | None = None) -> None:
        """Allocate weights for only these experts (numbered over all ranks) and hidden units. Call it before weights are initialized."""
        self.held: tuple[int, ...] = tuple(held)
        self.hidden = hidden or slice(0, self.d_ff)
        count, units, gated = len(self.held), self.hidden.stop - self.hidden.start, self.activation.ffn in GATED
        before = next(self.parameters(), None)
        like: dict[str, Any] = {} if before is None else {"device": before.device, "dtype": before.dtype}
        if self.num_tiles > 1:
            self.tiles = nn.ModuleList(self._tile(Tile(0, i, self.num_tiles).run(units), like) for i in range(self.num_tiles))
            return
        self.w1 = nn.Parameter(torch.empty(count, self.d_model, units, **like))
        self.w2 = nn.Parameter(torch.empty(count, units, self.d_model, **like))
        self.w3 = nn.Parameter(torch.empty(count, self.d_model, units, **like)) if gated else None
        self.b1 = nn.Parameter(torch.empty(count, units, **like)) if self.biases else None
        self.b3 = nn.Parameter(torch.empty(count, units, **like)) if self.biases and gated else None
        if self.rank:
            self.adapt(self.rank, self.scale)

    def adapt(self, rank: int, scale: float) -> None:
        """Add LoRA adapters: for each matrix [E, in, out], such as w1, two narrow ones, `w1_a` [E, in, rank] and `w1_b` [E, rank, out].
        `scale`: factor of their product."""
        self.rank, self.scale = rank, scale
        for name in MATRICES:
            weight = getattr(self, name)
            if weight is not None:
                count, size_in, size_out = weight.shape
                setattr(self, f"{name}_a", nn.Parameter(weight.new_empty(count, size_in, rank)))
                setattr(self, f"{name}_b", nn.Parameter(weight.new_empty(count, rank, size_out)))

    def follow(self, device: torch.device) -> None:
        """Replace quantized blocks by copies on the device, if they are on another."""
        self.blocks = {name: (blocks.on(device), layout) for name, (blocks, layout) in self.blocks.items()}

    def keep_in_blocks(self, form: Form, layouts: dict[str, Layout], device: torch.device) -> None:
        """Replace matrices by quantized blocks; `Blocks.put` sets their values later. `layouts`: name of each such matrix -> its layout.
        `form`: the quantization."""
        for name, layout in layouts.items():
            self.blocks[name] = Blocks.empty(form, tuple(getattr(self, name).shape), device), layout
            setattr(self, name, None)

    def _read(self) -> Network:
        """Return this rank's experts as a Network, with their adapters."""
        matrices: dict[str, Any] = {name: self.blocks[name][0] if name in self.blocks else getattr(self, name) for name in MATRICES}
        network = Network.of([*matrices.values(), self.b1, self.b3], self.activation)
        if not self.rank:
            return network
        pairs = {name: (getattr(self, f"{name}_a"), getattr(self, f"{name}_b")) for name, one in matrices.items() if one is not None}
        return replace(network, adapters=pairs)

    @property
    def _form(self) -> dict[str, Any]:
        """The arguments of `Experts` that are the same for these experts and for each of their tiles."""
        form = {"d_model": self.d_model, "d_ff": self.d_ff, "kernels": self.kernels_name, "products": self.products.name}
        return form | {"biases": self.biases} | self.activation._asdict()

    def _tile(self, units: slice, like: dict[str, Any]) -> Experts:
        first, count = self.hidden.start, len(self.held)
        with torch.device(like.get("device") or torch.get_default_device()):
            tile = Experts(count, **self._form, hidden=slice(first + units.start, first + units.stop))
        tile.held = self.held
        return tile.to(like.get("dtype"))

    def in_tiles(self, count: int) -> Experts:
        """Return the same experts as a sum of `count` tiles, each with a chunk of this rank's hidden units."""
        with torch.device("meta"):
            made = Experts(self.num_experts, **self._form, tiles=count, hidden=self.hidden)
        for i, tile in enumerate(made.tiles):
            take(tile, self, lambda name, i=i: Tile(HIDDEN_DIM[name], i, count))  # type: ignore[misc]
        return made

    def _network(self, part: ExpertChunk) -> Network:
        if isinstance(part, Network):
            return part
        held = self._read()
        return held if part is None else Network.of([None if t is None else t[part] for t in held.tensors], held.activation)

    def chunks(self, count: int) -> list[ExpertChunk]:
        """Cut this rank's experts into `count` equal chunks. A chunk is a Network with views of the matrices; if hidden units are cut
        into tiles (`num_tiles`), it is a range of experts instead. If `count` is 1, the only chunk is None: all experts."""
        if count == 1:
            return [None]
        each = len(self.held) // count
        if self.num_tiles > 1:  # under FSDP and ZeRO-3, a tile's weights exist only in its forward pass, so there is nothing to view here
            return [slice(i * each, (i + 1) * each) for i in range(count)]
        return [*self._read().split(each)]

    @in_region("experts")
    def forward(self, x: Tensor, *, counts: Counts | Routed, dropped_RF: Tensor | None = None, weights: ExpertChunk = None) -> Tensor:
        """Apply this rank's experts, or the chunk `weights`, to rows [R, D] sorted by expert; counts[e] rows are for expert e. The result
        has the shape and dtype of x. If `counts` is Routed, x is tokens [T, D], and the result sums gate * expert(x) over each token's kept
        choices. `dropped_RF`: factors of dropout for the hidden units.
        """
        if self.num_tiles > 1:

            def one_tile(tile: Experts, x: Tensor) -> Tensor:
                units = slice(tile.hidden.start - self.hidden.start, tile.hidden.stop - self.hidden.start)
                out: Tensor = tile(x, counts=counts, dropped_RF=None if dropped_RF is None else dropped_RF[:, units], weights=weights)
                return out

            return summed(self.tiles, x, one_tile)
        network, kernels = self._network(weights), self.kernels
        if network.adapters or self.blocks:
            # On a CPU, the first 16-bit product of each new shape is slow (moe/kernels/grouped.py). So pad to multiples of 32 rows.
            new_shapes_are_slow = x.dtype.itemsize == 2 and x.device.type == "cpu"
            kernels = ByProduct(kernels, partial(_with_adapters, network, self.scale), unit=32 if new_shapes_are_slow else 1)
        if isinstance(counts, Routed):
            out: Tensor = kernels.routed_ffn(x, counts.gate_TK, counts.plan, network, dropped_RF=dropped_RF)
        else:
            out = kernels.grouped_ffn(x, network, counts=counts, dropped_RF=dropped_RF)
        return out
