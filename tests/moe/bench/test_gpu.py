"""`python -m moe.bench.gpu`, whole, at its tiny sizes: Triton's interpreter runs the kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe.bench.gpu import __main__ as gpu
from moe.bench.gpu.part import Machine, Part, Row, each
from moe.bench.layers.layers import Shape
from moe.records.results import hardware, source_commit

pytest.importorskip("triton", reason="Triton's package is not installed; it has none for this system", exc_type=ImportError)

NAMES = ["machine", "right", "kernels", "steps", "losses", "layers"]
HIDDEN = ("pydantic", "pydantic_core", "tyro", "deepspeed", "transformers", "yaml", "psutil", "safetensors")
HIDE = f"import sys, runpy; sys.modules.update(dict.fromkeys({HIDDEN}));"


def run(words: list[str], before: str = "import runpy, sys, tests.support.interpreted;") -> subprocess.CompletedProcess[str]:
    code = f"{before} sys.argv = ['gpu', *{words}]; runpy.run_module('moe.bench.gpu', run_name='__main__')"
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, env=environment)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    file = tmp_path_factory.mktemp("gpu") / "hour.json"
    got = run(["--json", str(file)])
    assert got.returncode == 0, got.stdout + got.stderr
    return file, got.stdout


@pytest.mark.long
def test_every_part_runs_and_is_on_the_page(whole: tuple[Path, str]) -> None:
    file, page = whole
    done = json.loads(file.read_text())
    assert done["device"] == hardware(torch.device("cpu")) and list(done["parts"]) == NAMES
    assert all(f"## {name}" in page for name in NAMES) and not any(word in page for word in ("WRONG", "FAILED", "RESULT DIFFERS"))
    rows: dict[str, list[Row]] = {name: part["rows"] for name, part in done["parts"].items()}
    assert {row["ceiling"] for row in rows["machine"][1:]} == {"copy", "bfloat16", "float16", "float32"}
    assert {row["dtype"] for row in rows["right"] if "error" in row} == {"float32", "bfloat16", "float16"}
    assert [row["kernel"] for row in rows["kernels"]] == ["up", "product", "back", "weights", "all four", "persistent product"]
    assert all(0 < row["share"] < 1 and row["seconds"] > 0 for row in rows["kernels"] if row["kernel"] != "all four")
    assert {row["kernels"] for row in rows["right"] if "error" in row} == {"triton", "triton_persistent"}
    (step,) = rows["steps"]
    assert step["tokens_per_s"] == pytest.approx(32 / step["seconds"]) and step["mfu"] > 0 and step["kernels"]
    assert [len(row["losses"]) for row in rows["losses"]] == [10, 10] and all(row["same_twice"] for row in rows["losses"])
    assert {row["implementation"] for row in rows["layers"]} >= {"limit swiglu", "ours swiglu", "ours-grouped_mm"}


@pytest.mark.long
def test_it_goes_on_from_its_file(whole: tuple[Path, str], tmp_path: Path) -> None:
    """A part that the file has is not measured again; a file is never replaced without --resume, nor continued on another device."""
    done = json.loads(whole[0].read_text())
    for part in done["parts"].values():
        part["seconds"] = -1.0
    kept = tmp_path / "kept.json"
    kept.write_text(json.dumps(done))
    assert gpu.main(["--json", str(kept), "--resume"]) == 0 and json.loads(kept.read_text()) == done
    assert gpu.main(["--json", str(kept)]) == 2 and json.loads(kept.read_text()) == done
    kept.write_text(json.dumps(done | {"device": "NVIDIA H100"}))
    assert gpu.main(["--json", str(kept), "--resume"]) == 2


def test_it_needs_torch_triton_numpy_and_einops_only(tmp_path: Path) -> None:
    """Without the packages that read recipes, the parts that train are left out with the reason, and no other part is."""
    parts = "from moe.bench.gpu import ceilings, layer, right; layer.race_rows = layer.kernel_rows = right.rows = lambda *_: [];"
    got = run(["--json", str(tmp_path / "hour.json")], f"{HIDE} {parts}")
    assert got.returncode == 0, got.stderr
    found = json.loads((tmp_path / "hour.json").read_text())["parts"]
    assert {name: part.get("left_out") for name, part in found.items()} == dict.fromkeys(NAMES) | {
        "steps": "needs pydantic, yaml",
        "losses": "needs pydantic, yaml",
    }


def test_containers_that_allow_tf32_change_no_result_and_memory_is_allocated_as_by_ranks(tmp_path: Path) -> None:
    from moe.launch.environment import BEFORE_TORCH

    assert gpu.ALLOCATOR.items() <= BEFORE_TORCH.items()
    code = (
        "import os; os.environ.pop('PYTORCH_ALLOC_CONF', None); os.environ['TORCH_ALLOW_TF32_CUBLAS_OVERRIDE'] = '1';"
        "from moe.bench.gpu import __main__ as gpu; gpu.parts = list; gpu.main(['--json', 'x.json']); import torch;"
        "print(torch.get_float32_matmul_precision(), os.environ['PYTORCH_ALLOC_CONF'])"
    )
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(Path(__file__).parents[3])}
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert got.stdout.splitlines()[-1] == "highest expandable_segments:True", got.stderr


def test_a_part_that_takes_too_long_or_failed_in_part_is_run_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[str] = []

    def endless(*_: object) -> list[dict[str, object]]:
        calls.append("a")
        return each({"w": lambda: [{}], "x": lambda: time.sleep(30) or [{}], "y": lambda: [{}]})  # type: ignore[func-returns-value]

    def broken(*_: object) -> list[dict[str, object]]:
        calls.append("b")
        return each({"x": lambda: [{}], "y": lambda: [][0]})

    monkeypatch.setattr(gpu, "LIMIT_S", 1)
    monkeypatch.setattr(gpu, "parts", lambda: [Part("a", 1, endless, list), Part("b", 1, broken, list), Part("c", 1, lambda *_: [], list)])
    for words in ([], ["--resume"]):
        assert gpu.main(["--json", str(tmp_path / "x.json"), *words]) == 1
        parts = json.loads((tmp_path / "x.json").read_text())["parts"]
        assert parts["a"]["rows"][1]["failed"] == "TooLong: more than 1 s"  # the rows before are kept, and none follows
        assert ["failed" in row for part in "ab" for row in parts[part]["rows"]] == [False, True, False, True]
        assert parts["c"]["rows"] == []
    assert calls == ["a", "b"] * 2


def test_parts_of_another_commit_than_the_files_say_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu, "parts", lambda: [Part("a", 1, lambda *_: [], list), Part("b", 1, lambda *_: [], list)])
    (file := tmp_path / "x.json").write_text(
        json.dumps({"commit": "older", "device": hardware(torch.device("cpu")), "parts": {"a": {"rows": []}}})
    )
    assert gpu.main(["--json", str(file), "--resume"]) == 0
    done = json.loads(file.read_text())
    assert done["commit"] == "older" and "commit" not in done["parts"]["a"] and done["parts"]["b"]["commit"] == source_commit()
    file.write_text(json.dumps(done | {"parts": []}))
    assert gpu.main(["--json", str(file), "--resume"]) == 2  # one line instead of a traceback


@pytest.mark.parametrize("code", [0, 9])
def test_the_sanitizer_sees_each_tensor_in_memory_of_its_own(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from moe.bench.gpu import right

    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/compute-sanitizer")
    started: list[list[str]] = []
    monkeypatch.setattr("subprocess.Popen", lambda words, **_: started.append(words) or SimpleNamespace(wait=lambda _: code))
    (row,) = right._sanitizer(Machine(torch.device("cuda")))
    program = started[0][-1]
    assert row["passed"] == (code == 0) and program.index("PYTORCH_NO_CUDA_MEMORY_CACHING") < program.index("from moe")


def fails(error: Exception) -> Callable[[Machine, dict[str, list[Row]]], list[Row]]:
    def rows(machine: Machine, before: dict[str, list[Row]]) -> list[Row]:
        raise error

    return rows


def test_a_part_that_fails_is_said_and_the_next_one_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def measured(machine: Machine, before: dict[str, list[Row]]) -> list[Row]:
        assert before == {}
        return [{"passed": True}]

    two = [Part("bad", 1, fails(torch.OutOfMemoryError("no\nmore")), list), Part("good", 1, measured, lambda rows: [f"{len(rows)} row"])]
    monkeypatch.setattr(gpu, "parts", lambda: two)
    assert gpu.main(["--json", str(tmp_path / "x.json")]) == 1
    done: dict[str, Any] = json.loads((tmp_path / "x.json").read_text())
    assert done["parts"]["bad"] == {"failed": "OutOfMemoryError: no"} and done["parts"]["good"]["rows"] == [{"passed": True}]
    assert gpu.page(done)[2:7] == ["## bad", "failed: OutOfMemoryError: no", "", "## good", "1 row"]


def test_the_next_steps_follow_from_the_numbers() -> None:
    """The kernel with most seconds above its bound is named, not the one with the lowest share; slower peers come by their ratio."""
    kernels = [
        {"what": "A", "kernel": "up", "seconds": 0.01, "share": 0.5},
        {"what": "A", "kernel": "back", "seconds": 0.001, "share": 0.1},
    ]
    layers = [{"what": "A", "over_peers": {"x": 0.9, "y": 1.25, "z": 2.0}}]
    steps = [{"what": "A", "synchronizations": 2}, {"what": "B", "synchronizations": 40}]
    assert gpu.next_steps({"kernels": kernels, "layers": layers, "steps": steps, "right": [{"passed": False}]}) == [
        "first correct the wrong results of right",
        "most to gain in a kernel: 5.00 ms of up at A",
        "slower than z at A: 2.00 times its time",
        "slower than y at A: 1.25 times its time",
        "the host waits 40 times a step: B",
    ]
    assert gpu.next_steps({"right": [{"passed": True}]}) == ["no measurement suggests a change"]


def test_flops_and_bytes_of_kernels_are_counted_by_hand() -> None:
    """2 tokens of width 3, each chosen by 1 of 5 experts of 7 hidden units, in 2 bytes: R = 2, R D F = 42, E D F = 105."""
    from moe.bench.gpu.layer import _bytes, flops_of

    shape = Shape(2, 3, 7, 5, 1)
    assert flops_of(shape) == {"up": 4 * 42, "product": 6 * 42, "back": 2 * 42, "weights": 6 * 42}
    assert _bytes(shape, 2)["up"] == 2 * (2 * 3 + 2 * 105 + 3 * 14) and _bytes(shape, 2)["weights"] == 2 * (2 * 6 + 3 * 14 + 3 * 105)
