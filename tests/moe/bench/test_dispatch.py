"""`moe bench dispatch` with tiny sizes: all layers give the same output, table rows have their keys, unknown names are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moe.bench.layers import dispatch
from moe.bench.layers.layers import LayerCase, Shape, router_settings
from moe.bench.timing import in_turn, peak_bytes, ratio
from moe.bench.training import memory
from moe.bench.training.sharded import kind_of
from moe.recipe.presets import PRESETS
from parallel.errors import BadInput

SHAPES = (Shape(96, 24, 40, 8, 1), Shape(64, 32, 16, 16, 4))


def cases() -> list[LayerCase]:
    return [
        LayerCase(shape, dtype, routing)
        for shape in SHAPES
        for dtype in (torch.float32, torch.bfloat16)
        for routing in ("balanced", "skewed")
    ]


@pytest.mark.parametrize("case", cases(), ids=str)
def test_the_router_chooses_the_experts_for_which_inputs_were_made(case: LayerCase) -> None:
    """Balanced: all experts get equally many rows. Skewed: one expert gets half of all rows, but at most one of each token."""
    s = case.shape
    chosen_TK = (case.inputs().float() @ case.router().t()).topk(s.k).indices
    assert torch.equal(chosen_TK.sort(1).values, case.experts_of_tokens().sort(1).values)
    load_E = torch.bincount(chosen_TK.flatten(), minlength=s.experts)
    assert load_E.max() == (s.rows // s.experts if case.routing == "balanced" else min(s.tokens, s.rows // 2))


SETUP = """
import sys
from moe.bench.layers import dispatch, layers
from moe.bench.layers.layers import LayerCase, Shape
dispatch.SHAPES = dict.fromkeys(("cpu", "cuda"), (Shape(96, 24, 40, 8, 1), Shape(64, 32, 16, 16, 4)))
dispatch.GROWTH = {"tokens x2": (Shape(32, 8, 8, 4, 1), Shape(64, 8, 8, 4, 1))}
"""


TWICE = """
right = dispatch.main(peers="all", rounds=1, json=sys.argv[1])
print("a wrong peer")
dispatch.PEERS = {"relu": {"grouped_mm": lambda c: layers.ours(LayerCase(c.shape, c.dtype, "skewed"), "relu")}, "swiglu": {}}
sys.exit(10 * right + dispatch.main(peers="grouped_mm", only="E8 k1 fp32 balanced", rounds=1))
"""


@pytest.mark.long
def test_every_layer_gives_the_same_output_and_a_peer_that_computes_something_else_fails(tmp_path: Path) -> None:
    """In a new process, because peers start process groups and threads, which ranks forked by other tests would inherit."""
    words = [sys.executable, "-c", SETUP + TWICE, str(tmp_path / "rows.json")]
    got = subprocess.run(words, capture_output=True, text=True, timeout=180)
    right, _, wrong = got.stdout.partition("a wrong peer")
    assert got.returncode == 1 and "RESULT DIFFERS" not in right and "RESULT DIFFERS" in wrong, got.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    judged = [row for row in rows if "passed" in row]
    assert len(judged) > 20 and all(row["passed"] for row in judged)
    for row in (row for row in rows if row["kind"] == "ours"):
        assert row["seconds"] > 0 and row["over_limit"] > 0 and row["peak_bytes"] > 0
        assert set(row["over_peers"]) == set(row["over_peers_bytes"]) > set()
    assert [row["what"] for row in rows if row["kind"] == "growth"] == ["tokens x2"]


def test_unknown_names_are_refused() -> None:
    with pytest.raises(BadInput, match="--peers: got deepsped, needed all, none, or some of deepspeed.*did you mean deepspeed?"):
        dispatch.main(peers="deepsped")
    with pytest.raises(BadInput, match="--only: got E9, needed part of a row's text"):
        dispatch.main(only="E9")


def test_ratios_are_taken_within_a_round() -> None:
    assert ratio([2.0, 30.0, 8.0], [1.0, 10.0, 2.0]) == 3.0
    ran: list[str] = []
    seconds = in_turn({"a": lambda: ran.append("a"), "b": lambda: ran.append("b")}, rounds=2, device=torch.device("cpu"), warmups=1)
    assert ran == ["a", "b", "a", "b", "b", "a"] and {len(s) for s in seconds.values()} == {2}


def test_peak_memory_counts_what_was_held_at_once() -> None:
    def work() -> None:
        for _ in range(3):
            torch.empty(1000, 1000)  # freed before the next tensor is made

    assert 4_000_000 <= peak_bytes(work, torch.device("cpu")) < 5_000_000


def test_kernels_layer_and_bench_need_no_package_that_reads_recipes(tmp_path: Path) -> None:
    """A machine with a GPU may have no package but torch. The bench must run there, so these other packages are hidden."""
    without = "import sys; sys.modules.update(dict.fromkeys(['pydantic', 'tyro', 'deepspeed', 'transformers', 'yaml', 'psutil']))\n"
    code = without + SETUP + "sys.exit(dispatch.main(peers='all', only='E8 k1 fp32 balanced', rounds=1, json=sys.argv[1]))"
    got = subprocess.run([sys.executable, "-c", code, str(tmp_path / "rows.json")], capture_output=True, text=True, timeout=120)
    assert got.returncode == 0, got.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    absent = {row["implementation"] for row in rows if "not_run" in row}
    assert {"deepspeed", "transformers-switch"} <= absent and "grouped_mm" in {row["implementation"] for row in rows} - absent


@pytest.mark.parametrize(("k", "preset"), [(1, "switch"), (2, "glam"), (4, "mixtral")])
def test_the_layers_router_is_the_preset_without_a_capacity(k: int, preset: str) -> None:
    assert router_settings(k) == PRESETS[preset].model_dump() | {"num_choices": k, "capacity_factor": None}


def test_a_part_that_no_row_of_the_memory_table_has_is_refused() -> None:
    with pytest.raises(BadInput, match="--only: got x, needed dense or sparse; fix: leave it out"):
        memory.main(only="x")
    for flags, fix in (
        ({"kinds": "deepspeed1", "only": "sparse"}, "leave out --only"),
        ({"kinds": "zero2+cpu", "nproc": 3}, "use --nproc 2"),
        ({"kinds": "deepspeed1", "only": "sparse", "nproc": 1}, "use --nproc 2 without --only"),
    ):
        with pytest.raises(BadInput, match=f"^moe bench memory: got flags that leave no case, needed .*; fix: {fix}$"):
            memory.main(**flags)  # type: ignore[arg-type]


def test_memory_of_a_small_model_is_the_formula_without_a_constant_of_the_process() -> None:
    """Kernels that libraries compile (8 MB in bf16 with AMX, here 8 % of the states) count as the process's, not as the model's."""
    row = memory._run(kind_of("ddp"), memory.Shape(width=512, hidden=2048), 2)
    assert row["passed"] and abs(row["error"]) < 0.001, row
