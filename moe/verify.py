"""The layout oracle: the same tiny model and batch on one process and on every legal layout, compared number by number.

    reference    a plain loop: whole batch, plain kernels, torch's AdamW, no engine, no process group, fp32
    layouts      moe/verify_cases.py: data-parallel kinds, routers, ways that rows travel, degrees, recompute, precisions

Compared: loss, balance loss, every logical gradient, gradient norm, weights after one step, losses of ten steps. In fp32 each
may differ by 1e-5 relative. In bf16 and fp16 the reference is one process in that precision, and what may differ is measured
here too, on one process: the spread of the same steps when only rounding changes (other micro-batches, the plain kernels).
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.context import Context
from moe.model.transformer import Transformer, extra_state, global_name
from moe.parallelize import build, decays, lay_out, start_engine
from moe.results import write_json
from moe.train.step import accumulate, finish
from moe.verify_cases import BATCH, LENGTH, Case, cases
from parallel import process
from parallel.checkpoint import pieces
from parallel.data.engine import Engine
from parallel.fork import run_on_ranks
from parallel.mesh import Degrees, Mesh
from parallel.precision import LossScale
from parallel.process import World

STEPS = 10
FP32_TOLERANCE = 1e-5
NUMBERS = ("loss", "gradient", "norm", "update", "ten_step")


@dataclass(frozen=True)
class Result:
    """What one layout computed; tensors by the names that checkpoints use, whole."""

    losses: list[float]
    balance: float
    norm: float
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def batch(step: int) -> Tensor:
    """The sequences of one step, int64 [BATCH, LENGTH + 1]; tokens are uneven, so that experts are too.

    The first two differ: attention over equal tokens gives equal states, and a router that ranks tokens would order them by rounding.
    """
    generator = torch.Generator().manual_seed(step)
    tokens = (torch.rand(BATCH, LENGTH + 1, generator=generator) ** 2 * 256).long()
    tokens[:, 1] = torch.where(tokens[:, 1] == tokens[:, 0], (tokens[:, 0] + 1) % 256, tokens[:, 1])
    return tokens


# --- one process, written out plainly -----------------------------------------------------------------------------------


def reference(model_name: str, *, num_experts: int = 4) -> Result:
    """The plain twin in fp32."""
    run = Case(model_name, "ddp", 1, 1, 1, "fp32", experts=num_experts).run()
    experts = run.experts.model_copy(update={"kernels": "reference"})
    model = Transformer(run.model, experts, run.router, vocab_size=run.vocab_size, seed=run.train.seed)
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for n, p in named.items() if decays(n, p)], "weight_decay": run.optimizer.weight_decay},
        {"params": [p for n, p in named.items() if not decays(n, p)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=run.optimizer.lr, betas=(run.optimizer.beta1, run.optimizer.beta2), eps=run.optimizer.eps)
    losses: list[float] = []
    kept: tuple[float, float, dict[str, Tensor], dict[str, Tensor]] | None = None
    for step in range(STEPS):
        tokens = batch(step)
        output = model(tokens[:, :-1], Context.of(tokens[:, :-1], seed=run.train.seed, step=step))
        loss = F.cross_entropy(output.logits_BLV.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        gradients = {n: p.grad.clone() for n, p in named.items() if p.grad is not None}
        norm = torch.cat([g.flatten() for g in gradients.values()]).norm().item()
        for p in named.values():
            assert p.grad is not None
            p.grad.mul_(min(1.0, (run.optimizer.clip_norm or norm) / norm))
        optimizer.step()
        for bias_E, report in zip(extra_state(model).values(), output.layers, strict=False):  # each layer has one, or none has
            bias_E += (run.router.spec.bias_rate or 0.0) * torch.sign(report.load_E.double().mean() - report.load_E).float()
        if kept is None:
            balance = sum(r.balance_loss.item() for r in output.layers)
            weights = _whole(model, {n: p.detach() for n, p in named.items()}) | _biases(model)
            kept = balance, norm, _whole(model, gradients), weights
    assert kept is not None
    return Result(losses, *kept)


def _whole(model: Transformer, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    layouts = lay_out(model)
    mesh = Mesh.of(Degrees())
    return {p.name: p.tensor.clone() for n, t in tensors.items() for p in pieces(global_name(n), layouts[n], mesh, t)}


def _biases(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: bias_E.clone() for name, bias_E in extra_state(model).items()}


# --- one layout, through the trainer's own step --------------------------------------------------------------------------


def compute(case: Case, *, rank: int = 0, kernels: str = "cpu", meshes: dict[Degrees, Mesh] | None = None) -> Result:
    """Ten steps of one layout on the ranks that are running; every rank returns the parts it owns. `meshes`: those made already."""
    run = case.run().check(case.world)
    run = run.model_copy(update={"experts": run.experts.model_copy(update={"kernels": kernels})})
    degrees, meshes = run.mesh_degrees(), {} if meshes is None else meshes
    if degrees not in meshes:
        meshes[degrees] = process.connect(degrees, World(rank, case.world))
    mesh = meshes[degrees]
    model, layouts = build(run, mesh, device=torch.device("cpu"))
    engine = start_engine(run, model, layouts, mesh)
    scale = LossScale.of(run.precision.loss_scale)
    losses: list[float] = []
    kept: tuple[float, float, dict[str, Tensor], dict[str, Tensor]] | None = None
    for step in range(STEPS):
        mine = batch(step).chunk(case.world)[mesh.axis("dp").index]
        numbers = accumulate(
            engine,
            mine,
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
            kept = numbers.balance_loss, norm.total, gradients, _owned(engine, mesh, "weight", 1.0)
            if rank == 0:
                kept[3].update(_biases(model))
    assert kept is not None
    return Result(losses, *kept)


def _owned(engine: Engine, mesh: Mesh, what: str, scale: float) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, layout in engine.layouts.items():
        tensor = engine.gradient(name) if what == "gradient" else engine.state(name)["weight"]
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
    found = [compare(compute(replace(case, microbatches=m)), baseline) for m in (2, 3, 4, 6, 12)]
    found.append(compare(compute(case, kernels="reference"), baseline))
    return {number: max(f[number] for f in found) for number in NUMBERS}


# --- the verb -----------------------------------------------------------------------------------------------------------


def main(
    *, nproc: int = 2, json: str | None = None, only: str | None = None, kinds: str = "data,expert", say: Callable[[str], None] = print
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
            rows.append(_row(case, got, wanted[_key(case)], tolerances[_key(case)]))
            r = rows[-1]
            say(_line(r["layout"], r["kind"], world, r["precision"], *(f"{r[n]:.1e}" for n in NUMBERS), "pass" if r["passed"] else "FAIL"))
    failed = [r for r in rows if not r["passed"]]
    say("not compared: router.group rank, which counts capacity over what a rank holds and so depends on the layout by definition")
    seconds = time.perf_counter() - started
    say(f"{len(rows) - len(failed)} passed, {len(failed)} failed: {len(rows)} layouts of up to {nproc} processes in {seconds:.0f} s")
    say("tolerances: fp32 1e-5 for every number; in lower precision twice the spread of rounding, measured just now:")
    for key, tolerance in tolerances.items():
        if key[1] != "fp32":
            say(f"  {key[0]} {key[1]}: " + " ".join(f"{number} {value:.0e}" for number, value in tolerance.items()))
    if json:
        write_json(json, verb="verify", rows=rows, tolerances={f"{m} {p}": t for (m, p, _), t in tolerances.items() if p != "fp32"})
    return 1 if failed or not rows else 0


Key = tuple[str, str, int]


def _key(case: Case) -> Key:
    return case.model, case.precision, case.experts


def _expectations(chosen: list[Case]) -> tuple[dict[Key, Result], dict[Key, dict[str, float]]]:
    """For each model and precision: what must come out, and how far each number may be from it."""
    wanted: dict[Key, Result] = {}
    tolerances: dict[Key, dict[str, float]] = {}
    for key in dict.fromkeys(_key(c) for c in chosen):
        model, precision, num_experts = key
        if precision == "fp32":
            wanted[key], tolerances[key] = reference(model, num_experts=num_experts), dict.fromkeys(NUMBERS, FP32_TOLERANCE)
            continue
        case = Case(model, "ddp", 1, 1, 1, precision, experts=num_experts)
        wanted[key] = compute(case)
        tolerances[key] = {n: max(FP32_TOLERANCE, 2 * s) for n, s in spread(case, wanted[key]).items()}
    return wanted, tolerances


def _run_world(chosen: list[Case], world: int, say: Callable[[str], None]) -> list[tuple[Case, Result | str]]:
    """Every case of one world on one set of forked ranks; a failure of the set is the result of each of its cases."""
    if any(c.kind.startswith("zero") for c in chosen):
        from parallel.data.zero import load_deepspeed

        load_deepspeed()  # once, before forking: it takes seconds to import
    if any(c.kind == "fsdp" for c in chosen):
        import parallel.data.shard  # noqa: F401  (likewise)
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
