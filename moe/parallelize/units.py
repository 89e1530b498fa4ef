"""Facts about the model that engines need: the parameters that are gathered together, and the parameters that are read in fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from typing import TYPE_CHECKING

from torch import nn

from moe.model.transformer import Transformer
from parallel.data.tiling import tiles_of
from parallel.tensor.style import fits

if TYPE_CHECKING:
    from parallel.data.fsdp import Unit

# patterns of the paths of modules whose parameters are gathered together; each tile is gathered by itself
UNITS = ("embedding", "layers.*", "layers.*.moe", "layers.*.moe.shared", "layers.*.moe.residual", "ahead.*", "head")

# patterns of the paths of parameters that the model never casts to its compute dtype; all of them are small
READ_IN_FP32 = (
    "**norm.weight",
    "**.attention.bias.weight",
    "**.attention.sinks.weight",
    "layers.*.moe.router.**",
    "layers.*.moe.shared_gate.weight",
    "layers.*.moe.coefficient.weight",
    "layers.*.moe.output_bias",
    "**.lora_a",
    "**.lora_b",
    "layers.*.moe.experts.w*_*",
)


def units_of(model: Transformer, ranks_of: Callable[[str], tuple[int, ...]] = lambda name: ()) -> list[Unit]:
    """Return the units that FSDP gathers, in forward order: embedding, blocks, the experts and other networks in a block, head.

    Each tile is a unit, and so are parameters that are sharded over other ranks than the rest of their unit (`ranks_of` a parameter).
    Units are gathered in the compute dtype, except the embedding, whose gradient sums over tokens in fp32. Parameters that the model
    reads in fp32 are in no unit.
    """
    from parallel.data.fsdp import Unit

    tiles = {id(tile) for tile in tiles_of(model)}
    paths = [path for path, module in model.named_modules() if id(module) in tiles or any(fits(unit, path) for unit in UNITS)]
    owned: dict[str, list[str]] = {path: [] for path in sorted(paths, key=lambda path: not path.startswith("embedding"))}
    small = read_in_fp32(model)
    for name, _ in model.named_parameters():
        inside = [path for path in paths if name.startswith(f"{path}.")]
        if inside and name not in small:
            owned[max(inside, key=len)].append(name)
    narrow = model.compute.itemsize < next(model.parameters()).dtype.itemsize
    units = []
    for path, names in _of_equal_ranks(owned, ranks_of):
        table, tile = path.startswith("embedding"), id(model.get_submodule(path)) in tiles
        tied = table and model.config.tied_embeddings
        dtype = model.compute if narrow and not table else None
        units.append(Unit(path, tuple(names), dtype, backward=tied or not table, ahead=not (tile or tied)))
    return [unit for unit in units if unit.parameters]


def _of_equal_ranks(owned: Mapping[str, list[str]], ranks_of: Callable[[str], tuple[int, ...]]) -> Iterator[tuple[str, list[str]]]:
    """Yield (path, parameters) of each unit, without parameters that are sharded over other ranks than the unit's first one.

    After each unit, yield (path, parameters) of the layers that have such other parameters.
    """
    for path, names in owned.items():
        apart = [name for name in names if ranks_of(name) != ranks_of(names[0])]
        yield path, [name for name in names if name not in apart]
        yield from ((layer, list(those)) for layer, those in groupby(apart, key=lambda name: name.rsplit(".", 2)[0]))


def read_in_fp32(model: nn.Module) -> set[str]:
    """Return the names of the parameters that READ_IN_FP32 matches."""
    return {name for name, _ in model.named_parameters() if any(fits(pattern, name) for pattern in READ_IN_FP32)}
