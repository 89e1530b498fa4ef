"""The layout oracle: the same tiny model and batch on one process and on every legal layout, compared number by number.

    reference    a plain loop: whole batch, plain kernels, torch's AdamW, no engine, no process group, fp32
    layouts      moe/verify/cases.py: data-parallel kinds, routers, ways that rows travel, degrees, recompute, precisions

Compared: loss, balance loss, every logical gradient, gradient norm, weights after one step, losses of ten steps. In fp32 each
may differ by 1e-5 relative. In bf16 and fp16 the reference is one process in that precision, and what may differ is measured
here too, on one process: the spread of the same steps when only rounding changes (other micro-batches, the plain kernels).
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe.checks.together import check_run
from moe.model.transformer import global_name
from moe.parallelize.build import build, start_engine
from moe.plan.pipeline import schedule_of
from moe.recipe.sections import Run
from moe.records.results import write_json
from moe.train.numbers import Numbers
from moe.train.state import extra_owned
from moe.train.step import accumulate, finish
from moe.train.stream import stream
from moe.verify.cases import Case, cases
from moe.verify.twin import STEPS, Result, batch, reference
from parallel import process
from parallel.checkpoint import pieces
from parallel.clip import GradientNorm
from parallel.data.engine import Engine
from parallel.fork import run_on_ranks
from parallel.mesh import Degrees, Mesh
from parallel.precision import LossScale
from parallel.process import World

FP32_TOLERANCE = 1e-5
CUTS = (2, 3, 4, 6, 12)  # of a batch: other orders of the same sums
NUMBERS = ("loss", "gradient", "norm", "update", "ten_step")


# --- one layout, through the trainer's own step --------------------------------------------------------------------------


def compute(case: Case, *, rank: int = 0, kernels: str = "cpu", meshes: dict[Degrees, Mesh] | None = None) -> Result:
    """Ten steps of one layout on the ranks that are running; every rank returns the parts it owns. `meshes`: those made already."""
    run = check_run(case.run(), case.world)
    run = run.model_copy(update={"experts": run.experts.model_copy(update={"kernels": kernels})})
    degrees, meshes = run.mesh_degrees(), {} if meshes is None else meshes
    if degrees not in meshes:
        meshes[degrees] = process.connect(degrees, World(rank, case.world))
    mesh = meshes[degrees]
    model, layouts = build(run, mesh, device=torch.device("cpu"))
    engine = start_engine(run, model, layouts, mesh)
    return (_streamed if case.delayed else _stepped)(case, run, engine, mesh)


def _stepped(case: Case, run: Run, engine: Engine, mesh: Mesh) -> Result:
    scale = LossScale.of(run.precision.loss_scale)
    losses: list[float] = []
    kept: tuple[float, float, dict[str, Tensor], dict[str, Tensor]] | None = None
    for step in range(STEPS):
        numbers = accumulate(
            engine,
            _mine(step, mesh),
            mesh=mesh,
            microbatches=case.microbatches,
            seed=run.train.seed,
            step=step,
            loss_scale=scale.value,
        )
        losses.append(numbers.loss)
        gradients = _owned(engine, mesh, "gradient", scale.value) if kept is None else {}
        norm = finish(
            engine,
            numbers,
            world=mesh.axis("world"),
            scale=scale,
            lr=run.optimizer.lr,
            clip_norm=run.optimizer.clip_norm,
            device=torch.device("cpu"),
        )
        if kept is None:
            kept = numbers.balance_loss, norm.total, gradients, _weights(engine, mesh)
    assert kept is not None
    return Result(losses, *kept)


def _streamed(case: Case, run: Run, engine: Engine, mesh: Mesh) -> Result:
    """One step, drained, whose gradients are Adam's first moments; then all others without a drain between."""
    steps: list[tuple[Numbers, GradientNorm]] = []
    kept: tuple[dict[str, Tensor], dict[str, Tensor]] | None = None
    for count in (1, STEPS - 1):
        steps += stream(
            engine,
            [_mine(len(steps) + n, mesh) for n in range(count)],
            schedule=schedule_of(run, batches=count),
            mesh=mesh,
            seed=run.train.seed,
            step=len(steps),
            rate=lambda n: run.optimizer.lr,
        )
        kept = kept or (_owned(engine, mesh, "exp_avg", 1 - run.optimizer.beta1), _weights(engine, mesh))
    assert kept is not None
    numbers, norm = steps[0]
    return Result([numbers.loss for numbers, _ in steps], numbers.balance_loss, norm.total, *kept)


def _mine(step: int, mesh: Mesh) -> Tensor:
    dp = mesh.axis("dp")
    return batch(step).chunk(dp.size)[dp.index]


def _weights(engine: Engine, mesh: Mesh) -> dict[str, Tensor]:
    """With routers' biases."""
    biases = {name: bias_E.clone() for name, bias_E in extra_owned(engine.module, engine.layouts, mesh)}
    return _owned(engine, mesh, "weight", 1.0) | biases


def _owned(engine: Engine, mesh: Mesh, what: str, scale: float) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, layout in engine.layouts.items():
        tensor = engine.gradient(name) if what == "gradient" else engine.state(name)[what]
        if layout.is_owner(mesh):
            for p in pieces(global_name(name), layout, mesh, tensor):
                whole = found.setdefault(p.name, torch.zeros(p.shape))  # other tiles and ranks have the rest; the ranks' parts are added up
                whole[tuple(slice(start, start + n) for start, n in zip(p.start, p.tensor.shape, strict=True))] = p.tensor.float() / scale
    return found


def _ranks(rank: int, chosen: list[Case], folder: str) -> None:
    meshes: dict[Degrees, Mesh] = {}  # groups live as long as the process, each with threads of its own
    for number, case in enumerate(chosen):
        torch.save(asdict(compute(case, rank=rank, meshes=meshes)), Path(folder) / f"{number}.{rank}.pt")


# --- comparing ----------------------------------------------------------------------------------------------------------


def deviation(a: Tensor, b: Tensor, floor: float = 0.0) -> float:
    """Largest difference over the largest reference value (at least `floor`); 0 for equal tensors, inf for different shapes or NaN."""
    if a.shape != b.shape or not bool(torch.isfinite(a).all()):
        return float("inf")
    difference = (a.double() - b.double()).abs().max().item()
    return difference / max(b.abs().max().item(), floor) if difference else 0.0


def compare(got: Result, want: Result) -> dict[str, float]:
    """The largest relative deviation of each number. A parameter's gradient counts against at least 1e-3 of the largest one's."""
    if got.gradients.keys() != want.gradients.keys():
        return dict.fromkeys(NUMBERS, float("inf"))
    largest = max(g.abs().max().item() for g in want.gradients.values())
    rel = lambda a, b: (abs(a - b) / abs(b) if a != b else 0.0) if math.isfinite(a) else math.inf  # noqa: E731 (max ignores NaN)
    return {
        "loss": max(rel(got.losses[0], want.losses[0]), rel(got.balance, want.balance)),
        "gradient": max(deviation(got.gradients[n], g, 1e-3 * largest) for n, g in want.gradients.items()),
        "norm": rel(got.norm, want.norm),
        "update": max(deviation(got.weights[n], w) for n, w in want.weights.items()),
        "ten_step": max(rel(a, b) for a, b in zip(got.losses, want.losses, strict=True)),
    }


def spread(case: Case, baseline: Result) -> dict[str, float]:
    """What rounding alone does in this precision, on one process: the largest deviation with other micro-batches or the plain kernels."""
    found = [compare(compute(replace(case, microbatches=m)), baseline) for m in CUTS]
    found.append(compare(compute(case, kernels="reference"), baseline))
    return {number: max(f[number] for f in found) for number in NUMBERS}


# --- the verb -----------------------------------------------------------------------------------------------------------


def main(
    *,
    nproc: int = 2,
    json: str | None = None,
    only: str | None = None,
    kinds: str = "data,expert,pipeline",
    say: Callable[[str], None] = print,
) -> int:
    """`moe verify`: print the table of layouts; 1 if any fails. `only` keeps the rows whose text holds it."""
    torch.set_num_threads(1)  # ranks are forked, and a forked process must not inherit a pool of threads
    started = time.perf_counter()
    chosen = [c for c in cases(nproc, kinds=tuple(kinds.split(","))) if only is None or only in f"{c.layout} {c.kind} {c.precision}"]
    wanted, tolerances = _expectations(chosen)
    rows: list[dict[str, Any]] = []
    say(_line("layout", "kind", "world", "precision", *NUMBERS, ""))
    for world in sorted({c.world for c in chosen}):
        for case, got in _run_world([c for c in chosen if c.world == world], world, say):
            rows.append(_row(case, got, wanted[_twin(case)], tolerances[_twin(case)]))
            r = rows[-1]
            say(_line(r["layout"], r["kind"], world, r["precision"], *(f"{r[n]:.1e}" for n in NUMBERS), "pass" if r["passed"] else "FAIL"))
    failed = [r for r in rows if not r["passed"]]
    say("not compared: router.group rank, which counts capacity over what a rank holds and so depends on the layout by definition")
    seconds = time.perf_counter() - started
    say(f"{len(rows) - len(failed)} passed, {len(failed)} failed: {len(rows)} layouts of up to {nproc} processes in {seconds:.0f} s")
    say("tolerances: fp32 1e-5 for every number; in lower precision twice the spread of rounding, measured just now:")
    for twin, tolerance in tolerances.items():
        if twin.precision != "fp32":
            say(f"  {_name(twin)}: " + " ".join(f"{number} {value:.0e}" for number, value in tolerance.items()))
    if json:
        write_json(json, verb="verify", rows=rows, tolerances={_name(c): t for c, t in tolerances.items() if c.precision != "fp32"})
    return 1 if failed or not rows else 0


def _twin(case: Case) -> Case:
    """What a case is compared with: the same model and precision on one process, in one piece."""
    alone = Case(case.model, "ddp", 1, 1, 1, case.precision, experts=case.experts, layers=case.layers)
    return replace(alone, pp=case.pp, schedule=case.schedule, microbatches=case.microbatches) if case.delayed else alone


def _name(twin: Case) -> str:
    size = f" of {twin.layers} layers" if twin.layers != Case.layers else ""
    return f"{twin.model} {twin.precision}{size}" + (f", {twin.schedule} pp{twin.pp}" if twin.delayed else "")


def _expectations(chosen: list[Case]) -> tuple[dict[Case, Result], dict[Case, dict[str, float]]]:
    """For each twin: what must come out, and how far each number may be from it."""
    wanted: dict[Case, Result] = {}
    tolerances: dict[Case, dict[str, float]] = {}
    for twin in dict.fromkeys(_twin(c) for c in chosen):
        if twin.precision == "fp32":
            wanted[twin], tolerances[twin] = reference(twin), dict.fromkeys(NUMBERS, FP32_TOLERANCE)
            continue
        plain = replace(twin, pp=1, schedule="1f1b", microbatches=1)
        found = compute(plain)
        wanted[twin] = reference(twin) if twin.delayed else found
        measured = spread(plain, found)
        if twin.delayed:
            others = [compare(reference(twin, parts=parts), wanted[twin]) for parts in CUTS]
            measured = {n: max(measured[n], *(other[n] for other in others)) for n in NUMBERS}
        tolerances[twin] = {n: max(FP32_TOLERANCE, 2 * s) for n, s in measured.items()}
    return wanted, tolerances


def _run_world(chosen: list[Case], world: int, say: Callable[[str], None]) -> list[tuple[Case, Result | str]]:
    """Every case of one world on one set of forked ranks; a failure of the set is the result of each of its cases."""
    if any(c.kind.startswith("zero") for c in chosen):
        from parallel.data.deepspeed import load_deepspeed

        load_deepspeed()  # once, before forking: it takes seconds to import
    if any(c.kind == "fsdp" for c in chosen):
        import parallel.data.fsdp  # noqa: F401  (likewise)
    with tempfile.TemporaryDirectory() as folder:
        try:
            run_on_ranks(_ranks, world, chosen, folder, timeout_s=60 + 20 * len(chosen))
        except RuntimeError as error:
            say(str(error))
            return [(case, str(error)) for case in chosen]
        return [(case, _gather(Path(folder), number, world)) for number, case in enumerate(chosen)]


def _gather(folder: Path, number: int, world: int) -> Result:
    parts = [torch.load(folder / f"{number}.{rank}.pt", weights_only=True) for rank in range(world)]
    for part in parts[1:]:
        for what in ("gradients", "weights"):
            for name, tensor in part[what].items():
                parts[0][what][name] = parts[0][what][name] + tensor if name in parts[0][what] else tensor
    return Result(**parts[0])


def _row(case: Case, got: Result | str, want: Result, tolerance: dict[str, float]) -> dict[str, Any]:
    numbers = compare(got, want) if isinstance(got, Result) else dict.fromkeys(NUMBERS, float("inf"))
    passed = all(numbers[n] <= tolerance[n] for n in NUMBERS)
    row = {"layout": case.layout, "kind": case.kind, "world": case.world, "precision": case.precision, **numbers, "passed": passed}
    return row if isinstance(got, Result) else row | {"error": got}


def _line(layout: str, kind: str, world: object, precision: str, *cells: str) -> str:
    return f"{layout:<46} {kind:<6} {world:>5} {precision:<9} " + " ".join(f"{cell:>9}" for cell in cells)
