"""Training runs of about a second for tests of the trainer: a text of random words, a model of width 16, and functions to compare runs.

    home = trained.home(folder, monkeypatch)          text and token files; patches the trainer
    trained.train(trained.recipe(home), out, ranks=2) each rank in its own process; `before(rank)` prepares it, for example to die
    trained.losses(out), trained.tensors(checkpoint)  every bit of losses and tensors

Changes that `before` makes in a rank's process end with that process.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import moe.report
from moe.data import open_data
from moe.data.order import TrainSet
from moe.data.token_shard import TokenShard
from moe.recipe.load import build_run
from moe.recipe.sections import Run
from moe.records import metrics
from moe.records.tracker import Board
from moe.train.loop import recorded, trainer
from parallel.errors import BadInput, Ended
from parallel.process.process import World
from parallel.store.stored import Reader
from tests.support.ranks import run_on_ranks

STOPPED = "stopped"
DENSE, ROUTER, EXPERT = "embedding", "layers.1.moe.router.weight", "layers.1.moe.experts.w1"  # a parameter of each family, by module name

VALUES: dict[str, dict[str, Any]] = {
    "model": {"num_layers": 2, "d_model": 16, "num_heads": 2, "d_ff": 24, "max_length": 12, "moe_every": 2},
    "experts": {"num_experts": 4},
    "router": {"capacity_factor": 1.0, "min_capacity": 2, "jitter": 0.05},
    "data": {"validation_share": 0.2},
    "optimizer": {"lr": 1e-2, "warmup_steps": 5},
    "train": {"steps": 6, "global_batch": 8, "eval_every": 0, "eval_sequences": 8, "save_every": 3},
}


def home(folder: Path, patch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a text and a cache for token files. Patch the trainer: CPU only, no report, no sample, no measured speed."""
    import torch._dynamo  # noqa: F401  (the optimizer imports it, for seconds: here once, not in every fork)

    patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    patch.setattr(recorded, "matmul_flops", lambda run, device: 1e9)
    patch.setattr(trainer, "check_precision", lambda run, world: None)  # fp16 is tested on processors that emulate it, too
    patch.setattr(recorded, "sample", lambda *_, **__: "text")
    patch.setattr(recorded, "source_commit", lambda: None)
    patch.setattr(moe.report, "write_report", lambda out: None)
    patch.setattr(metrics, "open_tensorboard", lambda folder, *, first_step: Board(lambda values, step, time: None, lambda: None))
    (folder / "text.txt").write_text(words(3000, seed=0))
    return folder


def warm_zero() -> None:
    """Import once the modules that DeepSpeed's engine would import in every fork. None of them starts a thread."""
    from parallel.data.deepspeed import load_deepspeed

    load_deepspeed()
    import deepspeed.moe.layer  # noqa: F401


def words(number: int, *, seed: int) -> str:
    draw = random.Random(seed)
    known = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 7))) for _ in range(60)]
    return " ".join(draw.choices(known, k=number))


def recipe(home: Path, **sections: dict[str, Any]) -> Run:
    """The tiny Switch model with some values changed: recipe(home, train={"steps": 30}, degrees={"ep": 2})."""
    values = {name: dict(fields) for name, fields in VALUES.items()}
    values["data"]["path"] = str(home / "text.txt")
    for name, fields in sections.items():
        values.setdefault(name, {}).update(fields)
    return build_run(values)


def train(
    run: Run,
    out: Path,
    *,
    ranks: int = 1,
    fresh: bool = False,
    allow_changes: Sequence[str] = (),
    before: Callable[[int], None] | None = None,
    forked: bool = False,
    init_from: Path | None = None,
    from_step: int | None = None,
    profile: bool = False,
    own: Callable[[int], dict[str, Any]] = lambda rank: {},
) -> list[Any]:
    """Train, and return a result for each rank: its summary, STOPPED, or the text of its BadInput or of the error that ended all ranks. One
    rank trains in this process, unless `forked` or `before` is given. own: rank -> its callbacks, data and optimizer."""

    def work(rank: int) -> Any:
        if before is not None:
            before(rank)
        try:
            world = World(rank, ranks, rank, ranks)
            options: dict[str, Any] = {"fresh": fresh, "allow_changes": allow_changes, "init_from": init_from, "profile": profile}
            options |= {"from_step": from_step}
            return trainer.train(run, out=out, world=world, display=False, **options, **own(rank))
        except trainer.Stopped:
            return STOPPED
        except (BadInput, Ended) as bad:
            return str(bad)

    return [work(0)] if ranks == 1 and not forked and before is None else run_on_ranks(work, ranks, timeout_s=90)


def on_line(step: int, act: Callable[[], Any]) -> None:
    """Make this process, which will train, call `act` when it records step `step`."""
    write = metrics.Records.write

    def hooked(self: metrics.Records, line: Any) -> None:
        write(self, line)
        if line.get("kind") == "train" and line["step"] == step:
            act()

    metrics.Records.write = hooked  # type: ignore[method-assign]


def after_step(act: Callable[[trainer.Job], Any]) -> None:
    """Make this process, which will train, call `act` with the job after each step, before the step's line is written."""
    count = trainer.count

    def counted(job: trainer.Job, norm: Any) -> None:
        count(job, norm)
        act(job)

    trainer.count = counted


def stop_at(step: int, *, rank: int = 0, number: signal.Signals = signal.SIGTERM) -> Callable[[int], None]:
    """Return a `before` for `train`: rank `rank` gets a signal when it records step `step`, so that all ranks stop after the next step."""
    return lambda this: on_line(step, lambda: os.kill(os.getpid(), number)) if this == rank else None


def log_draws(folder: Path, rank: int, attempt: int) -> None:
    """Make this process, which will train, write the indices of the text's windows that each step draws to a file."""
    batch = TrainSet.batch

    def logged(self: TrainSet, step: int, shard: TokenShard) -> Any:
        start = step * shard.num_sequences
        with open(folder / f"draws-{attempt}-{rank}.txt", "a") as file:
            print(step, *self.order([start + number for number in shard.sequences]).tolist(), file=file)
        return batch(self, step, shard)

    TrainSet.batch = logged  # type: ignore[method-assign]


def draws(folder: Path, ranks: int) -> list[dict[int, list[int]]]:
    """Read the files of `log_draws`. Return for each attempt of the run: step -> indices of the windows that all ranks together drew."""
    lives: list[dict[int, list[int]]] = []
    count = 1 + max((int(p.name.split("-")[1]) for p in folder.glob("draws-*")), default=-1)
    for attempt in range(count):
        found: list[dict[int, list[int]]] = []
        for rank in range(ranks):
            path = folder / f"draws-{attempt}-{rank}.txt"
            lines = [[int(n) for n in line.split()] for line in path.read_text().splitlines()] if path.exists() else []
            found.append({step: windows for step, *windows in lines})
        lives.append({step: [w for part in found for w in part[step]] for step in found[0] if all(step in part for part in found)})
    return lives


def order(run: Run, steps: int) -> list[list[int]]:
    """Indices of the training windows that each step should draw, computed from the recipe's seed without a run."""
    data = open_data(run.data, max_length=run.model.max_length, vocab_size=run.vocab_size, seed=run.train.seed)
    batch = run.train.global_batch
    return [data.train.order(range(s * batch, (s + 1) * batch)).tolist() for s in range(steps)]


# --- results of a run -------------------------------------------------------------------------------------------------------


def lines(out: Path, kind: str = "train") -> list[dict[str, Any]]:
    return [line for line in metrics.read(out) if line["kind"] == kind]


def events(out: Path) -> list[tuple[str, int]]:
    return [(line["event"], line["step"]) for line in lines(out, "event")]


def losses(out: Path) -> list[tuple[int, str]]:
    """Return (step, its loss as text with every bit) for each training line."""
    return [(line["step"], float(line["loss"]).hex()) for line in lines(out)]


def close(out: Path, reference: Path, *, rel: float, after: int = 0) -> None:
    """Fail unless both runs have the same steps after step `after`, and their losses agree within the relative difference `rel`."""
    got, wanted = ({line["step"]: line["loss"] for line in lines(o) if line["step"] > after} for o in (out, reference))
    assert got and got == pytest.approx(wanted, rel=rel, abs=0)


def checkpoints(out: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (out / "checkpoints").glob("step-*") if path.suffix != ".tmp")


def tensors(checkpoint: Path) -> dict[str, str]:
    """Return name -> SHA-256 of each whole tensor in a checkpoint, assembled from its shards; also of the counters and the loss scale."""
    reader = Reader(checkpoint)
    found = {}
    for (name, kind), parts in reader.entries.items():
        tensor = reader.region(name, kind, tuple(slice(0, n) for n in parts[0]["shape"]))
        found[f"{name}/{kind}"] = hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
    return found | {"counters": str(reader.state["counters"]), "loss_scale": str(reader.state["loss_scale"])}


def files(folder: Path) -> dict[str, str]:
    """Return path -> SHA-256, for every file below a folder."""
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.rglob("*")) if p.is_file()}
