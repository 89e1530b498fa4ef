"""Callbacks, samples and optimizers that a user's program gives to `train`.

References: a text's windows given as samples train as the text does; torch's AdamW given as a factory trains as `optimizer.kind: adamw`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from moe import Callback
from moe.data import open_data
from moe.data.given import open_given
from moe.parallelize.build import whole_layouts
from moe.parallelize.engines import check_given, given_of
from moe.recipe.sections import Run
from moe.train.loop import recorded, trainer
from moe.train.parts.callbacks import Now
from moe.train.use import opened
from parallel.errors import BadInput
from parallel.mesh.mesh import Degrees, Mesh
from parallel.store.stored import Reader
from tests.support import trained


class Listens(Callback):
    """A callback that collects (event, step, record) of each of its calls."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, int, dict[str, Any]]] = []

    def on_train_begin(self, now: Now) -> None:
        self.heard.append(("begin", now.step, dict(now.record)))

    def on_step_end(self, now: Now) -> None:
        self.heard.append(("step", now.step, dict(now.record)))

    def on_evaluate(self, now: Now) -> None:
        self.heard.append(("evaluate", now.step, dict(now.record)))

    def on_save(self, now: Now) -> None:
        assert Reader(Path(now.record["path"])).state["counters"]["step"] == now.record["step"], "it is whole"
        self.heard.append(("save", now.record["step"], dict(now.record)))

    def on_train_end(self, now: Now) -> None:
        self.heard.append(("end", now.step, dict(now.record)))


def sparse(home: Path, **sections: dict[str, Any]) -> Run:
    return trained.recipe(home, **sections)


# --- callbacks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_callbacks_are_called_once_an_event_with_the_lines_of_metrics(mode: str, home: Path, tmp_path: Path) -> None:
    listens = Listens()
    run = sparse(home, train={"steps": 4, "eval_every": 2, "save_every": 2, "save_mode": mode})
    (summary,) = trained.train(run, tmp_path / "run", own=lambda rank: {"callbacks": [listens]})
    order = [(event, step) for event, step, _ in listens.heard if event != "save"]
    steps = [("step", 1), ("step", 2), ("evaluate", 2), ("step", 3), ("step", 4), ("evaluate", 4)]
    assert order == [("begin", 0), *steps, ("end", 4)]
    assert [step for event, step, _ in listens.heard if event == "save"] == [2, 4]
    kept = {kind: [line for line in trained.lines(tmp_path / "run", kind)] for kind in ("train", "eval")}
    assert [r["loss"] for e, _, r in listens.heard if e == "step"] == [line["loss"] for line in kept["train"]]
    assert [r["validation_loss"] for e, _, r in listens.heard if e == "evaluate"] == [line["validation_loss"] for line in kept["eval"]]
    assert listens.heard[-1][2] == summary


class Stops(Callback):
    """A callback that asks to stop, on one rank, at the given event ("begin", "step" or "evaluate") of a step."""

    def __init__(self, rank: int, event: str, step: int) -> None:
        self.rank, self.event, self.step = rank, event, step

    def _at(self, event: str, now: Now) -> None:
        if (now.rank, event, now.step) == (self.rank, self.event, self.step):
            now.stop("enough")

    def on_train_begin(self, now: Now) -> None:
        self._at("begin", now)

    def on_step_end(self, now: Now) -> None:
        self._at("step", now)

    def on_evaluate(self, now: Now) -> None:
        self._at("evaluate", now)


@pytest.mark.parametrize(("event", "rank", "step"), [("step", 1, 3), ("evaluate", 0, 3), ("begin", 1, 0)])
def test_a_run_stopped_by_a_callback_is_saved_and_resumes_bitwise(event: str, rank: int, step: int, home: Path, tmp_path: Path) -> None:
    run = sparse(home, train={"steps": 5, "eval_every": 3, "save_every": 0})
    found = trained.train(run, tmp_path / "run", ranks=2, own=lambda here: {"callbacks": [Stops(rank, event, step)]})
    assert [summary["steps"] for summary in found] == [step, step]
    assert trained.checkpoints(tmp_path / "run") == [step]
    assert ("stopped", step) in trained.events(tmp_path / "run") and len(trained.lines(tmp_path / "run", "eval")) == 1
    (again, _) = trained.train(run, tmp_path / "run", ranks=2)
    assert again["steps"] == 5
    trained.train(run, tmp_path / "unbroken", ranks=2)
    assert trained.losses(tmp_path / "run") == trained.losses(tmp_path / "unbroken")


def test_a_stop_of_what_is_saved_saves_nothing_again_and_one_at_the_last_step_is_none(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = sparse(home, train={"steps": 4, "save_every": 0})
    for event, step in (("step", 3), ("begin", 3), ("step", 4)):
        assert trainer.train(run, out=tmp_path / "run", callbacks=[Stops(0, event, step)])["steps"] == step
    events = [event for event in trained.events(tmp_path / "run") if event[0] != "resumed"]
    assert events == [("saved", 3), ("stopped", 3), ("stopped", 3), ("saved", 4)]
    assert [line["step"] for line in trained.lines(tmp_path / "run", "eval")] == [3, 4]
    said = capsys.readouterr().out
    assert "raise train.steps" not in said and "stopped at step 4" not in said


def test_what_is_set_on_a_callback_is_called(home: Path, tmp_path: Path) -> None:
    heard: list[int] = []
    one = Callback()
    one.on_step_end = lambda now: heard.append(now.step)  # type: ignore[method-assign]
    trained.train(sparse(home, train={"steps": 2}), tmp_path / "run", own=lambda rank: {"callbacks": [one]})
    assert heard == [1, 2]


class Raises(Callback):
    def on_step_end(self, now: Now) -> None:
        if (now.rank, now.step) == (1, 2):
            raise KeyError("boom")


def test_what_one_rank_raises_ends_all_of_them_in_one_line(home: Path, tmp_path: Path) -> None:
    run = sparse(home, train={"steps": 4, "save_every": 1})
    lines = trained.train(run, tmp_path / "run", ranks=2, own=lambda rank: {"callbacks": [Listens(), Raises()]})
    assert lines[0] == lines[1]
    assert (
        lines[0].startswith("callback Raises.on_step_end raised KeyError: 'boom' (test_own.py, line ") and "on rank 1 at step 2" in lines[0]
    )
    assert trained.checkpoints(tmp_path / "run") == [1]


class Misspelt(Callback):
    def on_step(self, now: Now) -> None: ...


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([Listens], "got the class Listens, needed an instance of it; fix: write Listens()"),
        (Listens(), "got a Listens, needed a list of callbacks"),
        ([print], "got a builtin_function_or_method, needed objects of subclasses of moe.Callback"),
        ([Misspelt()], "got a method on_step, which nothing calls, needed one of on_train_begin, on_step_end"),
    ],
)
def test_what_is_no_callback_is_refused_before_anything_is_written(given: Any, said: str, home: Path, tmp_path: Path) -> None:
    (line,) = trained.train(sparse(home), tmp_path / "run", own=lambda rank: {"callbacks": given})
    assert line.startswith("callbacks: ") and said in line
    assert not (tmp_path / "run").exists()


def test_callbacks_on_one_rank_alone_are_refused_on_all(home: Path, tmp_path: Path) -> None:
    lines = trained.train(sparse(home), tmp_path / "run", ranks=2, own=lambda rank: {"callbacks": [Listens()] if rank == 0 else []})
    assert all("needed the same callbacks on every rank" in line for line in lines)


# --- samples given by a program -------------------------------------------------------------------------------------------


def windows(run: Run) -> dict[str, list[list[int]]]:
    """Return {"train", "validation": list of windows of token ids} of the run's text."""
    data = open_data(run.data, max_length=run.model.max_length, vocab_size=run.vocab_size, seed=run.train.seed, log=lambda _: None)
    sides = {"train": data.train.windows, "validation": data.validation.windows}  # type: ignore[union-attr]
    return {name: side.read(torch.arange(side.num_windows).numpy()).tolist() for name, side in sides.items()}


def given(run: Run) -> Run:
    """Return the recipe without the path of its text, for samples given by a program."""
    return run.model_copy(update={"data": run.data.model_copy(update={"path": None})})


def test_windows_of_a_text_given_as_samples_train_as_the_text_does(home: Path, tmp_path: Path) -> None:
    run = sparse(home, train={"steps": 4, "save_every": 2})
    samples = windows(run)
    trained.train(run, tmp_path / "text", ranks=2)
    trained.train(given(run), tmp_path / "own", ranks=2, own=lambda rank: {"data": samples})
    assert trained.losses(tmp_path / "own") == trained.losses(tmp_path / "text")
    assert [line["validation_loss"] for line in trained.lines(tmp_path / "own", "eval")] == [
        line["validation_loss"] for line in trained.lines(tmp_path / "text", "eval")
    ]


@pytest.mark.parametrize("form", ["iterable", "generator"])
def test_a_run_that_goes_on_reads_the_samples_that_an_unbroken_one_does_on_any_number_of_ranks(
    form: str, home: Path, tmp_path: Path
) -> None:
    run = given(sparse(home, train={"steps": 5, "save_every": 2}))
    drawn = torch.randint(250, (21, 13), generator=torch.Generator().manual_seed(3))
    rows = [{"input_ids": row[: 5 + n % 9].tolist()} for n, row in enumerate(drawn)]  # of 5 to 13 ids

    def data(rank: int) -> dict[str, Any]:
        endless = (rows[n % 21] for n in range(100))
        train = {"iterable": _Iterable(rows), "generator": endless}[form]
        return {"data": {"train": train, "validation": rows[:5]}}

    trained.train(run, tmp_path / "whole", own=data)
    trained.train(run, tmp_path / "cut", ranks=2, own=data, before=trained.stop_at(2))
    trained.train(run, tmp_path / "cut", own=data)
    assert len(trained.lines(tmp_path / "cut")) == 5
    trained.close(tmp_path / "cut", tmp_path / "whole", rel=1e-5)


class _Iterable:
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


def test_a_run_that_was_given_samples_does_not_go_on_without_them(home: Path, tmp_path: Path) -> None:
    run = given(sparse(home, train={"steps": 2}))
    trained.train(run, tmp_path / "run", own=lambda rank: {"data": [[1, 2, 3]] * 9})
    stored = sparse(home, train={"steps": 4}, data={"source": "given", "path": None})
    (line,) = trained.train(stored, tmp_path / "run")
    assert line.startswith("data.source: got given, needed the object itself, from Python: train(run, data=...)")


class Broken(list[list[int]]):
    def __getitem__(self, at: Any) -> Any:
        if at == 7:
            raise OSError("the disk is gone")
        return super().__getitem__(at)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (Broken([[1, 2]] * 15), "data, sample 7 of train: got OSError: the disk is gone"),
        ({"train": [[1, 2]] * 9, "validation": Broken([[1, 2]] * 8)}, "data, sample 7 of validation: got OSError: the disk is gone"),
        ([[1, 2], [3, 300]] * 8, "needed ids from 0 to 255; fix: set data.tokenizer to ids and data.vocab_size to at least 301"),
        ([[1] * 14] * 8, "got 14 ids, needed 2 to model.max_length + 1 = 13; fix: cut it, or set model.max_length to 13"),
        ([[[1, 2], [3, 4]]] * 8, "fix: give one sequence of token ids for each sample, not a batch of them"),
        ([["a", "b"]] * 8, "needed whole numbers in one dimension"),
        (iter([[1, 2]]), 'fix: give {"train": it, "validation": a list of samples}'),
        ({"train": iter([[1, 2]] * 9), "validation": [[1, 2]]}, "got an iterator that ended after 9 samples"),
        ({"trian": [[1, 2]]}, "got a dict of trian, needed a dict of train"),
        ("text.txt", "needed samples: an object with len() and [], or an iterable"),
        ([], "got no samples"),
        (
            [{"input_ids": [1, 2], "text": "a", "idx": 3}] * 8,
            "got a row with text, idx, needed only the columns input_ids, attention_mask, labels",
        ),
        ([{"input_ids": [1, 2, 3], "labels": [1, 2]}] * 8, "of train, labels: got 2 numbers, needed 3, one for each id"),
        ([{"input_ids": [1, 2, 3], "labels": [2, 3, -100]}] * 8, "got 2 at index 0, where input_ids has 1"),
        ([{"input_ids": [1, 2, 3], "labels": [1, -100, -100]}] * 8, "fix: leave the sample out: nothing is predicted in it"),
        ([{"input_ids": [1, 2, 3], "attention_mask": [0, 1, 1]}] * 8, "got a zero before a one, needed ones, then zeros"),
        ([{"input_ids": [1, 2, 3], "attention_mask": [1, 2, 1]}] * 8, "got the number 2"),
        ([{"input_ids": [1, 2, 0], "attention_mask": [1, 1, 0], "labels": [1, 2, 0]}] * 8, "fix: write -100 for the padding"),
        ([{"input_ids": [1, 0, 0], "attention_mask": [1, 0, 0]}] * 8, "got 1 id,"),
    ],
)
def test_samples_that_are_none_are_refused_on_every_rank_in_one_line(data: Any, said: str, home: Path, tmp_path: Path) -> None:
    ranks = 2 if "the disk" in said else 1  # on two ranks, only one reads the broken sample
    lines = trained.train(given(sparse(home)), tmp_path / "run", ranks=ranks, own=lambda rank: {"data": data})
    assert len(set(lines)) == 1 and said in lines[0] and "\n" not in lines[0]


def rows_with_labels() -> list[dict[str, list[int]]]:
    """Return eight padded samples of different lengths. Labels are -100 in their prompts, at every seventh id, and in the padding."""
    drawn = torch.randint(1, 250, (8, 13), generator=torch.Generator().manual_seed(3)).tolist()
    rows = []
    for n, ids in enumerate(drawn):
        length, prompt = 6 + n, 1 + n // 2
        labels = [-100 if at < prompt or at % 7 == 6 or at >= length else i for at, i in enumerate(ids)]
        rows.append({"input_ids": ids, "attention_mask": [int(at < length) for at in range(13)], "labels": labels})
    return rows


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "micro-batches": (1, {"pipeline": {"microbatches": 4}}),
    "dp": (2, {}),
    "pp": (2, {"degrees": {"pp": 2}, "pipeline": {"microbatches": 2}}),
    "sp": (2, {"degrees": {"sp": 2}}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_loss_is_the_mean_over_all_labels_on_any_layout(layout: str, home: Path, tmp_path: Path) -> None:
    """Ranks and micro-batches have different numbers of labels; each label of the global batch counts alike, in training and evaluation.
    The reference is torch's cross-entropy of the whole model's logits."""
    ranks, sections = LAYOUTS[layout]
    exact = {"model": {"dropout": 0.0}, "router": {"jitter": 0.0, "capacity_factor": 4.0}, "optimizer": {"lr": 1e-30}}
    train = {"steps": 1, "eval_every": 1, "save_every": 1, "global_batch": 8, "eval_sequences": 8}
    run, rows = given(sparse(home, train=train, precision={"compute": "fp32"}, **exact, **sections)), rows_with_labels()
    trained.train(run, tmp_path / "run", ranks=ranks, own=lambda rank: {"data": {"train": rows, "validation": rows}})
    ids, labels = (torch.tensor([row[name] for row in rows]) for name in ("input_ids", "labels"))
    with torch.no_grad():
        logits = opened.open(tmp_path / "run").model(ids[:, :-1]).logits_BLV
    plain = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()).item()
    assert trained.lines(tmp_path / "run")[0]["loss"] == pytest.approx(plain, rel=1e-6)
    assert trained.lines(tmp_path / "run", "eval")[0]["validation_loss"] == pytest.approx(plain, rel=1e-6)


def test_padding_is_the_same_with_a_mask_and_cut_off(home: Path, tmp_path: Path) -> None:
    run, masked = given(sparse(home, train={"steps": 3})), rows_with_labels()
    cut = [{"input_ids": row["input_ids"][: sum(row["attention_mask"])]} for row in masked]
    for name, rows in (("mask", [{k: row[k] for k in ("input_ids", "attention_mask")} for row in masked]), ("cut", cut)):
        trained.train(run, tmp_path / name, own=lambda rank, rows=rows: {"data": rows})  # type: ignore[misc]
    assert trained.losses(tmp_path / "mask") == trained.losses(tmp_path / "cut")


@pytest.mark.parametrize("form", ["indexable", "iterable"])
def test_other_samples_on_one_rank_than_on_another_are_refused_on_all(form: str, home: Path, tmp_path: Path) -> None:
    rows = [[n, n + 1, n + 2] for n in range(20)]

    def data(rank: int) -> dict[str, Any]:
        return {"data": rows[rank::2] if form == "indexable" else {"train": _Iterable(rows[rank:]), "validation": rows[:5]}}

    lines = trained.train(given(sparse(home)), tmp_path / "run", ranks=2, own=data)
    assert len(set(lines)) == 1 and "got different samples on different ranks" in lines[0]


def test_files_of_chats_that_differ_are_refused_on_all_ranks(home: Path, tmp_path: Path) -> None:
    """The files have the same number of chats and of tokens, and differ in one predicted token."""
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        rows = ({"prompt": "a", "completion": "bc" if number < 3 or not rank else "bd"} for number in range(4))
        (tmp_path / str(rank) / "chats.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    run = sparse(home, data={"source": "chat", "path": "chats.jsonl"})
    lines = trained.train(run, tmp_path / "run", ranks=2, before=lambda rank: os.chdir(tmp_path / str(rank)))
    assert len(set(lines)) == 1 and "got different samples on different ranks" in lines[0]
    assert lines[0].endswith("fix: give every rank all samples, or files of equal content")


def test_the_sample_of_a_run_of_chats_is_an_answer(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts: list[str] = []
    monkeypatch.setattr(recorded, "sample", lambda *_, prompt, **__: prompts.append(prompt) or "text")
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}")
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}]}
    (tmp_path / "chats.jsonl").write_text(4 * f"{json.dumps(row)}\n")
    run = sparse(home, data={"source": "chat", "path": str(tmp_path / "chats.jsonl"), "chat_template": str(template)}, train={"steps": 1})
    trained.train(run, tmp_path / "run")
    assert prompts == ["u:Hello!;a:"]


@pytest.mark.parametrize(("count", "share"), [(2, 0.9), (9, 0.99), (9, 0.01)])
def test_of_any_share_something_is_held_out_and_something_trained_on(count: int, share: float) -> None:
    found = open_given([[1, 2, 3]] * count, max_length=4, vocab_size=5, validation_share=share, seed=0, say=print)
    assert found.train.num_windows >= 1 and found.validation.windows.num_windows >= 1  # type: ignore[union-attr]
    assert found.train.num_windows + found.validation.windows.num_windows == count  # type: ignore[union-attr]


# --- an optimizer given by a program --------------------------------------------------------------------------------------


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)


@pytest.mark.parametrize(
    "layout",
    [
        (1, {}),
        (2, {"degrees": {"ep": 2}}),
        (2, {"sharding": {"kind": "fsdp"}}),
        (2, {"degrees": {"pp": 2}, "pipeline": {"microbatches": 2}}),
    ],
)
def test_torchs_adamw_as_a_factory_trains_as_the_kind_does(layout: tuple[int, dict[str, Any]], home: Path, tmp_path: Path) -> None:
    ranks, sections = layout
    run = sparse(home, **sections, train={"steps": 3})
    own: Callable[[int], dict[str, Any]] = lambda rank: {"optimizer": adamw}  # noqa: E731
    trained.train(run, tmp_path / "kind", ranks=ranks)
    trained.train(run, tmp_path / "own", ranks=ranks, own=own)
    trained.close(tmp_path / "own", tmp_path / "kind", rel=1e-6)


def test_a_run_with_an_own_optimizer_goes_on_to_the_bit_and_only_with_it(home: Path, tmp_path: Path) -> None:
    run = sparse(home, train={"steps": 5, "save_every": 2})
    own: Callable[[int], dict[str, Any]] = lambda rank: {"optimizer": torch.optim.RMSprop}  # noqa: E731
    trained.train(run, tmp_path / "whole", own=own)
    trained.train(run, tmp_path / "cut", own=own, before=trained.stop_at(2))
    (line,) = trained.train(run, tmp_path / "cut")
    assert line.startswith("optimizer.kind: got adamw, needed given")
    trained.train(run, tmp_path / "cut", own=own)
    assert trained.losses(tmp_path / "cut") == trained.losses(tmp_path / "whole")


class ByNorm(torch.optim.Optimizer):
    """An optimizer that divides a gradient by its norm, so it needs whole matrices: the update of a shard would differ."""

    def __init__(self, groups: Any, *, by_expert: bool = True) -> None:
        super().__init__(groups, {"lr": 0.1})
        self.by_expert = by_expert

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                dims = (-2, -1) if weight.ndim > 1 and self.by_expert else tuple(range(weight.ndim))
                weight.sub_(group["lr"] * weight.grad / (weight.grad.square().sum(dims, keepdim=True).sqrt() + 1e-6))


def test_an_optimizer_of_whole_matrices_is_taken_where_ranks_hold_them_whole(home: Path, tmp_path: Path) -> None:
    run = sparse(home, degrees={"ep": 2}, train={"steps": 2})
    one, two = tmp_path / "one", tmp_path / "two"
    trained.train(sparse(home, train={"steps": 2}), one, own=lambda rank: {"optimizer": ByNorm})
    trained.train(run, two, ranks=2, own=lambda rank: {"optimizer": ByNorm})
    trained.close(two, one, rel=1e-5)


class Counts(ByNorm):
    """An optimizer whose step count is in `param_groups`. Checkpoints store only `state`, so it cannot be resumed."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["made"] = group.get("made", 0) + 1
            group["lr"] /= group["made"]
        super().step()


class OfAll(torch.optim.SGD):
    """An optimizer that divides gradients by their common norm, which differs between ranks that hold different parameters."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        held = [weight for group in self.param_groups for weight in group["params"]]
        length = sum(weight.grad.square().sum() for weight in held).sqrt()
        for weight in held:
            weight.grad /= length
        super().step()


def test_an_optimizer_that_couples_parameters_is_refused_where_ranks_hold_different_ones(home: Path) -> None:
    run = trained.recipe(home, model={"moe_every": 0})
    staged = run.model_copy(update={"degrees": run.degrees.model_copy(update={"pp": 2})})
    for factory, refused in ((OfAll, True), (torch.optim.RMSprop, False)):
        rule = given_of(run.optimizer, factory)
        check_given(rule, run, whole_layouts(run), Mesh.of(Degrees()))
        with pytest.raises(BadInput, match="depends on other parameters") if refused else nullcontext():
            check_given(rule, staged, whole_layouts(run), Mesh.of(Degrees(pp=2)))


class Wide(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for weight in self.param_groups[0]["params"]:
            self.state[weight]["history"] = torch.zeros(4, *weight.shape)


@pytest.mark.parametrize(
    ("factory", "sections", "said"),
    [
        (lambda groups: 1 / 0, {}, "got ZeroDivisionError: division by zero, needed a function of torch's parameter groups"),
        (lambda groups: "sgd", {}, "got a str, needed"),
        (lambda groups: torch.optim.SGD(groups[0]["params"][:0] or [torch.zeros(1)]), {}, "got an optimizer of 1 parameters, not of the"),
        (lambda groups: torch.optim.SGD([g | {"lr": 3.0} for g in groups]), {}, "got a parameter group with its own learning rate"),
        (torch.optim.LBFGS, {}, "got an optimizer whose step() raised TypeError: LBFGS.step() missing 1 required"),
        (torch.optim.NAdam, {}, "got an optimizer that keeps mu_product, a tensor [] of torch.float32"),
        (Wide, {}, "got an optimizer that keeps history, a tensor [4,"),
        (Counts, {}, "got an optimizer that does not continue from its saved states"),
        (ByNorm, {"sharding": {"kind": "fsdp"}}, "in the whole parameter, because the parameter is cut along dim"),
        (lambda groups: ByNorm(groups, by_expert=False), {}, "the whole parameter, because the experts of a layer are stacked"),
        (
            torch.optim.SGD,
            {"sharding": {"kind": "zero", "engine": "deepspeed"}},
            "optimizer.kind: got given with sharding.engine=deepspeed",
        ),
        (torch.optim.SGD, {"optimizer": {"kind": "muon"}}, "got muon, and train(run, optimizer=...) as well"),
    ],
)
def test_what_no_engine_or_checkpoint_can_take_is_refused_in_one_line(
    factory: Any, sections: dict[str, Any], said: str, home: Path, tmp_path: Path
) -> None:
    (line,) = trained.train(sparse(home, **sections), tmp_path / "run", own=lambda rank: {"optimizer": factory})
    assert said in line and "\n" not in line
    assert trained.checkpoints(tmp_path / "run") == []
