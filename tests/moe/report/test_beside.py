"""`moe report RUN OTHER` prints the recipe keys that differ and both runs' results, and draws both validation losses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moe.cli import main as cli
from moe.recipe.load import load, resolved_yaml
from parallel.errors import BadInput


def run(folder: Path, overrides: dict[str, str], losses: dict[int, float], *, summary: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(resolved_yaml(*load("switch_tiny", overrides)))
    lines = [{"kind": "train", "step": step, "loss": loss + 1} for step, loss in losses.items()]
    lines += [{"kind": "eval", "step": step, "validation_loss": loss, "bits_per_byte": loss * 1.4} for step, loss in losses.items()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_what_differs_and_what_came_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = run(tmp_path / "a", {}, {10: 2.0, 20: 1.5}, summary={"validation_loss": 1.5, "bits_per_byte": 2.1, "steps": 20, "world": 2})
    b = run(tmp_path / "b", {"optimizer.lr": "0.0007", "router.num_choices": "2"}, {10: 2.1, 20: 1.6, 30: 1.375})
    assert cli.main(["report", str(a), str(b)]) == 0
    printed = capsys.readouterr().out
    recipe, result = (part.splitlines() for part in printed.split("\n\n")[:2])
    assert recipe[0].split() == ["recipe", "a", "b"]
    assert {line.split()[0] for line in recipe[1:]} == {"optimizer.lr", "router.num_choices"}
    assert next(line.split() for line in recipe if "lr" in line) == ["optimizer.lr", "0.003", "0.0007"]
    rows = {line.split("  ")[0]: line for line in result}
    assert "1.5000 nats per token" in rows["validation loss"] and "1.3750 nats per token" in rows["validation loss"]
    assert rows["steps"].split() == ["steps", "20", "30"]
    assert (tmp_path / "a/plots/beside-b.png").stat().st_size > 1000


def test_a_run_beside_itself_differs_in_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = run(tmp_path / "a", {}, {10: 2.0})
    assert cli.main(["report", str(a), str(run(tmp_path / "x/a", {}, {10: 2.0}))]) == 0
    assert "no difference" in capsys.readouterr().out


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = run(tmp_path / "a", {}, {10: 2.0})
    assert cli.main(["report", str(a), str(tmp_path / "nothing")]) == 2
    assert "RUN_DIR: got" in capsys.readouterr().err
    (a / "recipe.yaml").unlink()
    with pytest.raises(BadInput, match="recipe: got .*recipe.yaml"):
        from moe.report.compare import beside

        beside(a, a)
