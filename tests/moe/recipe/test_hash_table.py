"""router.hash_table: its file, the balanced table, training steps equal to the reference, and the table's copy in checkpoints, with which
resuming, conversion and generation route tokens as in training.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from moe.checks.advice import check_for_user
from moe.cli import main as cli
from moe.convert.checks import Settings
from moe.convert.convert import convert, find
from moe.model.transformer import Transformer, moe_layers
from moe.nn.context import Context
from moe.recipe.hash_table import balanced, check, read, same
from moe.recipe.load import build_run
from moe.recipe.sections import Run
from moe.train.start.restore import restore
from moe.verify.cases import Case
from moe.verify.expected import compare
from moe.verify.layouts import compute, run_world
from moe.verify.twin import reference
from parallel.errors import BadInput
from parallel.store.stored import Reader
from tests.support import trained

HASH: dict[str, Any] = {"select": "hash", "balance_weight": 0.0}


def table_of(num_experts: int, seed: int, choices: int = 1) -> list[Any]:
    rows = [torch.randperm(num_experts, generator=torch.Generator().manual_seed(seed + token))[:choices].tolist() for token in range(256)]
    return [row[0] for row in rows] if choices == 1 else rows


def written(path: Path, table: Any) -> str:
    path.write_text(json.dumps(table))
    return str(path)


# --- the file ---------------------------------------------------------------------------------------------------------------


def test_the_balanced_table_gives_the_rarest_ids_to_the_emptiest_experts() -> None:
    counts = [0, 7, 3, 2, 0, 2, 0]
    table = balanced(counts, 2, 1)
    assert [sum(n for n, e in zip(counts, table, strict=True) if e == expert) for expert in (0, 1)] == [7, 7]
    assert max(Counter(table).values()) <= 4  # ids that never occur are also spread over the experts
    pairs = balanced([5, 4, 3, 2, 1, 1], 4, 2)
    assert pairs[:2] == [[0, 1], [2, 3]] and all(len(set(pair)) == 2 for pair in pairs)
    counts = [10_000 // (rank + 1) for rank in range(500)]
    load: Counter[int] = Counter()
    for n, expert in zip(counts, balanced(counts, 4, 1), strict=True):
        load[expert] += n
    assert max(load.values()) - min(load.values()) <= 20  # occurrences of the rarest id


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ([0] * 255, "router.hash_table: got 255 ids in .*, needed one entry for each of the vocabulary's 256 ids; fix: .*moe hash-table"),
        ([4] + [0] * 255, "got 4 for id 0 in .*, needed an expert from 0 to 3"),
        ([0] * 255 + [-1], "got -1 for id 255"),
        ([0.5] + [0] * 255, "got 0.5 for id 0"),
        ([True] + [0] * 255, "got true for id 0"),
        ([[1, 2]] + [0] * 255, r"got \[1, 2\] for id 0"),
        ({"0": [0] * 256}, 'got layers 0 in .*, needed one list, or {"LAYER": list} for layers 1'),
        ("text", "got a str in"),
    ],
)
def test_what_is_no_table_of_the_recipe_is_one_line(table: Any, said: str, tmp_path: Path) -> None:
    name = written(tmp_path / "t.json", table)
    run = build_run({"model": {"num_layers": 2, "moe_every": 2}, "experts": {"num_experts": 4}, "router": HASH | {"hash_table": name}})
    with pytest.raises(BadInput, match=said) as refused:
        check_for_user(run, 1)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_there_is_refused_where_it_is_read_and_a_table_that_nothing_reads(tmp_path: Path) -> None:
    values: dict[str, Any] = {"model": {"moe_every": 2}, "router": HASH | {"hash_table": str(tmp_path / "no.json")}}
    check_for_user(build_run(values), 1)  # a missing file is accepted here, because a resumed run has the table in its checkpoint
    with pytest.raises(BadInput, match="router.hash_table: got .*no.json: No such file"):
        read(build_run(values))
    with pytest.raises(BadInput, match="router.hash_table: got .* with select top_k, needed null: only hash reads a table"):
        check_for_user(build_run(values | {"router": {"hash_table": "t.json"}}), 1)
    model = Transformer(build_run(values).model, router=build_run(values).router)
    with pytest.raises(BadInput, match="router.hash_table: got a router without the table"):
        model(torch.zeros(1, 3, dtype=torch.long))


def test_tables_are_the_same_however_they_are_written() -> None:
    table = table_of(4, 0)
    assert same(table, [[expert] for expert in table]) and same({"1": table, "3": table}, table) and not same(table, table_of(4, 1))


# --- routing ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Given(Case):
    """A case of `moe verify` whose routers have a table."""

    table: str = ""
    choices: int = 1

    def run(self) -> Run:
        router = {"preset": "switch", "capacity_factor": 1.0, "min_capacity": 1, "num_choices": self.choices, "hash_table": self.table}
        return build_run(super().run().model_dump(mode="json") | {"router": HASH | router})


@pytest.mark.usefixtures("three_steps")
def test_three_steps_are_the_plain_twins(tmp_path: Path) -> None:
    """Three training steps with a table equal the reference: with two choices on one process, and with a table for each layer on two ranks
    (expert, sequence and pipeline parallelism)."""
    pairs = written(tmp_path / "pairs.json", table_of(4, 0, choices=2))
    case = Given("switch", "ddp", 1, 1, 1, "fp32", table=pairs, choices=2)
    assert max(compare(compute(case), reference(case)).values()) < 1e-5
    other = written(tmp_path / "other.json", {"1": table_of(4, 1), "3": table_of(4, 2)})
    cases: list[Case] = [
        Given("switch", "fsdp", 2, 2, 3, "fp32", "full", layers=4, table=other),
        Given("switch", "zero3", 2, 2, 1, "fp32", layers=4, table=other),
        Given("switch", "ddp", 2, 1, 1, "fp32", layers=4, table=other, sp=2, attention="contiguous"),
        Given("switch", "ddp", 2, 1, 4, "fp32", layers=4, table=other, pp=2, schedule="zb_h1"),
    ]
    want = reference(Given("switch", "ddp", 1, 1, 1, "fp32", layers=4, table=other))
    for made, ran in run_world(cases, 2):
        assert not isinstance(ran, str), (made.layout, ran)
        assert max(compare(ran[0], want).values()) < 1e-5, made.layout


# --- a run ------------------------------------------------------------------------------------------------------------------


def experts_of(model: Transformer, tokens_BL: torch.Tensor) -> list[list[int]]:
    """Return for each MoE layer the expert of each token."""
    x_TD = torch.zeros(tokens_BL.numel(), model.config.d_model)
    made = [m.router(x_TD, sequence_tokens=tokens_BL.shape[1], context=Context.of(tokens_BL)) for m in moe_layers(model)]
    return [routing.expert_TK.flatten().tolist() for routing in made]


def test_the_table_travels_with_the_checkpoint_and_another_is_refused(home: Path, tmp_path: Path) -> None:
    table = table_of(4, 0)
    file = tmp_path / "t.json"
    run = trained.recipe(home, router=HASH | {"hash_table": written(file, table)}, train={"steps": 2, "save_every": 0})
    assert isinstance(trained.train(run, tmp_path / "run")[0], dict)
    assert json.loads((tmp_path / "run/hash_table.json").read_text()) == table
    file.unlink()
    tokens_BL = torch.arange(24).view(2, 12) * 10
    want = [[table[token] for token in tokens_BL.flatten().tolist()]]
    assert experts_of(restore(find(tmp_path / "run")), tokens_BL) == want
    longer = run.model_copy(update={"train": run.train.model_copy(update={"steps": 3})})
    written(file, table_of(4, 1))
    said = trained.train(longer, tmp_path / "run")[0]
    assert "router.hash_table: got another table in" in said and "needed the table with which step-2 was trained" in said
    for out, options in ((tmp_path / "run", {}), (tmp_path / "new", {"init_from": tmp_path / "run"})):
        file.unlink(missing_ok=True)
        assert isinstance(trained.train(longer, out, **options)[0], dict)  # type: ignore[arg-type]
        assert experts_of(restore(find(out)), tokens_BL) == want
        written(file, table_of(4, 1))
        assert "another table" in str(trained.train(longer, out)[0])
    again = longer.model_copy(update={"train": run.train.model_copy(update={"steps": 4})})
    assert isinstance(trained.train(again, tmp_path / "run", allow_changes=["router.hash_table"])[0], dict)
    assert same(Reader(find(tmp_path / "run")).state["hash_table"], table_of(4, 1))


def test_a_conversion_has_a_table_for_its_own_experts(home: Path, tmp_path: Path) -> None:
    file = written(tmp_path / "t.json", table_of(4, 0))
    run = trained.recipe(home, router=HASH | {"hash_table": file}, train={"steps": 1, "save_every": 0})
    trained.train(run, tmp_path / "run")
    fewer = trained.recipe(home, router=HASH | {"hash_table": str(tmp_path / "no.json")}, experts={"num_experts": 2})
    with pytest.raises(BadInput, match="router.hash_table: got [23] for id [0-9]+ in the checkpoint, needed an expert from 0 to 1"):
        convert(fewer, find(tmp_path / "run"), Settings(method="merge"))
    written(tmp_path / "no.json", table_of(2, 5))
    _, conversion, _ = convert(fewer, find(tmp_path / "run"), Settings(method="merge"))
    assert conversion.table == table_of(2, 5)


def test_the_verb_makes_the_balanced_table_of_the_text(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["hash-table", "switch_tiny", str(tmp_path / "t.json"), "--data.path", str(home / "text.txt"), "--model.max_length", "12"]
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    assert "8 experts: " in said and "--router.select hash --router.hash_table" in said
    run = build_run({"model": {"moe_every": 2}, "router": HASH | {"hash_table": str(tmp_path / "t.json")}})
    table = read(run)
    assert isinstance(table, list)
    check(table, run, where="it")
    text = (home / "text.txt").read_bytes()[: int(0.9 * 3000 * 5)]  # about the training text, with the same order of letters by frequency
    load: Counter[int] = Counter()
    for byte in text:
        load[table[byte]] += 1
    assert len(load) == 8 and len({table[byte] for byte in b"abcdefgh"}) >= 7  # the text has these letters and the space
    assert cli.main(words) == 2 and "OUT: got" in capsys.readouterr().err
    assert cli.main(["hash-table", "dense_tiny", str(tmp_path / "d.json")]) == 2
