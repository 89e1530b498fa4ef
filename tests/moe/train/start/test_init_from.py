"""--init_from takes over another run's weights, routers' biases and tokenizer, but no moments, counters or text; or refuses in one line."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from moe.checks.begins import check_begins
from moe.data import load as load_tokenizer
from moe.records.metrics import read
from moe.train.loop import trainer
from moe.train.start.state import EXTRA
from parallel.errors import BadInput
from parallel.process.process import World
from parallel.store.stored import Reader
from tests.support import trained

STILL = {"lr": 1e-30, "warmup_steps": 0, "clip_norm": None}  # so small that no fp32 weight changes


@pytest.fixture(scope="module")
def before(home: Path) -> Path:
    """The folder of a run of six steps on two ranks, with a BPE tokenizer and routers' biases."""
    trained.train(trained.recipe(home, degrees={"ep": 2}, router={"bias_rate": 0.01, "balance_weight": 0.0}, **BPE), home / "a", ranks=2)
    return home / "a"


BPE: dict[str, Any] = {"data": {"tokenizer": "bpe", "vocab_size": 300}}


def other(home: Path, **sections: Any) -> Any:
    """Return a recipe with the same model but another text, for one step that changes no weight."""
    text = home / "other.txt"
    if not text.exists():
        text.write_text("zebra quartz vortex jigsaw " * 400)
    data = BPE["data"] | {"path": str(text)}
    router = {"bias_rate": 0.01, "balance_weight": 0.0}
    return trained.recipe(home, **{"data": data, "router": router, "optimizer": STILL, "train": {"steps": 1, "save_every": 1}} | sections)


def values(checkpoint: Path, kind: str) -> dict[str, torch.Tensor]:
    reader = Reader(checkpoint)
    return {name: reader.region(name, kind, tuple(slice(0, n) for n in shape)) for name, shape in reader.names(kind).items()}


@pytest.mark.parametrize(("kind", "ranks"), [("ddp", 1), ("fsdp", 2), ("zero1", 2), ("zero3", 2)])
def test_the_weights_are_the_others_and_everything_else_begins(kind: str, ranks: int, home: Path, before: Path, tmp_path: Path) -> None:
    sharding = {"kind": kind} if not kind.startswith("zero") else {"kind": "zero", "stage": int(kind[-1])}
    run = other(home, sharding=sharding, degrees={"dp": ranks})
    summary = trained.train(run, tmp_path / "b", ranks=ranks, init_from=before)[0]
    assert isinstance(summary, dict), summary
    saved, source = tmp_path / "b/checkpoints/step-1", before / "checkpoints/step-6"
    weights, expected = values(saved, "weight"), values(source, "weight")
    assert weights.keys() == expected.keys() and all(torch.equal(weights[name], expected[name]) for name in weights)
    assert values(saved, EXTRA).keys() == values(source, EXTRA).keys() != set()
    means, squares = values(saved, "exp_avg"), values(saved, "exp_avg_sq")
    adam = run.optimizer
    for name, mean in means.items():  # Adam's moments after one step from 0 are (1 - beta1) g and (1 - beta2) g^2
        exact = (mean.double() / (1 - adam.beta1)) ** 2 * (1 - adam.beta2)
        torch.testing.assert_close(squares[name].double(), exact, rtol=1e-5, atol=1e-30)
    state = Reader(saved).state
    assert state["counters"]["step"] == 1
    assert load_tokenizer(state["tokenizer"]).token_bytes == load_tokenizer(Reader(source).state["tokenizer"]).token_bytes
    (event,) = (line for line in read(tmp_path / "b") if line["kind"] == "event" and line["event"] == "begun")
    assert event["from"] == str(source)


def test_a_run_that_has_begun_goes_on_from_its_own_checkpoint(home: Path, before: Path, tmp_path: Path) -> None:
    out, third = tmp_path / "b", before / "checkpoints/step-3"
    trained.train(other(home), out, init_from=third)
    first, expected = values(out / "checkpoints/step-1", "weight"), values(third, "weight")
    assert all(torch.equal(first[name], expected[name]) for name in expected)
    trained.train(other(home, train={"steps": 2, "save_every": 1}), out, init_from=before)
    second = values(out / "checkpoints/step-2", "weight")
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("sections", "source", "what"),
    [
        ({"model": {"d_ff": 20}}, "", "needed shape .20, 16.*give this recipe the sizes of the other run"),
        ({"model": {"num_heads": 4}}, "", "model.num_heads: got 4, needed 2.*leave --init_from out"),
        ({"data": {"tokenizer": "bytes"}}, "", "data.tokenizer"),
        ({}, "checkpoints/step-5", "--init_from: got .*step-5, which has no checkpoint"),
    ],
)
def test_another_model_is_refused_in_one_line(
    sections: dict[str, Any], source: str, what: str, home: Path, before: Path, tmp_path: Path
) -> None:
    (said,) = trained.train(other(home, **sections), tmp_path / "b", init_from=before / source)
    assert isinstance(said, str) and "\n" not in said
    assert re.search(what, said)
    assert not list((tmp_path / "b").glob("checkpoints/*"))


def test_a_source_that_fresh_sets_aside_is_refused_and_stays(home: Path, before: Path) -> None:
    """Also for a checkpoint in the run's folder; and by the command before ranks start."""
    there = sorted(before.rglob("*"))
    step = max((before / "checkpoints").glob("step-*"))
    said = "--init_from: got .*, needed another run's folder: --fresh sets this one's checkpoints aside; fix: choose another --out"
    with pytest.raises(BadInput, match=said):
        trainer.train(other(home), out=before, world=World(), fresh=True, init_from=before)
    with pytest.raises(BadInput, match=said):
        check_begins(other(home), before, fresh=True, source=step)
    check_begins(other(home), before, fresh=False, source=step)
    assert sorted(before.rglob("*")) == there


def test_chats_without_a_template_are_refused_before_ranks_start(home: Path, before: Path, tmp_path: Path) -> None:
    """If neither the recipe nor the run of --init_from has a template, as in a --dry_run; not if the run has one."""
    (tmp_path / "a.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n' * 2)
    run = other(home, data={"path": str(tmp_path / "a.jsonl"), "source": "chat"})
    step = max((before / "checkpoints").glob("step-*"))
    for source in (None, before, step):
        with pytest.raises(BadInput, match="data.chat_template: got null, needed a template, because this model came with none"):
            check_begins(run, tmp_path / "b", fresh=False, source=source)
    manifest = json.loads((step / "manifest.json").read_text())
    manifest["state"]["tokenizer"]["chat"] = {"template": "{{ messages }}"}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    check_begins(run, tmp_path / "b", fresh=False, source=tmp_path)


def test_a_damaged_checkpoint_is_refused(home: Path, before: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(before / "checkpoints/step-3", tmp_path / "step-3")
    file = next(tmp_path.glob("step-3/*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    (said,) = trained.train(other(home), tmp_path / "b", init_from=tmp_path / "step-3")
    assert "which is damaged" in said


@pytest.mark.parametrize("source", ["a", "a/checkpoints/step-6"])
def test_a_folder_that_one_rank_alone_does_not_see_is_one_line_of_all(
    source: str, home: Path, before: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(before.parent)

    def elsewhere(rank: int) -> None:
        if rank:
            os.chdir(tmp_path)

    first, second = trained.train(other(home), tmp_path / "b", ranks=2, init_from=Path(source), before=elsewhere)
    assert first == second and first.startswith(f"checkpoint step-6: got no manifest in {tmp_path}/a/checkpoints/step-6, needed"), (
        first,
        second,
    )
