"""`moe hash-table RECIPE FILE.json`: counts the token ids in the recipe's training text, and writes a table for `router.select: hash` that
gives all experts about equally many of these tokens (moe/recipe/hash_table.py).
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt

from moe.checks.together import check_together
from moe.cli.verbs import HashTable
from moe.data import CorruptedTrain, MixedTrain, TrainSet, open_data
from moe.data.order import Windows
from moe.data.remarks import remark_lines
from moe.launch import exit_codes
from moe.recipe.hash_table import Table, balanced
from moe.recipe.load import load
from parallel.errors import BadInput, counted
from parallel.fixes import Set
from parallel.store.files import user_path, write_text

_BATCH_TOKENS = 2**24  # number of tokens in each call of bincount
_MIXTURE_TOKENS = 2**40  # sum of all counts of a mixture, after each source's counts are scaled to its weight


def main(flags: HashTable, overrides: dict[str, str]) -> int:
    """Write the table, and print the smallest and largest share of tokens that an expert gets. Raises BadInput for wrong input,
    before anything is written."""
    run, _ = load(flags.recipe, overrides)
    path = user_path(flags.out, what="OUT")
    if path.suffix != ".json" or path.exists():
        got = f"{path}, which already exists" if path.exists() else str(path)
        raise BadInput("OUT", got=got, needed="a new file, *.json", fix=f"name another: {path.with_name(path.stem + '-new.json')}")
    # router.hash_table is removed before the checks: it may name the file that is to be written, which does not exist yet
    run = run.model_copy(update={"router": run.router.model_copy(update={"hash_table": None})})
    check_together(run.resolve(1))
    layers, choices = run.model.layers_with_experts(), run.router.num_choices
    if not layers:
        raise BadInput("RECIPE", got=f"{flags.recipe}, a dense model", needed="a recipe with experts", fix=Set("model.moe_every", 2))
    if run.data.is_own or run.data.source == "chat":
        needed = "a text or token ids, which can be counted before a run"
        raise BadInput("data.source", got=run.data.source, needed=needed, fix="write a table yourself: docs/moe/routing.md")
    data = open_data(run.data, max_length=run.model.max_length, vocab_size=run.vocab_size, seed=run.train.seed)
    for line in remark_lines(data.index):
        print(line)
    counts_V = counts(data.train, run.vocab_size)
    made = {count: balanced(counts_V.tolist(), count, choices) for count in dict.fromkeys(run.experts.counts)}
    table: Table = made[run.experts.counts[0]]
    if len(made) > 1:
        table = {str(layer): made[run.experts.of_layer(nth)] for nth, layer in enumerate(layers)}
    write_text(path, json.dumps(table) + "\n", what="OUT")
    for count, rows in made.items():
        load_E = np.bincount(np.array(rows).reshape(len(rows), -1).ravel(), np.repeat(counts_V, choices), minlength=count)
        share_E = load_E / max(1, load_E.sum())
        print(f"{counted(count, 'expert')}: {share_E.min():.2%} to {share_E.max():.2%} of the choices each (even: {1 / count:.2%})")
    print(f"table: {path}, {run.vocab_size} ids; train with: --router.select hash --router.hash_table {path} --router.balance_weight 0")
    return exit_codes.DONE


def counts(train: Any, vocab_size: int) -> npt.NDArray[np.int64]:
    """Return the number of occurrences of each token id in the training text, int64 [vocab_size]. In a mixture, each source's counts are
    scaled to its weight."""
    if isinstance(train, CorruptedTrain):
        return counts(train.inner, vocab_size)
    if isinstance(train, MixedTrain):
        parts = [(weight / sum(train.weights), counts(part, vocab_size)) for weight, part in zip(train.weights, train.parts, strict=True)]
        mixed: npt.NDArray[np.int64] = sum(share * _MIXTURE_TOKENS * part / part.sum() for share, part in parts).astype(np.int64)
        return mixed
    assert isinstance(train, TrainSet) and isinstance(train.windows, Windows)  # other kinds of data were refused before
    tokens, found = train.windows.tokens, np.zeros(vocab_size, np.int64)
    for first in range(0, len(tokens), _BATCH_TOKENS):
        found += np.bincount(tokens[first : first + _BATCH_TOKENS].astype(np.int64), minlength=vocab_size)
    return found
