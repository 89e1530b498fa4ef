"""The trainer has the losses of a plain loop over the global batch, for any number of micro-batches and ranks, with or without evaluation.

If a gradient is not finite on any rank, all ranks skip the step or stop. Bad input is refused in one line before anything is written.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import resource
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import moe.report
from moe.checks.sequence import without_effect
from moe.checks.together import check_run
from moe.data import open_data
from moe.data.token_shard import TokenShard
from moe.launch import launch, status
from moe.nn.context import Context
from moe.parallelize.build import build
from moe.parallelize.engines import optimizer_of, start_engine
from moe.recipe.load import resolved_yaml
from moe.recipe.sections import Optimizer, Run
from moe.records import metrics, results
from moe.records.summary import summary_rows
from moe.train.loop import advance, recorded, trainer
from moe.train.loop.step import validation_loss
from moe.train.parts.learning_rate import learning_rate
from moe.train.start import opening
from moe.train.start.opening import title
from moe.train.use import generate
from parallel.errors import BadInput
from parallel.mesh.mesh import Degrees, Mesh
from parallel.process.process import World
from parallel.store.lock import HELD
from tests.support import trained

REAL = [
    (recorded, "sample", generate.sample),
    (recorded, "matmul_flops", results.matmul_flops),
    (recorded, "source_commit", results.source_commit),
    (moe.report, "write_report", moe.report.write_report),
    (metrics, "open_tensorboard", metrics.open_tensorboard),
]
NOISY = {"jitter": 0.1, "preset": "gshard", "capacity_factor": 1.0, "z_weight": 0.01}


def by_hand(run: Run, steps: int) -> list[float]:
    """Train with a plain loop in one process, without engine and micro-batches. Return the loss of each step."""
    model, _ = build(run, Mesh.of(Degrees()), device=torch.device("cpu"))
    data = open_data(run.data, max_length=run.model.max_length, vocab_size=run.vocab_size, seed=run.train.seed)
    weights = dict(model.named_parameters())
    plain = [p for name, p in weights.items() if "norm" in name or "router" in name]
    decayed = [p for name, p in weights.items() if not ("norm" in name or "router" in name)]
    settings = run.optimizer
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": plain, "weight_decay": 0.0}],
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
    )
    losses = []
    for step in range(steps):
        sequences = torch.from_numpy(data.train.batch(step, TokenShard.whole(run.train.global_batch, run.model.max_length)))
        inputs, targets = sequences[:, :-1], sequences[:, 1:]
        output = model(
            inputs, Context.of(inputs, seed=run.train.seed, step=step)
        )  # the model adds gradients of balance and z losses itself
        loss = F.cross_entropy(output.logits_BLV.flatten(0, 1), targets.flatten())
        loss.backward()
        if settings.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(weights.values(), settings.clip_norm)
        for group in optimizer.param_groups:  # sets the learning rate: linear warm-up, then half a cosine
            warm, total = settings.warmup_steps, run.train.steps
            share = 0.5 * (1 + math.cos(math.pi * (step - warm) / (total - warm)))
            low = settings.min_lr_share
            group["lr"] = settings.lr * ((step + 1) / warm if step < warm else low + (1 - low) * share)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# --- losses equal those of a plain loop ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("microbatches", "ranks"), [(1, 1), (4, 1), (1, 2), (2, 2)])
def test_micro_batches_and_ranks_give_the_losses_of_a_plain_loop(microbatches: int, ranks: int, home: Path, tmp_path: Path) -> None:
    run = trained.recipe(
        home,
        pipeline={"microbatches": microbatches},
        router=NOISY,
        optimizer={"clip_norm": 0.5, "warmup_steps": 2},
        experts={"dropout": 0.1},
        model={"dropout": 0.1},
    )
    trained.train(run, tmp_path / "run", ranks=ranks)
    assert [line["loss"] for line in trained.lines(tmp_path / "run")] == pytest.approx(by_hand(run, 6), rel=1e-6)


@pytest.mark.parametrize("ranks", [1, 2])
def test_two_runs_of_one_seed_are_equal_bit_by_bit_and_another_seed_is_another_run(ranks: int, home: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        trained.train(trained.recipe(home, train={"seed": seed}, router=NOISY), tmp_path / name, ranks=ranks)
    assert trained.losses(tmp_path / "a") == trained.losses(tmp_path / "b")
    assert trained.tensors(tmp_path / "a/checkpoints/step-6") == trained.tensors(tmp_path / "b/checkpoints/step-6")
    assert all(x != y for x, y in zip(trained.losses(tmp_path / "a"), trained.losses(tmp_path / "c"), strict=True))


def test_it_learns(home: Path, tmp_path: Path) -> None:
    (summary,) = trained.train(trained.recipe(home, train={"steps": 60, "save_every": 0}), tmp_path / "run")
    uniform = math.log(256)
    assert summary["validation_loss"] < trained.lines(tmp_path / "run")[0]["loss"] - 1 < uniform
    assert summary["bits_per_byte"] == pytest.approx(summary["validation_loss"] / math.log(2))  # with the byte tokenizer, a token is a byte


# --- evaluation ---------------------------------------------------------------------------------------------------------


def evaluations(out: Path) -> list[float]:
    return [line["validation_loss"] for line in trained.lines(out, "eval")]


def test_evaluating_changes_nothing_in_the_training(home: Path, tmp_path: Path) -> None:
    often, never = tmp_path / "often", tmp_path / "never"
    for out, every in ((often, 1), (never, 0)):
        trained.train(trained.recipe(home, train={"eval_every": every}, router=NOISY, model={"dropout": 0.1}), out)
    assert trained.losses(often) == trained.losses(never)
    assert trained.tensors(often / "checkpoints/step-6") == trained.tensors(never / "checkpoints/step-6")
    assert len(evaluations(often)) == 6 and evaluations(often)[-1:] == evaluations(never)


@pytest.mark.parametrize("group", ["sequence", 4])
def test_evaluation_is_the_same_on_any_number_of_ranks(group: str | int, home: Path, tmp_path: Path) -> None:
    for ranks in (1, 2):
        run = trained.recipe(
            home,
            train={"eval_every": 2, "eval_sequences": 6},
            router=NOISY | {"group": group},
            model={"dropout": 0.1},
            experts={"dropout": 0.1},
        )
        trained.train(run, tmp_path / str(ranks), ranks=ranks)
    assert evaluations(tmp_path / "1") == pytest.approx(evaluations(tmp_path / "2"), rel=1e-6)


def test_evaluation_is_dropless_deterministic_and_the_mean_over_the_held_out_tokens(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained.recipe(home, router=NOISY, model={"dropout": 0.1}, experts={"dropout": 0.1}, train={"eval_sequences": 11})
    seen: list[tuple[float, float, int, float]] = []

    def watched(executor: Any, sequences_NL: Tensor, **options: Any) -> float:
        dropped: list[int] = []
        watch = executor.model.register_forward_hook(lambda *a: dropped.extend(int(layer.dropped) for layer in a[2].layers))
        first = validation_loss(executor, sequences_NL, **options)
        torch.rand(3)
        second = validation_loss(executor, sequences_NL, **options)
        watch.remove()
        assert executor.model.training
        executor.model.eval()
        logits_BLV = executor.model(sequences_NL[:, :-1]).logits_BLV
        executor.model.train()
        seen.append((first, second, sum(dropped), F.cross_entropy(logits_BLV.flatten(0, 1), sequences_NL[:, 1:].flatten()).item()))
        return first

    monkeypatch.setattr(recorded, "validation_loss", watched)
    trained.train(run, tmp_path / "run")
    ((first, second, dropped, mean),) = seen
    assert first == second == evaluations(tmp_path / "run")[0]
    assert dropped == 0
    assert first == pytest.approx(mean, rel=1e-6)


# --- weight decay, gradient norm, learning rate -------------------------------------------------------------------------


@pytest.mark.parametrize(("norm", "positions"), [("rmsnorm", "rotary"), ("layernorm", "t5")])
def test_weight_decay_is_on_matrices_alone(norm: str, positions: str, home: Path) -> None:
    """With gradients of 0, a step multiplies matrices by 1 - lr * weight_decay and leaves norms, biases and routers unchanged."""
    run = check_run(trained.recipe(home, model={"norm": norm, "positions": positions, "tied_embeddings": False}), 1)
    mesh = Mesh.of(Degrees())
    model, layouts = build(run, mesh, device=torch.device("cpu"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)  # no element is 0, because 0 would not show decay
    engine = start_engine(run, model, layouts, mesh)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    engine.step(0.5)
    shrunk = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    apart = {name for name in before if "norm" in name or "router" in name or ".bias" in name or name.endswith("bias")}
    assert shrunk == set(before) - apart and apart and {trained.EXPERT, "embedding"} <= shrunk
    assert len([name for name in apart if "bias" in name]) > 0 if norm == "layernorm" else True
    for name in shrunk:
        torch.testing.assert_close(dict(model.named_parameters())[name].detach(), before[name] * (1 - 0.5 * run.optimizer.weight_decay))
    assert optimizer_of(run.optimizer).weight_decay == 0.1


def test_the_norm_in_the_records_is_the_one_before_clipping(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stepped: list[float] = []
    start = opening.start_executor

    def watched(*args: Any, **options: Any) -> Any:
        executor = start(*args, **options)
        engine = executor.engine
        step = engine.step

        def measured(lr: float, *, factor: float) -> None:
            stepped.append(factor * math.sqrt(sum(float(grad.double().square().sum()) for _, grad in engine.owned_gradients())))
            step(lr, factor=factor)

        monkeypatch.setattr(engine, "step", measured)
        return executor

    monkeypatch.setattr(opening, "start_executor", watched)
    found = {}
    for limit in (None, 0.01, 1e6):
        stepped.clear()
        trained.train(trained.recipe(home, optimizer={"clip_norm": limit}, train={"steps": 1}), tmp_path / str(limit))
        found[limit] = trained.lines(tmp_path / str(limit))[0]["grad_norm"], stepped[0]
    assert found[None][0] == found[0.01][0] == found[1e6][0] > 0.01
    assert found[None][1] == pytest.approx(found[None][0], rel=1e-5) and found[0.01][1] == pytest.approx(0.01, rel=1e-5)
    assert found[1e6][1] == found[None][1]


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        ({"schedule": "cosine"}, {0: 0.25, 3: 1.0, 4: 1.0, 12: 0.55, 20: 0.1, 50: 0.1}),
        ({"schedule": "wsd", "decay_share": 0.5}, {0: 0.25, 3: 1.0, 4: 1.0, 10: 1.0, 15: 0.55, 20: 0.1, 50: 0.1}),
        ({"schedule": "constant", "min_lr_share": 0.5}, {0: 0.25, 3: 1.0, 19: 1.0, 50: 1.0}),
        ({"schedule": "cosine", "warmup_steps": 0, "min_lr_share": 0.0}, {0: 1.0, 10: 0.5, 20: 0.0}),
    ],
)
def test_the_learning_rate_is_the_schedules(settings: dict[str, Any], rates: dict[int, float]) -> None:
    optimizer = Optimizer(**({"lr": 2.0, "warmup_steps": 4, "min_lr_share": 0.1} | settings))
    assert {at: learning_rate(at, optimizer, total=20) / 2.0 for at in rates} == pytest.approx(rates)


# --- gradients that are not finite --------------------------------------------------------------------------------------


def poison(parameter: str, steps: range, *, rank: int, value: float = math.nan) -> Callable[[int], None]:
    """Return a `before` function: in `steps`, counted from 0, it sets one element of the parameter's gradient to `value` on `rank`."""

    def before(this: int) -> None:
        accumulate = vars(advance)["accumulate"]

        def poisoned(executor: Any, *args: Any, **options: Any) -> Any:
            handle = None
            if this == rank and options["step"] in steps:
                handle = dict(executor.model.named_parameters())[parameter].register_hook(_bad(value))
            try:
                return accumulate(executor, *args, **options)
            finally:
                if handle is not None:
                    handle.remove()

        vars(advance)["accumulate"] = poisoned

    return before


def _note_states(path: Path) -> None:
    """Make this process append a line to `path` after each training step: the hash of the engine's weights and moments."""

    def note(job: trainer.Job) -> None:
        found = hashlib.sha256(b"".join(held.tensor.detach().numpy().tobytes() for held in job.engine.tensors()))
        with path.open("a") as file:
            print(found.hexdigest(), file=file)

    trained.after_step(note)


def _bad(value: float) -> Callable[[Tensor], Tensor]:
    def bad(grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad.view(-1)[0] = value
        return grad

    return bad


FAMILIES = [(trained.DENSE, "dense"), (trained.ROUTER, "router"), (trained.EXPERT, "expert")]


@pytest.mark.parametrize(("parameter", "family", "kind"), [*((*family, "ddp") for family in FAMILIES), (trained.EXPERT, "expert", "zero")])
def test_a_bad_gradient_on_one_rank_is_skipped_by_all(parameter: str, family: str, kind: str, home: Path, tmp_path: Path) -> None:
    if kind == "zero":
        trained.warm_zero()
    sections: dict[str, dict[str, Any]] = {
        "degrees": {"ep": 2},
        "sharding": {"kind": kind},
        "pipeline": {"microbatches": 2},
        "train": {"save_every": 1, "keep": 9},
    }
    run, out = trained.recipe(home, **sections), tmp_path / "run"

    def before(rank: int) -> None:
        poison(parameter, range(2, 3), rank=1, value=math.inf if family == "router" else math.nan)(rank)
        trained.log_draws(tmp_path, rank, 0)
        _note_states(tmp_path / f"states-{rank}")

    first, second = trained.train(run, out, ranks=2, before=before)
    assert first["skipped"] == second["skipped"] == 1 and first["steps"] == 6
    lines = trained.lines(out)
    assert [line["skipped"] for line in lines] == [False, False, True, False, False, False]
    assert [line["skipped_total"] for line in lines] == [0, 0, 1, 1, 1, 1]
    assert lines[2]["grad_norm"] is None and [name for name, v in lines[2]["grad_norm_parts"].items() if v is None] == [family]
    assert all(math.isfinite(line["loss"]) for line in lines)
    assert lines[3]["lr"] == lines[2]["lr"] != lines[1]["lr"]  # the schedule counts updates, not skipped steps
    (event,) = [line for line in trained.lines(out, "event") if line["event"] == "skipped"]
    assert (event["step"], event["families"]) == (3, family)
    for rank in range(2):
        states = (tmp_path / f"states-{rank}").read_text().split()
        assert states[1] == states[2] and len(set(states)) == 5  # the skipped step changed no weight or moment
    assert trained.checkpoints(out) == [1, 2, 4, 5, 6]  # a skipped step is not saved
    (drawn,) = trained.draws(tmp_path, ranks=2)
    assert [drawn[step] for step in range(6)] == trained.order(run, 6)  # a skipped batch is not drawn again


@pytest.mark.parametrize(("parameter", "family"), FAMILIES)
def test_a_bad_gradient_stops_all_ranks_where_the_recipe_says_so(parameter: str, family: str, home: Path, tmp_path: Path) -> None:
    run, out = trained.recipe(home, degrees={"ep": 2}, train={"on_nan": "stop"}), tmp_path / "run"
    first, second = trained.train(run, out, ranks=2, before=poison(parameter, range(4, 5), rank=1))
    assert first == second and "\n" not in first
    assert first.startswith(f"step 5: got gradients ({family}) that are not finite") and "lower optimizer.lr" in first
    assert trained.checkpoints(out) == [3] and len(trained.lines(out)) == 5


def test_skips_in_a_row_end_the_run_at_max_skips_and_a_good_step_starts_the_count_again(home: Path, tmp_path: Path) -> None:
    run = trained.recipe(home, degrees={"ep": 2}, train={"max_skips": 3, "steps": 9})
    ends = trained.train(run, tmp_path / "row", ranks=2, before=poison(trained.EXPERT, range(2, 9), rank=0))
    assert ends[0] == ends[1] and ends[0].startswith("step 5: got gradients (expert) that are not finite, 3 steps in a row")
    twice = [n for n in range(9) if n % 3 != 0]
    ends = trained.train(run, tmp_path / "twice", ranks=2, before=lambda rank: _each(twice, rank))
    assert [end["skipped"] for end in ends] == [6, 6]


def _each(steps: list[int], rank: int) -> None:
    for step in steps:
        poison(trained.EXPERT, range(step, step + 1), rank=1)(rank)


def fp16(home: Path, **train: Any) -> Run:
    return trained.recipe(home, degrees={"ep": 2}, precision={"compute": "fp16", "loss_scale": "dynamic"}, train=train)


def test_a_dynamic_loss_scale_halves_at_every_overflow_and_goes_on_past_max_skips(home: Path, tmp_path: Path) -> None:
    run = fp16(home, steps=8, max_skips=2, on_nan="stop")  # neither option applies to overflows of a dynamic scale
    ends = trained.train(run, tmp_path / "run", ranks=2, before=poison(trained.DENSE, range(1, 6), rank=1, value=math.inf))
    assert [end["skipped"] for end in ends] == [5, 5]
    assert [line["loss_scale"] for line in trained.lines(tmp_path / "run")] == [2.0**n for n in (16, 16, 15, 14, 13, 12, 11, 11)]
    assert [line["lr"] for line in trained.lines(tmp_path / "run")[1:7]] == [trained.lines(tmp_path / "run")[1]["lr"]] * 6


def test_a_loss_scale_leaves_losses_norms_and_clipping_as_they_are(home: Path, tmp_path: Path) -> None:
    for name, precision in (("fp32", {}), ("fp16", {"compute": "fp16", "loss_scale": 2.0**10})):
        trained.train(trained.recipe(home, precision=precision, optimizer={"clip_norm": 0.2}), tmp_path / name)
    plain, scaled = trained.lines(tmp_path / "fp32"), trained.lines(tmp_path / "fp16")
    assert {line["loss_scale"] for line in scaled} == {1024.0} and all(line["grad_norm"] > 0.2 for line in plain)
    for name in ("loss", "grad_norm"):
        assert [line[name] for line in scaled] == pytest.approx([line[name] for line in plain], rel=0.02)


def test_overflow_at_the_smallest_loss_scale_ends_the_run_with_advice(home: Path, tmp_path: Path) -> None:
    ends = trained.train(fp16(home, steps=40), tmp_path / "run", ranks=2, before=poison(trained.DENSE, range(1, 40), rank=1))
    assert ends[0] == ends[1] and "\n" not in ends[0]
    assert ends[0].startswith("step 18: got gradients (dense) that overflow fp16 even at the smallest loss scale 1")
    assert "precision.compute to bf16" in ends[0]


# --- refused before anything is written ---------------------------------------------------------------------------------


def test_a_run_folder_below_a_file_is_refused_by_every_rank(home: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ends = trained.train(trained.recipe(home), tmp_path / "file" / "run", ranks=2)
    assert all(end.startswith("--out: got") and "Not a directory" in end and "\n" not in end for end in ends)


def test_a_full_disk_is_found_before_the_first_step_by_every_rank(home: Path, tmp_path: Path) -> None:
    trained.train(trained.recipe(home, train={"steps": 1}), tmp_path / "warm")  # writes the token cache

    def fill(rank: int) -> None:
        if rank == 0:  # as on a full disk, the file is made but writing to it fails
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
            make = opening.make_writable

            def made(*args: Any) -> None:
                try:
                    make(*args)
                finally:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

            vars(opening)["make_writable"] = made

    first, second = trained.train(trained.recipe(home), tmp_path / "run", ranks=2, before=fill)
    assert first.startswith("--out: got") and "File too large" in first and "free disk space" in first
    assert second.startswith("--out: got") and "on another rank" in second
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"train": {"global_batch": 7}}, "train.global_batch: got 7, needed a multiple of"),
        ({"degrees": {"dp": 4}}, "degrees: got dp 4 * pp 1 * tp 1 * sp 1 = 4 ranks on 2 processes"),
        ({"degrees": {"ep": 3}}, "experts.num_experts: got 4, needed a multiple of degrees.ep=3"),
        ({"train": {"eval_sequences": 3}}, "train.eval_sequences: got 3"),
        ({"precision": {"compute": "fp16"}}, "precision.loss_scale: got none with compute fp16"),
    ],
)
def test_what_does_not_fit_together_is_refused_before_the_folder_is_made(
    changed: dict[str, dict[str, Any]], said: str, home: Path, tmp_path: Path
) -> None:
    with pytest.raises(BadInput) as refused:
        trainer.train(trained.recipe(home, **changed), out=tmp_path / "run", world=World(0, 2, 0, 2), display=False)
    assert str(refused.value).startswith(said) and "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("characters", [1, 2, 40])
def test_a_text_shorter_than_one_sequence_is_refused(characters: int, home: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("a" * characters)
    run = trained.recipe(home, data={"path": str(short)}, model={"max_length": 64})
    with pytest.raises(BadInput, match="text") as refused:
        trainer.train(run, out=tmp_path / "run", world=World(), display=False)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run/metrics.jsonl").exists() and not (tmp_path / "run/checkpoints").exists()


# --- `train` called from a program --------------------------------------------------------------------------------------


def test_a_thread_can_train_and_leaves_the_signal_handlers_alone(home: Path, tmp_path: Path) -> None:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = [signal.getsignal(n) for n in numbers]
    found: list[dict[str, Any]] = []
    during: list[Any] = []

    def work() -> None:
        run = trained.recipe(home, train={"steps": 3})
        found.append(trainer.train(run, out=tmp_path / "run", world=World(), display=False))
        during.extend(signal.getsignal(n) for n in numbers)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert found[0]["steps"] == 3 and during == before
    assert found[0] | {"hardware": 0} == json.loads((tmp_path / "run/summary.json").read_text()) | {"hardware": 0}


@pytest.mark.parametrize(
    "error", [ValueError("no picture"), BadInput("report", got="nothing", needed="lines", fix="none"), OSError(28, "full")]
)
def test_a_report_that_fails_does_not_fail_the_run(
    error: Exception, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(out: Path) -> None:
        raise error

    monkeypatch.setattr(moe.report, "write_report", fail)
    trainer.train(trained.recipe(home, train={"steps": 1}), out=tmp_path / "run", world=World(), display=True)
    assert metrics.read_summary(tmp_path / "run") is not None
    assert f"no report ({type(error).__name__}: " in capsys.readouterr().out


def in_a_fork(work: Callable[[], int]) -> int:
    """Call `work` in a forked process; its result is the process's exit code. Return the exit code."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(work())
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize(
    ("happens", "code", "said"),
    [
        ("nothing", 0, None),
        ("a signal", 75, None),
        ("bad gradients", 2, "step 3: got gradients (expert) that are not finite"),
        ("bad input", 2, "train.global_batch: got 7, needed a multiple"),
        ("an error", 1, "ZeroDivisionError: "),
    ],
)
def test_a_ranks_exit_code_tells_how_it_ended(happens: str, code: int, said: str | None, home: Path, tmp_path: Path) -> None:
    """`moe.launch.launch` exits with a code for each kind of ending, and writes code and error to the status file for its launcher."""
    run = trained.recipe(home, train={"on_nan": "stop"}, degrees={"dp": 1, "ep": 1})
    (tmp_path / "tiny.yaml").write_text(resolved_yaml(run, {}))
    out = tmp_path / "run"
    words = [str(tmp_path / "tiny.yaml"), "--out", str(out)]

    def work() -> int:
        if happens != "bad input":
            status.empty(out)
            os.environ[HELD] = str(out.resolve())
        if happens == "a signal":
            trained.stop_at(3)(0)
        if happens == "bad gradients":
            poison(trained.EXPERT, range(2, 3), rank=0)(0)
        if happens == "an error":
            trained.on_line(3, lambda: 1 // 0)
        return launch.main([*words, "--degrees.dp", "2", "--train.global_batch", "7"] if happens == "bad input" else words)

    assert in_a_fork(work) == code
    if happens == "bad input":  # refused before the run's folder was made
        assert not out.exists()
        return
    left = status.read(out / status.NAME)[0]
    assert left["exit"] == code and (left["error"] or "").startswith(said or "") and bool(left["error"]) == bool(said)
    assert (out / "summary.json").exists() == (code == 0)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, "experts.rebalance_every 2 has no effect: with degrees.ep 1 every rank holds all experts"),
        ({"model": {"moe_every": 0}}, "experts.rebalance_every 2 has no effect: the model is dense"),
    ],
)
def test_one_line_says_that_rebalancing_has_no_effect(
    changed: dict[str, Any], said: str, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`experts.rebalance_every` without expert parallelism is no error, because the same recipe may run on more ranks."""
    run = trained.recipe(home, **{"experts": {"rebalance_every": 2}, "train": {"steps": 3}} | changed)
    trainer.train(run, out=tmp_path / "run", world=World())
    assert " ".join(capsys.readouterr().out.split()).count(said) == 1


def test_a_recipe_with_sequence_parallelism_also_runs_without_it(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With degrees.sp 1, lines say which keys of `sequence` have no effect. Another line: the run ends before the warmup does."""
    run = trained.recipe(
        home, degrees={"sp": 1}, sequence={"kind": "ulysses", "keep_attention": True}, train={"steps": 1}, optimizer={"warmup_steps": 4}
    )
    trainer.train(run, out=tmp_path / "run", world=World())
    said = " ".join(capsys.readouterr().out.split())
    assert "optimizer.warmup_steps 4 are more than the steps, 1: the rate ends at 25% of optimizer.lr" in said
    for key in ("kind ulysses", "keep_attention true"):
        assert said.count(f"sequence.{key} has no effect: with degrees.sp 1 each rank has whole sequences") == 1
    assert said.count("has no effect") == 2
    assert without_effect(run.model_copy(update={"degrees": run.degrees.model_copy(update={"sp": 2})})) == []


def test_the_title_names_every_parallel_degree(home: Path) -> None:
    run = trained.recipe(home, degrees={"dp": 4, "ep": 2, "etp": 2})
    assert title(run, World(0, 4))[0] == "4 x cpu · dp 4 ep 2 etp 2 · ddp · fp32 compute, fp32 master"
    assert title(trained.recipe(home).resolve(1), World())[0].startswith("1 x cpu · dp 1 ep 1 · ddp")
    muon = trained.recipe(home, optimizer={"kind": "muon"}, sharding={"kind": "zero", "stage": 2}).resolve(2)
    assert " · zero2, carried out by fsdp · " in title(muon, World(0, 2))[0]
    staged = title(check_run(trained.recipe(home, degrees={"pp": 2}, pipeline={"microbatches": 4}), 2), World(0, 2))
    assert staged[0].startswith("2 x cpu · pp 2 dp 1 ep 1 · ddp")
    assert staged[2].startswith("1f1b: stages of 1, 1 layers, 4 micro-batches, ranks idle ")
    sliced = lambda **sequence: title(trained.recipe(home, degrees={"sp": 4}, sequence=sequence).resolve(8), World(0, 8))[0]  # noqa: E731
    assert sliced().startswith("8 x cpu · sp 4 (ring, zigzag) dp 2 ep 4 · ddp")
    assert sliced(kind="ulysses").startswith("8 x cpu · sp 4 (ulysses, contiguous) dp 2 ep 4 · ddp")
    assert sliced(order="striped", heads=2).startswith("8 x cpu · sp 4 (ring, striped, heads 2) dp 2 ep 4 · ddp")


def test_the_title_names_the_router_preset_and_the_values_that_differ_from_it(home: Path) -> None:
    lines = lambda **router: title(trained.recipe(home, router=router).resolve(1), World())[2:]  # noqa: E731
    assert lines() == ["router switch, but jitter 0.05, capacity_factor 1.0, min_capacity 2"]
    assert lines(preset="mixtral", capacity_factor=None, jitter=0.0, min_capacity=0) == ["router mixtral"]
    assert lines(capacity_factor=None, jitter=0.0, min_capacity=4) == ["router switch, but capacity_factor null"]
    assert title(trained.recipe(home, model={"moe_every": 0}).resolve(1), World())[2:] == []


def test_sample_speed_and_report_can_be_turned_off(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe can turn off the sample of text, the measured speed and the report, which take seconds at the end of a run."""
    off = {"train": {"steps": 1, "sample_tokens": 0, "measure_speed": False, "report": False}}
    for owner, name, _ in REAL:
        if name in ("matmul_flops", "sample", "write_report"):
            monkeypatch.setattr(owner, name, lambda *_, name=name, **__: pytest.fail(f"{name} was called"))
    summary = trainer.train(trained.recipe(home, **off), out=tmp_path / "run", world=World(), display=False)
    assert summary["sample"] == "" and summary["matmul_share"] is None and not (tmp_path / "run/report.html").exists()
    assert not [row for row in summary_rows(summary) if "matmul speed" in row[0]]


def test_a_run_with_sample_speed_tensorboard_and_report(home: Path, tmp_path: Path) -> None:
    """Other tests replace these by stubs, because they take seconds."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, real in REAL:
            patch.setattr(owner, name, real)
        summary = trainer.train(trained.recipe(home), name="tiny", out=tmp_path / "run", world=World(), display=False)
    assert summary["recipe"] == "tiny" and summary["sample"].startswith("def ") and len(summary["sample"]) > 100
    assert 0 < summary["matmul_share"] < 1 and summary["tokens_per_second"] > 0 and summary["peak_memory_bytes"] > 1e7
    left = {p.name for p in (tmp_path / "run").iterdir()}
    assert {"recipe.yaml", "metrics.jsonl", "summary.json", "checkpoints", "tensorboard", "plots", "report.html"} <= left
    assert not [name for name in left if name.startswith(".")]
