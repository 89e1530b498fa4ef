"""Chats as sequences: encoded once, packed without a token too many or too few, and read in a packed sequence as if alone."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moe.data import Dataset, open_data
from moe.data import chats as module
from moe.data.chat import ChatFiles
from moe.data.chats import ChatRows, Chats, open_chats, packed, sequences_of
from moe.data.order import TrainSet, Windows
from moe.data.token_shard import TokenShard
from moe.data.tokenizer import Bytes
from moe.model.transformer import Transformer
from moe.recipe.load import build_run
from moe.recipe.sections import Data
from moe.recipe.shapes import PADDING
from moe.records import metrics
from moe.train.parts.passes import count_tokens, passes_of
from moe.train.start.opening import in_steps
from parallel.errors import BadInput
from tests.support import trained


def write(folder: Path, lengths: list[int], field: str | None = None) -> Data:
    """Write a chat with an answer of each of these lengths, in letters, and return the section `data` that reads them. field: of messages;
    None: prompts and completions, which need no template."""
    answers = [chr(97 + n % 26) * n for n in lengths]
    lines: list[dict[str, Any]] = [{"prompt": "?" * (len(answer) % 3), "completion": answer} for answer in answers]
    if field is not None:
        lines = [{field: [{"role": "assistant", "content": answer}]} for answer in answers]
    (folder / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return build_run({"data": {"source": "chat", "path": str(folder / "chats.jsonl")}}).data


def made(folder: Path, lengths: list[int], *, max_length: int) -> Chats:
    path = write(folder, lengths).path
    assert path is not None
    return open_chats(ChatFiles(path), Bytes(), max_length=max_length, cache=folder / "cache", log=lambda line: None)


def test_packing_puts_each_chat_longest_first_into_the_fullest_sequence_with_room() -> None:
    draw = np.random.default_rng(0)
    for room, count in ((12, 1), (12, 40), (100, 300), (7, 50)):
        lengths = draw.integers(1, room + 1, count).tolist()
        rows: list[list[int]] = []  # the plain twin: every sequence is looked at for every chat
        for number in sorted(range(count), key=lambda number: -lengths[number]):
            sums = [sum(lengths[n] for n in row) for row in rows]
            fit = [at for at, held in enumerate(sums) if held + lengths[number] <= room]
            if not fit:
                rows.append([number])
            else:
                rows[max(fit, key=lambda at: sums[at])].append(number)
        found = packed(lengths, room=room)
        assert sorted(n for row in found for n in row) == list(range(count))
        assert sorted(sum(lengths[n] for n in row) for row in found) == sorted(sum(lengths[n] for n in row) for row in rows)


def test_a_packed_sequence_is_its_chats_one_after_another(tmp_path: Path) -> None:
    chats = made(tmp_path, [3, 9, 1, 5, 30, 2, 4, 8], max_length=30)
    train, held = sequences_of(chats, max_length=30, validation_share=0.25, packing=True)
    seen = []
    for side in (train, held):
        for row in side.read(np.arange(side.num_windows)):
            first = np.flatnonzero(row < -(2**32))
            end = int((row != PADDING).sum())
            assert first[0] == 0 and (row[end:] == PADDING).all()
            for start, stop in zip(first, [*first[1:], end], strict=True):
                marks = row[start:stop].copy()
                marks[0] += 2**32
                seen.append(marks.tolist())
    assert sorted(seen) == sorted(chats.ids(n).tolist() for n in range(len(chats)))
    assert sum(side.num_windows for side in (train, held)) < len(chats)
    alone, _ = sequences_of(chats, max_length=30, validation_share=0.25, packing=False)
    assert alone.num_windows == 6 and alone.read(np.array([2]))[0].tolist() == [*chats.ids(2), *[PADDING] * 28]
    columns = np.array([1, 4, 5])
    assert (train.read(np.array([0]), columns) == train.read(np.array([0]))[:, columns]).all()


@pytest.mark.parametrize(
    "model",
    [
        {"ahead": 2},
        {"positions": "t5", "sliding_window": 4},
        {"attention_sinks": True, "sliding_window": 6, "rope": {"fraction": 0.5}},
        {"num_kv_heads": None, "latent": {"key_rank": 10, "rotary_size": 4, "value_size": 5}},
    ],
    ids=["ahead", "t5", "window", "latent"],
)
def test_packed_chats_train_as_if_each_were_alone(model: dict[str, Any], tmp_path: Path) -> None:
    """The same mean loss and the same gradients, also of multi-token prediction, which must not look beyond a chat."""
    chats = made(tmp_path, [3, 9, 1, 5, 12, 2, 4, 8], max_length=40)
    about = {"num_layers": 2, "d_model": 16, "num_heads": 4, "num_kv_heads": 2, "d_ff": 12, "max_length": 40, "moe_every": 2} | model
    run = build_run(
        {
            "model": about,
            "experts": {"num_experts": 4, "kernels": "cpu"},
            "router": {"preset": "glam", "min_capacity": 99, "balance_weight": 0.0},
        }
    )
    network = Transformer(run.model, run.experts, run.router, compute=torch.float64).double()
    train, held = sequences_of(chats, max_length=40, validation_share=0.1, packing=True)
    together = np.concatenate([side.read(np.arange(side.num_windows)) for side in (train, held)])
    alone = ChatRows(chats, np.arange(len(chats)), np.arange(len(chats) + 1), 40, packed=False).read(np.arange(len(chats)))
    found = [trained_on(network, rows) for rows in (together, alone)]
    assert len(together) < len(alone) and (together[:, -1] == PADDING).all(), "every token is read"
    assert torch.allclose(found[0][0], found[1][0], rtol=1e-12)
    for name, gradient in found[0][1].items():
        other = found[1][1][name]
        assert (gradient - other).norm() < 1e-6 * other.norm() + 1e-12, f"{name}: more than the rounding of fp32 positions and sums"


def trained_on(network: Transformer, rows: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    network.zero_grad()
    shard = TokenShard.whole(len(rows), rows.shape[1] - 1)
    counts = count_tokens(torch.from_numpy(rows), shard)
    (one,) = passes_of([torch.from_numpy(rows)], counts, shard)
    loss = network(one.inputs_BL, one.context, one.targets_BL).loss / counts.targets
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}


def test_chats_are_encoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second start reads the file of the first; a damaged file is made again; other chats, lengths and templates have other files."""
    calls, real = [], module.encode_chats
    monkeypatch.setattr(module, "encode_chats", lambda *a, **k: calls.append(a) or real(*a, **k))
    first = made(tmp_path, [3, 9], max_length=30)
    again = made(tmp_path, [3, 9], max_length=30)
    assert len(calls) == 1 and first.key == again.key and first.ids(1).tolist() == again.ids(1).tolist()
    (kept,) = (tmp_path / "cache").glob("*.bin")
    (tmp_path / f"cache/.{kept.name}.99.tmp").write_bytes(b"a killed process wrote")
    content = bytearray(kept.read_bytes())
    for spoilt in (content[:-1] + bytes([content[-1] ^ 1]), content[:-3], b"", b"{}\n", content[:4]):
        kept.write_bytes(spoilt)
        assert made(tmp_path, [3, 9], max_length=30).key == first.key
    assert len(calls) == 6 and kept.read_bytes() == content and not [*(tmp_path / "cache").glob(".*")]
    assert made(tmp_path, [3, 9], max_length=29).key != first.key != made(tmp_path, [3, 8], max_length=30).key
    assert len(calls) == 8


def test_chats_that_change_or_cannot_be_read_leave_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the data file is not said to be one of the cache."""
    real = module.encode_chats

    def changed(*args: Any, **named: Any) -> Any:
        with (tmp_path / "chats.jsonl").open("a") as file:
            file.write('{"prompt": "a", "completion": "b"}\n')
        return real(*args, **named)

    def failing(*args: Any, **named: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    for replaced, said in ((changed, "got chats that changed while they were read"), (failing, "got Input/output error, needed a")):
        monkeypatch.setattr(module, "encode_chats", replaced)
        with pytest.raises(BadInput, match=f"^data file {tmp_path}/chats.jsonl: {said}"):
            made(tmp_path, [3, 9], max_length=30)
        assert not [*(tmp_path / "cache").glob("*.bin")]


def test_a_file_of_chats_that_was_cut_while_it_is_mapped_is_one_line(tmp_path: Path) -> None:
    """Without the check, the process would die by SIGBUS."""
    chats = made(tmp_path, [5, 7, 3, 4000], max_length=4096)
    _, held = sequences_of(chats, max_length=4096, validation_share=0.1, packing=True)
    held.read(np.arange(held.num_windows))
    (file,) = (tmp_path / "cache").glob("chats-*.bin")
    os.truncate(file, 4096)
    with pytest.raises(BadInput, match=rf"^data file {re.escape(str(file))}: got 4,096 bytes: it was cut while it was read, needed "):
        held.read(np.arange(held.num_windows))


def test_sources_of_chats_have_fields_of_their_own(tmp_path: Path) -> None:
    for name, field, lengths in (("a", "dialogue", [3] * 20), ("b", "messages", [5] * 20)):
        (tmp_path / name).mkdir()
        data = write(tmp_path / name, lengths, field)
    sources = [{"path": str(tmp_path / "a/chats.jsonl"), "weight": 3, "text_key": "dialogue"}, {"path": data.path, "weight": 1}]
    (tmp_path / "t.jinja").write_text("{% generation %}{{ messages[0].content }}{% endgeneration %}")
    template = str(tmp_path / "t.jinja")
    values = {"source": "chat", "sources": sources, "chat_template": template, "packing": True}
    mixed = open_data(build_run({"data": values}).data, max_length=30, vocab_size=256, seed=1, cache=tmp_path, log=lambda line: None)
    rows = mixed.train.sequences(np.arange(4000))
    of_a = (rows == ord("a") + 3).any(1)
    assert (of_a != (rows == ord("a") + 5).any(1)).all() and 0.7 < of_a.mean() < 0.8
    with pytest.raises(BadInput, match=r"line 1: got an object with dialogue, needed speech, which data.text_key names"):
        one = {"source": "chat", "path": sources[0]["path"], "text_key": "speech", "chat_template": template}
        open_data(build_run({"data": one}).data, max_length=30, vocab_size=256, seed=1, cache=tmp_path)
    with pytest.raises(BadInput, match="got 1 chat, needed at least 2"):
        open_data(write(tmp_path, [3]), max_length=30, vocab_size=256, seed=1, cache=tmp_path)


def test_padding_of_more_than_half_is_said(tmp_path: Path) -> None:
    """Chats of 3 + 6 tokens and a separator in sequences of 40 are 75 % padding, in sequences of 20 half."""
    (tmp_path / "t.jinja").write_text("{{ messages[0].content }}{% generation %}{{ messages[1].content }}{% endgeneration %}")
    turns = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "defghi"}]
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps({'messages': turns})}\n" * 20)
    values = {"source": "chat", "path": str(tmp_path / "chats.jsonl"), "chat_template": str(tmp_path / "t.jinja")}
    for length, packing, there in ((39, False, True), (19, False, False), (39, True, False)):
        said: list[str] = []
        data = build_run({"data": values | {"packing": packing}}).data
        open_data(data, max_length=length, vocab_size=256, seed=1, cache=tmp_path, log=said.append)
        assert any("; 75% of the tokens are padding: data.packing true joins chats" in line for line in said) == there, said


def test_a_run_counts_tokens_without_padding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of packed chats, on two ranks with unequal numbers of tokens."""
    home = trained.home(tmp_path, monkeypatch)
    data = write(home, np.random.default_rng(1).integers(1, 25, 60).tolist()).model_dump() | {"packing": True}
    run = trained.recipe(home, data=data, model={"max_length": 30}, train={"steps": 2, "global_batch": 4})
    trained.train(run, tmp_path / "run", ranks=2)
    opened = open_data(run.data, max_length=30, vocab_size=run.vocab_size, seed=run.train.seed)
    whole = TokenShard.whole(4, 30)
    read = [int((opened.train.batch(step, whole)[:, :-1] != PADDING).sum()) for step in range(2)]
    assert [line["tokens"] for line in trained.lines(tmp_path / "run", "train")] == read and 200 < sum(read) < 240


def test_epochs_pass_over_the_packed_training_chats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two epochs show each chat that is not held out at least twice, and with one step less one of them less than twice. More epochs
    continue the run; started again with as many, it writes nothing."""
    home, batch = trained.home(tmp_path, monkeypatch), 4
    chats = write(tmp_path, [3, 9, 1, 5, 7, 2, 4, 8] * 5)
    data = chats.model_dump() | {"packing": True, "validation_share": 0.2}
    sizes: dict[str, dict[str, Any]] = {"data": data, "model": {"max_length": 24}}
    opened = open_data(build_run({"data": data}).data, max_length=24, vocab_size=256, seed=0, log=lambda line: None)
    steps = []
    for epochs in (2, 2.5):
        run = trained.recipe(home, **sizes | {"train": {"epochs": epochs, "global_batch": batch}})
        (summary,) = trained.train(run, tmp_path / "run")
        steps.append(summary["steps"])
        assert isinstance(order := opened.train, TrainSet) and isinstance(rows := order.windows, ChatRows)
        shown = np.bincount(order.order(np.arange(summary["steps"] * batch)), minlength=rows.num_windows)
        assert shown.min() >= int(epochs) and shown.sum() - batch < epochs * rows.num_windows <= shown.sum()
        assert sorted(rows.members.tolist()) == list(range(32)), "8 of 40 chats are held out"
    assert [line["step"] for line in trained.lines(tmp_path / "run")] == list(range(1, summary["steps"] + 1))
    before = trained.files(tmp_path / "run")
    assert trained.train(run, tmp_path / "run") == [summary] and trained.files(tmp_path / "run") == before
    (resumed,) = (line for line in metrics.read(tmp_path / "run") if line.get("event") == "resumed")
    assert resumed["changed"] == f"train.steps: {steps[0]} -> {steps[1]}, train.epochs: 2.0 -> 2.5"


def test_a_number_of_epochs_is_no_binary_fraction() -> None:
    """110 samples are 11 steps of 10, although 1.1 * 100 is above 110 in floating point."""
    data = Dataset(TrainSet(Windows(np.zeros(1001, np.int64), 10, 256), 0), None, Bytes(), {}, "")  # type: ignore[arg-type]
    run = build_run({"train": {"epochs": 1.1, "global_batch": 10}})
    said: list[str] = []
    assert in_steps(run, data, said.append).train.steps == 11
    assert said == ["train.epochs 1.1: 11 steps of 10 sequences; an epoch has 100", said[1]]
    assert said[1].startswith("optimizer.warmup_steps 50: these 11 steps never reach optimizer.lr; set optimizer.warmup_steps to 1")
    more = build_run({"train": {"epochs": 1.1, "global_batch": 16}, "optimizer": {"warmup_steps": 7}})
    assert in_steps(more, data, said.append).train.steps == 7
    assert said[2:] == ["train.epochs 1.1: 7 steps of 16 sequences; an epoch has 100; in whole steps that is 2 sequences more than asked"]


def test_epochs_of_what_has_none_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trained.recipe(trained.home(tmp_path, monkeypatch), train={"epochs": 2}, data={"source": "given", "path": None})
    samples = {"train": iter([[1, 2, 3]] * 99), "validation": [[1, 2, 3]]}
    (line,) = trained.train(run, tmp_path / "run", own=lambda rank: {"data": samples})
    assert line.startswith("train.epochs: got 2 with given, needed one source with a length")
