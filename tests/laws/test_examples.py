"""The scripts of docs/use/python.md, the parts of docs/use/plugins.md and the notebook do what the pages say. They run unchanged, with a
smaller model and fewer steps.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import moe
from moe.recipe.load import load
from parallel.process import process
from tests.support.notebook import executed, in_a_kernel, stored
from tests.support.ranks import run_on_ranks

PAGE = Path(__file__).resolve().parents[2] / "docs/use/python.md"
SCRIPTS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.S | re.M)
NOTEBOOK = PAGE.with_name("look_inside.ipynb")
JUPYTER_LACKS = [name for name in ("nbclient", "ipykernel") if find_spec(name) is None]
SMALL = {"model.num_layers": 2, "model.d_model": 32, "train.global_batch": 4, "train.eval_sequences": 4, "optimizer.warmup_steps": 1}


def without_numbers(texts: list[str]) -> list[str]:
    return [re.sub(r"[\d.]+", "0", text) for text in texts]


def small(recipe: str, overrides: dict[str, Any]) -> Any:
    return load(recipe, overrides | SMALL | {"train.steps": 3, "train.eval_every": 1})


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda text: text.split(":")[0].removeprefix("# "))
def test_a_script_of_the_page_runs(script: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(moe, "load", small, raising=False)
    monkeypatch.setattr(moe, "script", lambda work: work(), raising=False)
    exec(compile(script, "script", "exec"), {"__name__": "__main__"})
    (summary,) = (json.loads(path.read_text()) for path in tmp_path.glob("runs/*/summary.json"))
    assert summary["steps"] == 3 and summary["recipe"] in script


def test_parts_of_one_s_own_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first recipe of docs/use/plugins.md names every kind of part but a loss and a dispatcher."""
    for name, text in re.findall(r"^# (\S+)\n(.*?)^```", PAGE.with_name("plugins.md").read_text(encoding="utf-8"), flags=re.S | re.M)[:2]:
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    run, origins = small("mine.yaml", {})
    assert [value.partition(":")[0] for value in run.plugins().values()] == ["my_parts"] * 6
    moe.train(run, name="mine", origins=origins)
    (summary,) = (json.loads(path.read_text()) for path in tmp_path.glob("runs/*/summary.json"))
    assert summary["steps"] == 3


def test_the_notebook_prints_what_it_shows_but_for_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(moe, "load", small, raising=False)
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    shown = without_numbers(stored(notebook))
    assert without_numbers(executed(notebook)) == shown and len(shown) == 4


@pytest.mark.packages
@pytest.mark.timeout(280)
@pytest.mark.skipif(bool(JUPYTER_LACKS), reason=f"Jupyter's kernel needs {' and '.join(JUPYTER_LACKS)} (pip install)")
def test_the_notebook_runs_in_jupyter_s_kernel(tmp_path: Path) -> None:
    """Unchanged, so with its own steps: the kernel is another process."""
    shown = stored(json.loads(NOTEBOOK.read_text(encoding="utf-8")))
    assert without_numbers(in_a_kernel(NOTEBOOK, tmp_path, timeout_s=240)) == without_numbers(shown)


def test_a_script_ends_as_a_run_does(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`moe.script` exits with 2 and one line after bad input, with 1 and one line after a callback's error, and with 0 after a run."""
    monkeypatch.chdir(tmp_path)

    class Boom(moe.Callback):
        def on_step_end(self, now: Any) -> None:
            raise ValueError("boom")

    run, _ = small("switch_tiny", {"data.path": str(home / "text.txt")})

    def work(rank: int) -> list[tuple[Any, list[str]]]:  # in a fork, because a run sets signal handlers
        monkeypatch.setattr(process, "stop", lambda: None)  # the test's ranks need their process group later
        found = []
        for callbacks in ([3], [Boom()], []):
            with contextlib.redirect_stderr(io.StringIO()) as said, pytest.raises(SystemExit) as ended:
                moe.script(lambda callbacks=callbacks: moe.train(run, display=False, callbacks=callbacks))  # type: ignore[misc]
            found.append((ended.value.code, said.getvalue().splitlines()))
        return found

    (((bad, line), (failed, other), (done, nothing)),) = run_on_ranks(work, 1)
    assert (bad, failed, done, nothing) == (2, 1, 0, [])
    assert [text[:33] for text in line] == ["error: callbacks: got a int, neede"[:33]]
    assert len(other) == 1 and "callback Boom.on_step_end raised ValueError: boom (test_examples.py, line " in other[0]
