"""train.loss: DPO of docs/use/dpo.py equals a plain DPO of chats one by one; on every layout, and from its own reference; wrong losses are
refused in one line."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import moe
from moe.data import open_data
from moe.data.chats import ChatRows
from moe.data.token_shard import TokenShard
from moe.model.transformer import Transformer
from moe.nn.own_loss import OwnLoss, Predictions
from moe.recipe.load import build_run
from moe.recipe.sections import Data, Run
from moe.records.metrics import read_summary
from moe.records.summary import summary_rows
from moe.train.parts.passes import count_tokens, passes_of
from moe.train.use import evaluate
from parallel.errors import BadInput
from tests.support import trained

PAIRS = [{"prompt": f"{n} + {n}?", "chosen": f" {2 * n}", "rejected": f" no{n % 3}"} for n in range(40)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    trained.home(tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    return tmp_path


@pytest.fixture
def dpo() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("dpo", Path(__file__).parents[3] / "docs/use/dpo.py")
    assert spec is not None and spec.loader is not None
    sys.modules["dpo"] = made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    yield made
    del sys.modules["dpo"]


def recipe(**sections: dict[str, Any]) -> Run:
    """The tiny model of the trainer's tests without drops and jitter, on the pairs."""
    values = trained.VALUES | {"router": {"preset": "mixtral"}}
    own = {"model": {"max_length": 40}, "data": {"source": "chat", "path": "pairs.jsonl"}}
    return build_run({name: values.get(name, {}) | own.get(name, {}) | sections.get(name, {}) for name in {*values, *sections}})


def plain_logp(model: Transformer, prompt: str, answer: str) -> Tensor:
    """Log-probability of an answer in bytes and of the id that ends a text: of a single unpadded sequence."""
    ids = [*prompt.encode(), *answer.encode(), 0]
    logits = model(torch.tensor([ids[:-1]])).logits_BLV[0]
    answered = range(len(prompt.encode()) - 1, len(ids) - 1)
    return torch.stack([logits[at].log_softmax(0)[ids[at + 1]] for at in answered]).sum()


def test_dpo_equals_dpo_of_chats_one_by_one(folder: Path, dpo: ModuleType) -> None:
    run = recipe()
    model = Transformer(run.model, run.experts, run.router, vocab_size=256, seed=3).eval()
    data = open_data(Data(source="chat", path="pairs.jsonl"), max_length=40, vocab_size=256, seed=0, log=lambda line: None)
    assert isinstance(rows := data.train.windows, ChatRows)  # type: ignore[union-attr]
    numbers, references = [3, 0, 7], [0.5, -1.0, 0.25]
    margins = [plain_logp(model, PAIRS[n]["prompt"], PAIRS[n]["chosen"]) - plain_logp(model, PAIRS[n]["prompt"], PAIRS[n]["rejected"])
               for n in numbers]  # fmt: skip
    plain = torch.stack([(1 + (-0.1 * (m - r)).exp()).log() for m, r in zip(margins, references, strict=True)]).sum()
    wanted = torch.autograd.grad(plain, list(model.parameters()), allow_unused=True)

    sequences = torch.from_numpy(rows.read(np.array(numbers)))
    shard = TokenShard.whole(len(numbers), 40)
    (only,) = passes_of([sequences], count_tokens(sequences, shard), shard)
    model.own_loss = OwnLoss("dpo:note")
    model(only.inputs_BL, only.context, only.targets_BL)
    found = torch.tensor(list(dpo.found.values()))
    torch.testing.assert_close(found, torch.stack(margins).detach())
    Path("reference.json").write_text(json.dumps(dict(zip(dpo.found, references, strict=True))))
    model.own_loss = OwnLoss("dpo:dpo")
    loss = model(only.inputs_BL, only.context, only.targets_BL).loss
    torch.testing.assert_close(loss, plain)
    for one, other in zip(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True), wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)


def test_dpo_begins_at_log_2_on_ranks_and_falls(folder: Path, dpo: ModuleType) -> None:
    """The policy begins as its reference, also with adapters: each pair's loss is then -log sigmoid 0."""
    trained.train(recipe(data={"source": "text", "path": "text.txt"}, train={"steps": 1}), folder / "base")
    dpo.main("base", "pairs.jsonl")
    before = Path("reference.json").read_text()
    with pytest.raises(BadInput, match="reference.json: got a file that is there already"):
        dpo.main("base", "pairs.jsonl")
    assert Path("reference.json").read_text() == before
    for name, degrees, rank in (("pp", {"pp": 2}, 0), ("tp", {"tp": 2}, 0), ("sp", {"sp": 2}, 0), ("lora", {}, 4)):
        own: dict[str, dict[str, Any]] = {"optimizer": {"warmup_steps": 0, "lr": 0.01 * (1 + rank)}, "lora": {"rank": rank}}
        run = recipe(train={"loss": "dpo:dpo", "steps": 4}, degrees=degrees, pipeline={"microbatches": 2}, **own)
        trained.train(run, folder / name, ranks=1 if rank else 2, init_from=folder / "base")
        losses = [line["loss"] for line in trained.lines(folder / name)]
        assert losses[0] == pytest.approx(math.log(2), abs=1e-6) and losses[-1] < 0.6
        held_out = trained.lines(folder / name, "eval")[-1]
        assert "bits_per_byte" not in held_out and held_out["validation_loss"] < math.log(2)
    run = recipe(train={"loss": "dpo:dpo", "steps": 6}, optimizer={"warmup_steps": 0, "lr": 0.01}, pipeline={"microbatches": 2})
    trained.train(run, folder / "pp")  # resumed, on one rank
    before, after = (dpo.margins(name, "pairs.jsonl") for name in ("base", "pp"))
    assert before.keys() == after.keys() and all(after[pair] > before[pair] for pair in before)


def test_dpo_begins_with_a_model_of_multi_token_prediction(folder: Path, dpo: ModuleType) -> None:
    """The blocks of multi-token prediction are left out, also if adapters are merged into that model."""
    trained.train(recipe(data={"source": "text", "path": "text.txt"}, train={"steps": 1}, model={"ahead": 1}), folder / "base")
    dpo.main("base", "pairs.jsonl")
    run = recipe(train={"loss": "dpo:dpo", "steps": 2}, lora={"rank": 4}, optimizer={"warmup_steps": 0})
    (summary,) = trained.train(run, folder / "lora", init_from=folder / "base")
    assert isinstance(summary, dict), summary
    assert trained.lines(folder / "lora")[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert not moe.open("lora").model.ahead


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda p: p.logp_BL.sum(), "got torch.float32 of shape [] from wrong:loss, needed a loss for each of 3 sequences"),
        (lambda p: p.logp_BL.sum(1) / len(p.logp_BL), "wrong:loss, whose loss of a sequence depends on other sequences or changes"),
        (lambda p: p.logits, "which raised AttributeError"),
        (lambda p: p.logp_BL.detach().sum(1), "wrong:loss, whose losses have no gradient"),
    ],
)
def test_a_wrong_loss_is_refused_in_one_line(loss: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = ModuleType("wrong")
    made.loss = loss  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wrong", made)
    model = Transformer(recipe().model, vocab_size=256)
    model.own_loss = OwnLoss("wrong:loss")
    tokens = torch.arange(33).view(3, 11)
    with pytest.raises(BadInput) as bad:
        model(tokens[:, :-1], None, tokens[:, 1:])
    assert said in str(bad.value) and "\n" not in str(bad.value)


def test_a_loss_sees_whole_sequences_of_padded_packed_chats(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Predictions] = []
    made = ModuleType("sees")
    made.loss = lambda p: seen.append(p) or p.logp_BL.sum(1)  # type: ignore[attr-defined, func-returns-value]
    monkeypatch.setitem(sys.modules, "sees", made)
    model = Transformer(recipe().model, vocab_size=256)
    model.own_loss = OwnLoss("sees:loss")
    data = open_data(Data(source="chat", path="pairs.jsonl"), max_length=40, vocab_size=256, seed=0, log=lambda line: None)
    sequences, shard = torch.from_numpy(data.train.windows.read(np.array([5]))), TokenShard.whole(1, 40)  # type: ignore[union-attr]
    (only,) = passes_of([sequences], count_tokens(sequences, shard), shard)
    model(only.inputs_BL, only.context, only.targets_BL)
    predicted = seen[0].next_BL[0] >= 0
    for chat, answer in enumerate((PAIRS[5]["chosen"], PAIRS[5]["rejected"])):
        mine = predicted & (seen[0].chat_BL[0] == chat)
        assert bytes(seen[0].next_BL[0][mine].tolist()) == answer.encode() + b"\0"
    assert (seen[0].logp_BL[0][~predicted] == 0).all()


@pytest.mark.parametrize(
    ("lines", "sections", "said"),
    [
        (PAIRS, {}, "train.loss: got cross_entropy with pairs of chats, needed a loss for pairs"),
        (PAIRS, {"data": {"packing": True}}, "data.packing: got true with pairs of chats"),
        (
            PAIRS,
            {"data": {"path": None, "sources": [{"path": name, "weight": 1} for name in ("pairs.jsonl", "single.jsonl")]}},
            "data.sources: got pairs in pairs.jsonl, and single chats",
        ),
        ([*PAIRS, {"prompt": "a", "completion": "b"}], {}, "line 41: got another form than the pairs before"),
        (PAIRS, {"train": {"loss": "dpo:dpo"}, "model": {"ahead": 1}}, "model.ahead"),
    ],
)
def test_pairs_that_cannot_be_trained_are_refused(
    lines: list[Any], sections: dict[str, Any], said: str, folder: Path, dpo: ModuleType
) -> None:
    Path("pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    Path("single.jsonl").write_text("".join(json.dumps({"prompt": "a", "completion": f"{n}"}) + "\n" for n in range(40)))
    (line,) = trained.train(recipe(**sections), folder / "run")
    assert said in str(line) and "\n" not in str(line)


def test_a_loss_that_is_not_finite_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its step is then skipped, as with cross-entropy."""
    made = ModuleType("infinite")
    made.loss = lambda p: p.logp_BL.sum(1) * math.nan  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "infinite", made)
    model, tokens = Transformer(recipe().model, vocab_size=256), torch.arange(33).view(3, 11)
    model.own_loss = OwnLoss("infinite:loss")
    assert model(tokens[:, :-1], None, tokens[:, 1:]).loss.isnan()


def test_moe_eval_says_that_it_computes_cross_entropy(folder: Path, dpo: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    trained.train(recipe(train={"loss": "dpo:without_reference", "steps": 1}), folder / "run")
    evaluate.main("run", overrides={})
    out, err = capsys.readouterr()
    assert "nats a token" in out
    assert "this is cross-entropy, of chosen and rejected answers, and not train.loss dpo:without_reference" in err
    assert "nats" not in dict(summary_rows(read_summary(folder / "run") or {}))["validation loss"]
