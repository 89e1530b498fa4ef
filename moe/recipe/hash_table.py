"""The table of router.hash_table, for `router.select: hash`: the experts of each token id (Hash Layers, arXiv 2106.04426).

    [3, 0, 5, ...]                       JSON: one expert for each id
    [[3, 1], [0, 4], ...]                router.num_choices experts for each id
    {"1": [...], "3": [...]}             a separate table for each MoE layer, by the layer's number

A new run reads the table from its file. Every checkpoint has a copy, from which a resumed run reads it.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe.recipe.sections import Run
from parallel.errors import BadInput, counted, some
from parallel.store.files import read_text, user_path

STATE = "hash_table"  # key under which a checkpoint stores the table, and name of the table's copy in a run's folder
KEY = "router.hash_table"
_FIX = "make one for this recipe: moe hash-table RECIPE FILE.json"
Table = list[Any] | dict[str, list[Any]]  # one entry for each token id; in a dict, one such list for each MoE layer


def wanted(run: Run) -> str | None:
    """Return the path in router.hash_table; None without such a path or without MoE layers."""
    return run.router.hash_table if run.model.layers_with_experts() else None


def read(run: Run, *, or_none: bool = False) -> Table | None:
    """Return the table of the recipe's router.hash_table; None without that key, or, with `or_none`, if the table's file is
    missing. Raises BadInput for a table that cannot be read or is wrong."""
    name = wanted(run)
    if name is None:
        return None
    path = user_path(name, what=KEY)
    if or_none and not path.exists():
        return None
    try:
        table = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        said = getattr(error, "strerror", None) or str(error)
        needed, fix = "a JSON file of experts by token id", f"make one: moe hash-table RECIPE {Path(name).stem}.json"
        raise BadInput(KEY, got=f"{name}: {said}", needed=needed, fix=fix) from None
    check(table, run, where=name)
    return table  # type: ignore[no-any-return]


def of_layer(table: Table, layer: int) -> list[Any]:
    return table[str(layer)] if isinstance(table, dict) else table


def check(table: Any, run: Run, *, where: str) -> None:
    """Raise BadInput for the first mistake in a table, such as a token id or a MoE layer without an entry. where: the table's name."""
    layers = run.model.layers_with_experts()
    if not isinstance(table, list | dict) or (isinstance(table, dict) and table.keys() != {str(layer) for layer in layers}):
        got = f"layers {', '.join(map(str, table)) or 'none'}" if isinstance(table, dict) else f"a {type(table).__name__}"
        needed = f'one list, or {{"LAYER": list}} for layers {some(map(str, layers))}'
        raise BadInput(KEY, got=f"{got} in {where}", needed=needed, fix=_FIX)
    for nth, layer in enumerate(layers if isinstance(table, dict) else layers[:1]):
        here = run.experts.of_layer(nth) if isinstance(table, dict) else min(run.experts.counts)
        _check_one(of_layer(table, layer), run, here + run.experts.free, where=f"{where}, layer {layer}" if len(layers) > 1 else where)


def _check_one(rows: Any, run: Run, num_experts: int, *, where: str) -> None:
    choices = run.router.num_choices
    if not isinstance(rows, list) or len(rows) != run.vocab_size:
        got = counted(len(rows), "id") if isinstance(rows, list) else f"a {type(rows).__name__}"
        raise BadInput(KEY, got=f"{got} in {where}", needed=f"one entry for each of the vocabulary's {run.vocab_size} ids", fix=_FIX)
    for token, (row, experts) in enumerate(zip(rows, _rows(rows), strict=True)):
        if len(experts) != choices or any(type(e) is not int or not 0 <= e < num_experts for e in experts) or len(set(experts)) != choices:
            needed = f"{choices} different experts from 0 to {num_experts - 1}" if choices > 1 else f"an expert from 0 to {num_experts - 1}"
            raise BadInput(KEY, got=f"{json.dumps(row)[:60]} for id {token} in {where}", needed=needed, fix=_FIX)


def same(one: Table, other: Table) -> bool:
    """Return whether two tables have the same experts for every token id in every layer, even if they are written differently."""
    layers = {*(one if isinstance(one, dict) else ()), *(other if isinstance(other, dict) else ())} or {"0"}
    return all(_rows(of_layer(one, int(layer))) == _rows(of_layer(other, int(layer))) for layer in layers)


def _rows(table: Sequence[Any]) -> list[list[int]]:
    return [row if isinstance(row, list) else [row] for row in table]


def balanced(counts: Sequence[int], num_experts: int, num_choices: int) -> list[Any]:
    """Return the paper's balanced table, which gives all experts about equally many tokens. counts: occurrences of each token id.
    Ids are assigned from the most frequent to the rarest, each to the experts with the fewest tokens so far; among equals, with the fewest
    ids."""
    heap, table = [(0, 0, expert) for expert in range(num_experts)], [[0]] * len(counts)  # heap: (tokens so far, ids so far, expert)
    for token in sorted(range(len(counts)), key=lambda token: (-counts[token], token)):
        emptiest = [heapq.heappop(heap) for _ in range(num_choices)]
        table[token] = [expert for _, _, expert in emptiest]
        for tokens, ids, expert in emptiest:
            heapq.heappush(heap, (tokens + int(counts[token]), ids + 1, expert))
    return [row[0] for row in table] if num_choices == 1 else table
