"""The scripts of docs/use/python.md do what the page says, each as it stands but for a smaller model and fewer steps."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import moe
from moe.recipe.load import load

PAGE = Path(__file__).resolve().parents[2] / "docs/use/python.md"
SCRIPTS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.S | re.M)
SMALL = {"model.num_layers": 2, "model.d_model": 32, "train.global_batch": 4, "train.eval_sequences": 4, "optimizer.warmup_steps": 1}


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


def test_a_script_ends_as_a_run_does(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What a user can mend is one line and exit code 2, what a callback raises one line and 1, and 0 is the end of a run."""
    monkeypatch.chdir(tmp_path)

    class Boom(moe.Callback):
        def on_step_end(self, now: Any) -> None:
            raise ValueError("boom")

    run, _ = small("switch_tiny", {"data.path": str(home / "text.txt")})
    ends = [{"data": 3}, {"callbacks": [Boom()]}, {}]
    codes = []
    for own in ends:
        with pytest.raises(SystemExit) as ended:
            moe.script(lambda own=own: moe.train(run, display=False, **own))  # type: ignore[misc]
        codes.append(ended.value.code)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert codes == [2, 1, 0]
    assert said[0].startswith("error: data, train: got a int, needed samples") and "Boom.on_step_end raised ValueError: boom" in said[1]
    assert len(said) == 2
