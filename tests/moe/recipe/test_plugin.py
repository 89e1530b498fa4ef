"""A plugin gives the same numbers as the built-in part that computes the same function, and a wrong plugin is refused in one line.

The plugins here are torch's softmax, top-k and AdamW, a half cosine, and the project's own all-to-all, as attributes of the module `twins`.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from moe.checks.together import check_run
from moe.cli.main import main
from moe.experts.dispatch.all_to_all import AllToAll
from moe.plan.operators.of_recipe import graph_of
from moe.recipe.load import load
from moe.recipe.plugin import load_plugin
from moe.recipe.sections import Run
from parallel.errors import BadInput
from tests.support import trained

TEXT = [[(7 * n + m) % 250 for m in range(13)] for n in range(40)]
BY_NAME: dict[str, dict[str, Any]] = {
    "router": {"score": "twins:softmax", "select": "twins:top"},
    "optimizer": {"kind": "twins:adamw", "schedule": "twins:cosine"},
    "dispatch": {"kind": "twins:all_to_all"},
    "data": {"source": "twins:samples", "path": None},
}


@pytest.fixture(scope="module", autouse=True)
def twins() -> Any:
    """Put the module `twins`, which has no file, into sys.modules."""
    made = ModuleType("twins")
    vars(made).update(
        softmax=lambda logits: logits.softmax(-1),
        top=lambda scores, k: scores.topk(k).indices,
        adamw=lambda groups: torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8),
        cosine=lambda update, total: 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, update / total))),
        all_to_all=AllToAll,
        samples=lambda data: {"train": TEXT, "validation": TEXT[:8]},
        negative=lambda logits: logits,
        flat=lambda logits: torch.ones_like(logits),
        over_tokens=lambda logits: logits.softmax(0),
        twice=lambda scores, k: torch.zeros(len(scores), k, dtype=torch.int64),
        queue=lambda scores, k: (torch.arange(len(scores)) % scores.shape[1]).unsqueeze(1).expand(-1, k),
        below=lambda update, total: -1.0,
        ends=lambda update, total: 1 / (total - 1 - update),
        fails=lambda groups: 1 / 0,
        unopened=lambda settings: object(),
        three=lambda a, b, c: None,
        number=3,
    )
    sys.modules["twins"] = made
    yield made
    del sys.modules["twins"]


def test_parts_by_name_train_as_those_built_in(home: Path, tmp_path: Path) -> None:
    sections: dict[str, dict[str, Any]] = {"degrees": {"ep": 2}, "train": {"steps": 3}}
    built_in = trained.recipe(home, **sections, data={"source": "given", "path": None})
    trained.train(built_in, tmp_path / "a", ranks=2, own=lambda rank: {"data": {"train": TEXT, "validation": TEXT[:8]}})
    trained.train(trained.recipe(home, **sections, **BY_NAME), tmp_path / "b", ranks=2)
    trained.close(tmp_path / "b", tmp_path / "a", rel=1e-6)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"optimizer": {"kind": "nowhere:lion"}}, "optimizer.kind: got nowhere:lion, needed a module nowhere that can be imported here"),
        ({"optimizer": {"kind": "twins:adam"}}, "needed a name that twins has; fix: did you mean twins:adamw?"),
        ({"optimizer": {"kind": "twins:number"}}, "got twins:number, a int, needed a function or a class"),
        ({"optimizer": {"kind": "twins:three"}}, "got twins:three(a, b, c), needed a function that can be called with 1 argument"),
        ({"optimizer": {"kind": "twins:fails"}}, "optimizer.kind: got ZeroDivisionError: division by zero"),
        (
            {"optimizer": {"kind": "twins:adamw"}, "sharding": {"kind": "zero", "engine": "deepspeed"}},
            "got twins:adamw with sharding.engine=deepspeed",
        ),
        (
            {"optimizer": {"schedule": "twins:below", "warmup_steps": 0}},
            "got -1.0 from twins:below, needed the share of optimizer.lr at update 0",
        ),
        (
            {"optimizer": {"schedule": "twins:ends", "warmup_steps": 2}},
            "got twins:ends, which raised ZeroDivisionError: division by zero (test_plugin.py, line",
        ),
        ({"router": {"score": "twins:negative"}}, "needed scores [7, 4] in float32, each 0 or more"),
        ({"router": {"score": "twins:flat"}}, "got scores without a gradient"),
        ({"router": {"score": "twins:over_tokens"}}, "whose result for a token depends on other tokens"),
        ({"router": {"select": "twins:twice", "preset": "gshard"}}, "needed different experts from 0 to 3 for each token"),
        ({"router": {"select": "twins:queue"}}, "whose result for a token depends on other tokens"),
        ({"data": {"source": "twins:samples", "path": None, "tokenizer": "bpe"}}, "got bpe with data.source=twins:samples"),
    ],
)
def test_what_is_no_such_part_is_refused_in_one_line(sections: dict[str, Any], said: str, home: Path, tmp_path: Path) -> None:
    (line,) = trained.train(trained.recipe(home, **sections), tmp_path / "run")
    assert said in line and "\n" not in line


def test_a_dispatcher_that_is_none_is_refused(home: Path, tmp_path: Path) -> None:
    run = trained.recipe(home, degrees={"ep": 2}, dispatch={"kind": "twins:unopened"})
    assert all("which gives a object, needed a Dispatcher" in line for line in trained.train(run, tmp_path / "run", ranks=2))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working folder with modules and a recipe. The modules are not imported yet, and are removed from sys.modules afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "raises_xq.py").write_text("import math\nmath.nothing\n")
    (tmp_path / "parts_xq.py").write_text(
        "import torch\nopened = True\n\n\ndef sgd(groups):\n    return torch.optim.SGD(groups, momentum=0.5)\n"
    )
    (tmp_path / "colorsys.py").write_text("raise SystemExit('the user's file in the place of Python's')")
    (tmp_path / "mine.yaml").write_text("extends: switch_tiny\noptimizer: {kind: parts_xq:sgd}\n")
    yield tmp_path
    for name in ("parts_xq", "raises_xq"):
        sys.modules.pop(name, None)


def test_a_recipe_is_read_and_checked_without_importing_what_it_names(folder: Path) -> None:
    run, _ = load("mine.yaml")
    check_run(run, 2)
    assert "parts_xq" not in sys.modules


def test_what_starts_nothing_runs_no_code_that_a_recipe_names(folder: Path) -> None:
    """`graph_of` (of `moe plan --search`), `moe show --plan` and `moe train --dry-run` do not import a recipe's plugins."""
    (folder / "routed.yaml").write_text("extends: switch_tiny\nrouter: {score: parts_xq:softplus}\ndata: {path: text.txt}\n")
    (folder / "text.txt").write_text("words of a text\n" * 500)
    graph_of(load("routed.yaml")[0], sequences=8)
    assert main(["show", "routed.yaml", "--plan", "--nproc", "2"]) == main(["train", "routed.yaml", "--dry-run"]) == 0
    assert "parts_xq" not in sys.modules


def test_the_working_folder_is_looked_in_last(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load_plugin("optimizer.kind", "parts_xq:sgd", arguments=1)
    assert f"optimizer.kind parts_xq:sgd: runs code of {folder}/parts_xq.py, because the recipe names it" in capsys.readouterr().err
    load_plugin("optimizer.kind", "parts_xq:sgd", arguments=1)
    assert not capsys.readouterr().err, "said once"
    assert load_plugin("optimizer.schedule", "colorsys:hls_to_rgb", arguments=3).__module__ == "colorsys"


def test_what_a_module_raises_as_it_is_imported_is_said_with_its_place(folder: Path) -> None:
    with pytest.raises(BadInput, match=r"which raised AttributeError: .*nothing.* \(raises_xq.py, line 2\) as it was imported"):
        load_plugin("optimizer.kind", "raises_xq:x", arguments=1)


def test_code_that_changed_since_the_checkpoint_is_told(home: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(steps: int) -> Run:
        return trained.recipe(home, optimizer={"kind": "parts_xq:sgd"}, train={"steps": steps, "save_every": 0})

    from moe.train.loop import trainer

    trainer.train(run(1), out=folder / "run")
    trainer.train(run(2), out=folder / "run")
    assert "changed since the checkpoint: the code" not in capsys.readouterr().out
    (folder / "parts_xq.py").write_text((folder / "parts_xq.py").read_text() + "\n")
    trainer.train(run(3), out=folder / "run")
    assert "changed since the checkpoint: the code of optimizer.kind parts_xq:sgd" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["os.system:", ":x", "a b:c", "../x:y", "a:b:c", "a-b:c", "a:b()"])
def test_a_name_that_is_none_is_refused_with_the_choices(text: str) -> None:
    with pytest.raises(BadInput, match="needed adamw, .* or module:name of your own function or class"):
        load("switch_tiny", {"optimizer.kind": text})


@pytest.fixture
def packages(folder: Path) -> Any:
    """Return a function that writes a package's metadata with its entry points into the folder, as pip does."""

    def put(package: str, **groups: dict[str, str]) -> None:
        info = folder / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = [
            f"[moe_parallel.{group}]\n" + "".join(f"{name} = {value}\n" for name, value in given.items()) for group, given in groups.items()
        ]
        (info / "entry_points.txt").write_text("\n".join(lines))

    sys.path.append(str(folder))
    return put


def test_a_name_that_a_package_registers_is_its_part(packages: Any, home: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A registered name is replaced by module:name when the recipe is read, without an import. The run's recipe.yaml has module:name, so
    that the run can be resumed without the package's metadata."""
    packages("parts-of-mine", optimizers={"mine": "parts_xq:sgd", "adamw": "parts_xq:sgd"}, scores={"other": "parts_xq:none"})
    values = {"optimizer.kind": "mine", "data.path": str(home / "text.txt")}
    assert (
        load("switch_tiny", values)[0].optimizer.kind == "parts_xq:sgd" and Run(optimizer={"kind": "mine"}).optimizer.kind == "parts_xq:sgd"
    )
    assert load("switch_tiny", {"optimizer.kind": "adamw"})[0].optimizer.kind == "adamw", "built-in names come first"
    assert main(["show", "switch_tiny", "--optimizer.kind", "mine"]) == 0 and 'kind: "parts_xq:sgd"' in capsys.readouterr().out
    assert "parts_xq" not in sys.modules
    trained.train(trained.recipe(home, optimizer={"kind": "mine"}, train={"steps": 1}), folder / "run")
    assert "optimizer.kind parts_xq:sgd: runs code of" in capsys.readouterr().err
    assert 'kind: "parts_xq:sgd"' in (folder / "run/recipe.yaml").read_text()


def test_names_that_no_package_registers_for_this_key_are_refused(packages: Any) -> None:
    packages("one", optimizers={"lion": "parts_xq:sgd", "broken": "parts_xq", "deep": "parts_xq:a.b"}, scores={"other": "parts_xq:sgd"})
    packages("two", optimizers={"lion": "elsewhere:lion", "broken": "parts_xq"}, scores={"other": "parts_xq:sgd"})
    for kind, said in (
        ("lion", "optimizer.kind: got lion, registered by one and two, needed one plugin of that name, not elsewhere:lion"),
        ("broken", "optimizer.kind: got broken, registered by .* as parts_xq, needed module:name"),
        ("deep", "got deep, registered by one as parts_xq:a.b, needed module:name"),
        ("other", "optimizer.kind: got 'other', needed .*lion, .*adamw.* more .* or module:name of your own function or class"),
        ("leon", "fix: did you mean lion?"),
    ):
        with pytest.raises(BadInput, match=said):
            load("switch_tiny", {"optimizer.kind": kind})
    assert load("switch_tiny", {"router.score": "other"})[0].router.score == "parts_xq:sgd", "the same part, twice registered"
