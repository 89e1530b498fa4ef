"""A run continues where it stopped: on the same layout bit by bit, on another layout up to rounding, and never with another model.

A signal to any one rank stops all ranks at the same step, after they have saved.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moe.recipe.sections import Run
from moe.records import metrics
from moe.train.loop import trainer
from parallel.process.process import World
from parallel.store.saver import Saver
from parallel.store.stored import Reader
from tests.support import trained

STEPS, AT = 9, 4  # AT: step at which a run is interrupted; not a multiple of save_every

HOST = {"kind": "zero", "offload": {"optimizer": "cpu"}}
Layout = tuple[int, dict[str, dict[str, Any]]]  # number of ranks, and the recipe's values
LAYOUTS: dict[str, Layout] = {
    "dp 1": (1, {"degrees": {"ep": 1}}),
    "dp 2 ep 1": (2, {"degrees": {"ep": 1}}),
    "dp 2 ep 2": (2, {"degrees": {"ep": 2}}),
    "dp 2 ep 2, 2 micro-batches": (2, {"degrees": {"ep": 2}, "pipeline": {"microbatches": 2}}),
    "dp 2 ep 2 zero": (2, {"degrees": {"ep": 2}, "sharding": {"kind": "zero"}}),
    "dp 4 ep 2": (4, {"degrees": {"ep": 2}}),
    "dp 4 ep 2 zero": (4, {"degrees": {"ep": 2}, "sharding": {"kind": "zero"}}),
    "dp 4 ep 2 zero 3": (4, {"degrees": {"ep": 2}, "sharding": {"kind": "zero", "stage": 3}}),
    "dp 2 ep 1 zero 2, host": (2, {"degrees": {"ep": 1}, "sharding": {"kind": "zero", "stage": 2, "offload": {"optimizer": "cpu"}}}),
    "dp 2 ep 2 fsdp": (2, {"degrees": {"ep": 2}, "sharding": {"kind": "fsdp"}}),
    "tp 2": (2, {"degrees": {"tp": 2}}),
    "tp 2 dp 2 zero": (4, {"degrees": {"tp": 2}, "sharding": {"kind": "zero"}}),
    "pp 2, the head alone": (2, {"degrees": {"pp": 2}, "pipeline": {"microbatches": 4, "layers": (2, 0)}}),
    "pp 2 chimera": (2, {"degrees": {"pp": 2}, "pipeline": {"microbatches": 2, "schedule": "chimera"}}),
    "pp 2 dp 2 ep 2 zero, the embedding alone, host": (
        4,
        {"degrees": {"pp": 2, "ep": 2}, "pipeline": {"schedule": "zb_h1", "layers": (0, 2)}, "sharding": HOST},
    ),
}

# layouts of one run that is interrupted and resumed after every two steps (a signal needs a second step to take effect)
THROUGH_GRIDS: tuple[Layout, ...] = (
    (3, {"degrees": {"ep": 1}}),
    (4, {"degrees": {"sp": 4, "ep": 4}, "sequence": {"kind": "ring", "order": "striped"}}),
    (4, {"degrees": {"tp": 2, "ep": 2}, "sharding": {"kind": "zero", "stage": 3}}),
    (8, {"degrees": {"tp": 8, "ep": 2}, "tensor": {"kind": "3d"}, "sharding": {"kind": "fsdp"}}),
    (4, {"degrees": {"tp": 2, "sp": 2}, "sharding": {"kind": "zero", "stage": 3}}),
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    trained.warm_zero()
    with pytest.MonkeyPatch.context() as patch:
        yield trained.home(tmp_path_factory.mktemp("home"), patch)


def recipe(home: Path, layout: str = "dp 1", changed: dict[str, dict[str, Any]] | None = None) -> Run:
    sections = LAYOUTS[layout][1] | (changed or {})
    return trained.recipe(home, **(sections | {"train": {"steps": STEPS} | sections.get("train", {})}))


def go(run: Run, out: Path, layout: str = "dp 1", **options: Any) -> list[Any]:
    return trained.train(run, out, ranks=LAYOUTS[layout][0], **options)


@pytest.fixture(scope="module")
def interrupted(home: Path) -> Callable[[str], Path]:
    """Return a function: name of a layout -> folder of a run interrupted at step AT. Each runs once."""
    made: dict[str, Path] = {}

    def get(layout: str) -> Path:
        if layout not in made:
            part = home / f"{layout} part"
            stopped = go(recipe(home, layout), part, layout, before=trained.stop_at(AT - 1))
            assert stopped == [trained.STOPPED] * LAYOUTS[layout][0]
            made[layout] = part
        return made[layout]

    return get


@pytest.fixture(scope="module")
def left(home: Path, interrupted: Callable[[str], Path]) -> Callable[[str], tuple[Path, Path]]:
    """Return a function: name of a layout -> (folder of a complete run, folder of a run interrupted at step AT)."""
    made: dict[str, Path] = {}

    def get(layout: str) -> tuple[Path, Path]:
        if layout not in made:
            made[layout] = home / f"{layout} whole"
            assert all(isinstance(summary, dict) for summary in go(recipe(home, layout), made[layout], layout))
        return made[layout], interrupted(layout)

    return get


def save_what_was_loaded(again: Path) -> None:
    """Patch this process: after a resume and before training, it saves the loaded state as a checkpoint in the folder `again`."""
    loop = trainer._loop

    def hooked(job: trainer.Job, asked: Callable[[], bool]) -> None:
        again.mkdir(exist_ok=True)
        first, job.saves.saver = job.saves.saver, Saver(again / "checkpoints", job.mesh.axis("world"), keep=1)
        trainer._save(job, wait=True)
        job.saves.saver = first
        loop(job, asked)

    trainer._loop = hooked


def copied(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    return to


# --- layouts ----------------------------------------------------------------------------------------------------------


# Each layout is the source or the target of a resume at least once (dp 2 ep 1: test_three_resumes_on_three_layouts). All layouts'
# checkpoints hold the same tensors, so not all pairs run: tests/parallel/store/test_checkpoint.py converts between 12 layouts.
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("dp 1", "dp 2 ep 2, 2 micro-batches"),
        ("dp 4 ep 2 zero 3", "dp 2 ep 2 fsdp"),
        ("dp 2 ep 2 fsdp", "dp 2 ep 1 zero 2, host"),
        ("tp 2", "dp 4 ep 2 zero"),
        ("dp 2 ep 2", "tp 2 dp 2 zero"),
        ("dp 2 ep 2 zero", "pp 2 chimera"),
        ("pp 2 chimera", "dp 4 ep 2"),
        ("pp 2, the head alone", "pp 2 dp 2 ep 2 zero, the embedding alone, host"),
        ("pp 2 dp 2 ep 2 zero, the embedding alone, host", "dp 1"),
    ],
)
def test_another_layout_goes_on_with_the_same_state_and_losses(
    source: str,
    target: str,
    home: Path,
    left: Callable[[str], tuple[Path, Path]],
    interrupted: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    """The resumed run loads equal bits, keeps the lines before, and has the losses of a run on one layout that was never interrupted."""
    (whole, _), part = left("dp 2 ep 2"), interrupted(source)
    out, again = copied(part, tmp_path / "run"), tmp_path / "again"
    ends = go(recipe(home, target), out, target, before=lambda rank: save_what_was_loaded(again))
    assert all(isinstance(summary, dict) for summary in ends)
    assert trained.tensors(again / f"checkpoints/step-{AT}") == trained.tensors(part / f"checkpoints/step-{AT}")
    assert trained.losses(out)[:AT] == trained.losses(part)
    trained.close(out, whole, rel=1e-5)
    assert [line["step"] for line in trained.lines(out)] == list(range(1, STEPS + 1))


def test_a_run_goes_from_rings_to_grids_and_back(home: Path, tmp_path: Path) -> None:
    """A run resumed on one layout after another (THROUGH_GRIDS) loads bitwise equal weights and moments each time. Its losses equal
    those of one uninterrupted process. Every layout can divide the batch of 24."""
    whole, out, steps = tmp_path / "whole", tmp_path / "run", 2 * len(THROUGH_GRIDS)
    train = {"steps": steps, "global_batch": 24, "eval_sequences": 24, "save_every": steps}
    trained.train(trained.recipe(home, train=train), whole)
    for life, (ranks, sections) in enumerate(THROUGH_GRIDS):
        left, again = 2 * life, tmp_path / f"again-{life}"

        def before(rank: int, left: int = left, again: Path = again) -> None:
            if left + 2 < steps:
                trained.stop_at(left + 1)(rank)
            if left:
                save_what_was_loaded(again)

        ends = trained.train(trained.recipe(home, **sections, train=train), out, ranks=ranks, before=before)
        assert (ends == [trained.STOPPED] * ranks) == (left + 2 < steps), ends
        assert trained.checkpoints(out)[-1] == left + 2
        if left:
            assert trained.tensors(again / f"checkpoints/step-{left}") == trained.tensors(out / f"checkpoints/step-{left}")
    trained.close(out, whole, rel=1e-5)


def test_three_resumes_on_three_layouts(home: Path, left: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    whole, _ = left("dp 2 ep 2")
    out = tmp_path / "run"
    lives = [("dp 2 ep 2", 2), ("dp 1", 4), ("dp 2 ep 2 zero", 7), ("dp 2 ep 1", None)]
    for life, (layout, until) in enumerate(lives):
        stop = trained.stop_at(until - 1) if until else lambda rank: None

        def before(rank: int, life: int = life, stop: Callable[[int], None] = stop) -> None:
            stop(rank)
            trained.log_draws(tmp_path, rank, life)

        ends = go(recipe(home, layout), out, layout, before=before)
        assert (set(map(str, ends)) == {trained.STOPPED}) == (until is not None)
        assert trained.checkpoints(out)[-1] == (until or STEPS)
    trained.close(out, whole, rel=1e-5)
    assert [event for event in trained.events(out) if event[0] == "resumed"] == [("resumed", 2), ("resumed", 4), ("resumed", 7)]
    # all ranks together read every window once, in the order that the recipe's seed gives
    expected = trained.order(recipe(home), STEPS)
    found: list[int] = []
    for life, (layout, _) in enumerate(lives):
        parts = [tmp_path / f"draws-{life}-{rank}.txt" for rank in range(LAYOUTS[layout][0])]
        found += [int(w) for p in parts for line in p.read_text().splitlines() for w in line.split()[1:]]
    assert sorted(found) == sorted(w for step in expected for w in step)


def test_steps_without_a_drain_stop_and_go_on_where_they_drain(home: Path, tmp_path: Path) -> None:
    """2BW stops only after steps at which its pipeline drains: every 2 steps. A signal in step 5 stops it after step 6; the resumed run
    equals the uninterrupted one."""
    changed = {
        "degrees": {"pp": 2},
        "pipeline": {"schedule": "two_bw", "microbatches": 2, "drain_every": 2},
        "model": {"tied_embeddings": False},
        "optimizer": {"clip_norm": None, "lr": 1e-2, "warmup_steps": 5},
        "train": {"save_every": 3},
    }
    run = recipe(home, changed=changed)
    whole, out = tmp_path / "whole", tmp_path / "run"
    assert all(summary["steps"] == STEPS for summary in trained.train(run, whole, ranks=2))
    assert trained.checkpoints(whole) == [6, 9] and [line["step"] for line in trained.lines(whole)] == list(range(1, STEPS + 1))
    assert trained.train(run, out, ranks=2, before=trained.stop_at(4)) == [trained.STOPPED] * 2
    assert trained.checkpoints(out)[-1] == 6  # the signal came between two drains, in step 5
    assert all(summary["steps"] == STEPS for summary in trained.train(run, out, ranks=2))
    assert trained.losses(out) == trained.losses(whole)
    assert trained.tensors(out / f"checkpoints/step-{STEPS}") == trained.tensors(whole / f"checkpoints/step-{STEPS}")


# --- signals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "rank"), [(signal.SIGTERM, 1), (signal.SIGINT, 0), (signal.SIGUSR1, 1)])
def test_a_signal_to_one_rank_stops_all_at_one_step_and_nothing_is_lost(
    number: signal.Signals, rank: int, home: Path, left: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    whole, _ = left("dp 2 ep 2")
    run, out = recipe(home, "dp 2 ep 2"), tmp_path / "run"
    assert go(run, out, "dp 2 ep 2", before=trained.stop_at(AT, rank=rank, number=number)) == [trained.STOPPED] * 2
    assert trained.checkpoints(out) == [3, AT + 1]
    assert trained.events(out)[-2:] == [("saved", AT + 1), ("stopped", AT + 1)]
    assert not (out / "summary.json").exists()
    assert all(isinstance(summary, dict) for summary in go(run, out, "dp 2 ep 2"))
    assert trained.losses(out) == trained.losses(whole)
    assert trained.tensors(out / f"checkpoints/step-{STEPS}") == trained.tensors(whole / f"checkpoints/step-{STEPS}")


def test_a_signal_in_the_last_step_lets_the_run_end(home: Path, tmp_path: Path) -> None:
    (summary,) = go(recipe(home), tmp_path / "run", before=trained.stop_at(STEPS - 1))
    assert summary["steps"] == STEPS


def test_the_callers_own_signal_handlers_come_back(home: Path, tmp_path: Path) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
    try:
        trainer.train(recipe(home, changed={"train": {"steps": 1}}), out=tmp_path / "run", world=World(), display=False)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert seen == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


# --- starting again ---------------------------------------------------------------------------------------------------


def test_fresh_sets_the_old_checkpoints_aside_and_starts_over(home: Path, left: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    whole, part = left("dp 1")
    out = copied(part, tmp_path / "run")
    go(recipe(home), out, fresh=True)
    assert trained.files(out / "checkpoints.before-1") == trained.files(part / "checkpoints")
    assert trained.losses(out) == trained.losses(whole)
    assert ("resumed", AT) not in trained.events(out)
    assert (out / metrics.PREVIOUS).read_bytes() == (part / metrics.METRICS).read_bytes()
    assert not (out / metrics.PREVIOUS_SUMMARY).exists()
    summary = (out / metrics.SUMMARY).read_bytes()
    (stopped,) = go(recipe(home), out, fresh=True, before=trained.stop_at(1))
    assert stopped == trained.STOPPED
    assert trained.files(out / "checkpoints.before-1") == trained.files(part / "checkpoints")
    assert {"step-6", "step-9"} == {path.name for path in (out / "checkpoints.before-2").iterdir()}
    # the old run's summary must not be taken for the new one's
    assert not (out / metrics.SUMMARY).exists() and (out / metrics.PREVIOUS_SUMMARY).read_bytes() == summary


def test_a_finished_run_started_again_keeps_its_summary(
    home: Path, left: Callable[[str], tuple[Path, Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, _ = left("dp 1")
    out = copied(whole, tmp_path / "run")
    # an old checkpoint that a killed run had not removed: a start that trains nothing must not remove it either
    shutil.copytree(out / "checkpoints/step-9", out / "checkpoints/step-3")
    before = trained.files(out / "checkpoints") | {"summary": (out / "summary.json").read_text()}
    summary = trainer.train(recipe(home), out=out, world=World(), display=True)
    assert summary == metrics.read_summary(whole)
    assert before == trained.files(out / "checkpoints") | {"summary": (out / "summary.json").read_text()}
    assert trained.losses(out) == trained.losses(whole)
    assert f"train.steps {STEPS} was reached before" in capsys.readouterr().out
    trainer.train(recipe(home, changed={"optimizer": {"lr": 2e-3}}), out=out, world=World())
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("resumed", "changed", "train.steps"))]
    assert [line.split(":")[0] for line in told] == [f"train.steps {STEPS} was reached before", "changed since the checkpoint"]
    (summary,) = go(recipe(home, changed={"train": {"steps": STEPS + 2}}), out)  # with more steps, it continues
    assert summary["steps"] == STEPS + 2 and [s for s, _ in trained.losses(out)] == list(range(1, STEPS + 3))


def test_the_summary_counts_all_lives(home: Path, left: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    _, part = left("dp 1")
    out = copied(part, tmp_path / "run")
    (summary,) = go(recipe(home), out)
    lines = trained.lines(out)
    kept, dropped = (sum(layer[what] for line in lines for layer in line["moe"]) for what in ("kept", "dropped"))
    assert summary["dropped_share"] == dropped / (kept + dropped)
    assert summary["train_seconds"] == pytest.approx(sum(line["step_seconds"] for line in lines))
    assert summary["tokens_per_second"] == pytest.approx(sum(line["tokens"] for line in lines) / summary["train_seconds"])


# --- another model, other settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "parameter"),
    [
        ({"model": {"d_ff": 32}}, "layers.0.ffn.w1.weight: got shape [24, 16] in step-4, needed shape [32, 16]"),
        ({"model": {"d_model": 32}}, "embedding: got shape [256, 16] in step-4, needed shape [256, 32]"),
        ({"model": {"moe_every": 0}}, "layers.1.experts.0.w1: got shape [16, 24] in step-4, needed no such parameter"),
        ({"model": {"moe_every": 0}, "experts": {"num_experts": 1}}, "layers.1.experts.0.w1"),
        ({"experts": {"num_experts": 8}}, "layers.1.experts.4.w1: got nothing in step-4, needed shape [16, 24]"),
        ({"model": {"num_layers": 3}}, "layers.2."),
        ({"model": {"tied_embeddings": False}}, "head"),
    ],
)
def test_another_model_is_refused_by_the_first_parameter_that_differs(
    changed: dict[str, dict[str, Any]], parameter: str, home: Path, left: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    _, part = left("dp 2 ep 2")
    out = copied(part, tmp_path / "run")
    (refused,) = go(recipe(home, changed=changed), out)
    assert isinstance(refused, str) and refused.startswith(f"parameter {parameter}") and "\n" not in refused, refused
    assert "fix: resume with the recipe the run was started with" in refused or "--fresh" in refused
    assert trained.files(out) == trained.files(part)  # the old run is unchanged


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"train": {"global_batch": 4}}, "train.global_batch: 8 -> 4"),
        ({"train": {"seed": 3}}, "train.seed: 0 -> 3"),
        ({"model": {"max_length": 16}}, "model.max_length: 12 -> 16"),
        ({"train": {"seed": 3}, "model": {"max_length": 16}}, "model.max_length: 12 -> 16, train.seed: 0 -> 3"),
        ({"data": {"validation_share": 0.3}}, "the training text is not the one this run was started with"),
        ({}, ""),
    ],
)
def test_what_moves_the_order_of_samples_is_said_in_one_line(
    changed: dict[str, dict[str, Any]],
    said: str,
    home: Path,
    left: Callable[[str], tuple[Path, Path]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = copied(left("dp 1")[1], tmp_path / "run")
    trainer.train(recipe(home, changed=changed), out=out, world=World(), display=True)
    told = [line for line in capsys.readouterr().out.splitlines() if "order of samples" in line or "training text" in line]
    assert len(told) == bool(said) and all(said in line for line in told)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model": {"num_heads": 4}}, "model.num_heads: got 4, needed 2, with which step-4 was trained"),
        (
            {"model": {"ffn": "relu"}, "router": {"num_choices": 2}},
            "model.ffn, router.num_choices: got relu, 2, needed gelu, 1, with which",
        ),
        ({"router": {"eval_capacity_factor": 1.0}}, "router.eval_capacity_factor: got 1.0, needed null"),
    ],
)
def test_another_function_of_the_same_weights_is_refused_by_its_keys_and_allowed_by_name(
    changed: dict[str, dict[str, Any]], said: str, home: Path, left: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    """A changed key that leaves all shapes equal, but alters the model's function, is refused unless `--allow-change` names it."""
    _, part = left("dp 1")
    out, run = copied(part, tmp_path / "run"), recipe(home, changed=changed)
    keys = [f"{section}.{key}" for section, fields in changed.items() for key in fields]
    for allowed in ([], keys[1:]):  # every changed key must be allowed
        (refused,) = go(run, out, allow_changes=allowed)
        assert isinstance(refused, str) and "\n" not in refused and f"--allow-change {keys[0]}" in refused, refused
        assert refused.startswith(said) == (allowed == []), refused
    assert trained.files(out) == trained.files(part)
    (summary,) = go(run, out, allow_changes=keys)
    assert summary["steps"] == STEPS
    (event,) = [line for line in trained.lines(out, "event") if line["event"] == "resumed"]
    assert event["allowed"] == ", ".join(keys) and all(f"{key}: " in event["changed"] for key in keys)
    (summary,) = go(run, out)  # allowed changes are not refused again
    assert summary["steps"] == STEPS


def test_every_other_changed_value_is_said_and_recorded(
    home: Path, left: Callable[[str], tuple[Path, Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = copied(left("dp 1")[1], tmp_path / "run")
    changed = {"optimizer": {"lr": 2e-3}, "router": {"jitter": 0.0}, "train": {"save_every": 4}}
    trainer.train(recipe(home, changed=changed), out=out, world=World(), allow_changes=["router.gates"])
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("resumed", "changed", "--allow"))]
    assert told.pop(0).startswith("resumed from")
    assert told == [
        "changed since the checkpoint: router.jitter: 0.05 -> 0.0, optimizer.lr: 0.01 -> 0.002",
        "changed since the checkpoint, for speed, memory or records only: train.save_every: 3 -> 4",
        "--allow-change router.gates has no effect: the key has not changed, or nothing reads it",
    ]
    (event,) = [line for line in trained.lines(out, "event") if line["event"] == "resumed"]
    assert event["changed"] == "router.jitter: 0.05 -> 0.0, optimizer.lr: 0.01 -> 0.002, train.save_every: 3 -> 4"


def test_other_text_keeps_the_checkpoints_tokenizer(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run resumed on other text uses the checkpoint's tokenizer: a tokenizer trained on the new text would change the token ids."""
    text = tmp_path / "text.txt"
    text.write_text(trained.words(3000, seed=0))
    run = recipe(home, changed={"data": {"path": str(text), "tokenizer": "bpe", "vocab_size": 300, "validation_share": 0.2}})
    out = tmp_path / "run"
    assert go(run, out, before=trained.stop_at(AT - 1)) == [trained.STOPPED]
    before = Reader(out / f"checkpoints/step-{AT}").state
    text.write_text(trained.words(3000, seed=1) + "one sentence more")
    for told in ([["the training text is not the one this run was started with"]], []):  # the message comes only once
        trainer.train(run.model_copy(update={"train": run.train.model_copy(update={"steps": STEPS + (not told)})}), out=out, world=World())
        lines = capsys.readouterr().out.splitlines()
        assert [line for line in lines if "training text" in line] == [line for line in lines if told and line.startswith(told[0][0])]
        assert any("with the checkpoint's tokenizer" in line for line in lines) == bool(told)
    after = Reader(out / f"checkpoints/step-{STEPS}").state
    assert after["tokenizer"] == before["tokenizer"] and after["data"] != before["data"]
    fresh = trained.open_data(run.data, max_length=12, vocab_size=300, seed=0).tokenizer
    assert fresh.describe() != before["tokenizer"], "this text would have given another tokenizer, or the test shows nothing"


# --- damage -----------------------------------------------------------------------------------------------------------


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    home: Path, left: Callable[[str], tuple[Path, Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, part = left("dp 1")
    out = copied(part, tmp_path / "run")
    shard = next((out / f"checkpoints/step-{AT}").glob("*.safetensors"))
    raw = bytearray(shard.read_bytes())
    raw[len(raw) // 2] ^= 1
    shard.write_bytes(raw)
    trainer.train(recipe(home), out=out, world=World(), display=True)
    assert f"skipped: checkpoint step-{AT}: got a damaged {shard.name}" in capsys.readouterr().out
    assert ("resumed", 3) in trained.events(out)
    assert trained.losses(out) == trained.losses(whole)


def test_a_disk_that_fills_up_in_a_save_leaves_the_checkpoint_before(
    home: Path, left: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    whole, _ = left("dp 2 ep 2")
    run, out = recipe(home, "dp 2 ep 2"), tmp_path / "run"

    def fill(rank: int) -> None:
        save = Saver.save

        def limited(saver: Saver, **k: Any) -> None:
            if k["step"] != 6 or rank == 0:
                return save(saver, **k)
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))  # a write past it fails as on a full disk
            try:
                return save(saver, **k)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

        Saver.save = limited  # type: ignore[method-assign, assignment]

    first, second = go(run, out, "dp 2 ep 2", before=fill)
    assert first == second and "File too large" in first and "on rank 1" in first and "free disk space" in first
    assert trained.checkpoints(out) == [3]
    assert all(isinstance(summary, dict) for summary in go(run, out, "dp 2 ep 2"))
    assert trained.losses(out) == trained.losses(whole)
