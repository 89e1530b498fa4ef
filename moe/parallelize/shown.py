"""`moe show RECIPE --plan`: a table of one rank's parameters, with the rule by which each is sharded (its style), and the rank's shard."""

from __future__ import annotations

import math
import re
from typing import Any

from moe.parallelize.build import laid_out
from moe.recipe.sections import Run
from moe.records.results import write_json
from parallel.mesh.mesh import Mesh
from parallel.numerics.precision import DTYPES


def plan_rows(run: Run, *, rank: int) -> list[dict[str, Any]]:
    """Return a dict for each parameter on `rank`. cut: sharded dim -> axes that shard it. tile: such as "1 of 4", None if there are no
    tiles. whole, here: shapes of the parameter and of the rank's shard. copies: axes over which the shard is replicated. summed_over: axes
    over which its gradient is summed. bytes: size of the shard before ZeRO or FSDP."""
    mesh = Mesh.of(run.mesh_degrees(), rank)
    model, plan, layouts = laid_out(run, mesh)
    size = DTYPES[run.precision.master].itemsize
    rows = []
    for name, parameter in model.named_parameters():
        layout, shape = layouts[name], list(parameter.shape)
        cut = {str(dim): list(layout.cut_by(dim)) for dim in layout.split if any(mesh.axis(axis).size > 1 for axis in layout.cut_by(dim))}
        tile = None if layout.tile is None else f"{layout.tile.index + 1} of {layout.tile.count}"
        row = {"parameter": name, "style": type(plan.style_of(name)).__name__, "cut": cut, "tile": tile, "whole": list(layout.shape)}
        copies = [axis for axis in layout.copies() if mesh.axis(axis).size > 1]
        summed = [axis for axis in layout.summed_over() if mesh.axis(axis).size > 1]
        rows.append(row | {"here": shape, "copies": copies, "summed_over": summed, "bytes": math.prod(shape) * size})
    return rows


def table(rows: list[dict[str, Any]], *, rank: int, world: int) -> list[str]:
    """Return lines to print. Parameters that differ only in the index of their layer or tile share one line."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for row in rows:
        where = re.sub(r"\.(\d+)(?=\.)", ".*", row["parameter"])
        cut = ", ".join(f"dim {dim} over {' '.join(axes)}" for dim, axes in row["cut"].items())
        style, copies = f"{row['style']} {cut}".rstrip(), " ".join(row["copies"])
        alike.setdefault((where, style, _sizes(row["whole"]), _sizes(row["here"]), copies), []).append(row["bytes"])
    lines: list[tuple[str, ...]] = [("parameter", "style", "whole", "here", "copies over", "", "bytes")]
    lines += [(*key, f"{len(held)} x" if len(held) > 1 else "", f"{sum(held):,}") for key, held in alike.items()]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    total = f"rank {rank} of {world} holds {sum(row['bytes'] for row in rows):,} bytes of weights, before ZeRO or FSDP shards them"
    return ["  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip() for line in lines] + [total]


def _sizes(shape: list[int]) -> str:
    return " x ".join(map(str, shape))


def main(run: Run, *, world: int, rank: int, json: str | None, recipe: str) -> None:
    rows = plan_rows(run, rank=rank)
    print(*table(rows, rank=rank, world=world), sep="\n")
    if json is not None:
        write_json(json, verb="show", rows=rows, recipe=recipe, rank=rank, world=world)
