"""Makes sick runs and clean runs for the rules of `moe doctor` (moe/records/rules.py): names, remedies and false alarms.

    python -m tests.measured doctor --only sick          ten sick runs; each again with the remedy that its line proposes
    python -m tests.measured doctor --only clean         tiny versions of all shipped recipes and router presets; alarms while they run
    python -m tests.measured doctor --only cost          milliseconds of the rules in a step of a running job

A sick run is named if its rule fires, and no other. It is mended if the run with the remedy has no finding, and `harm`, which the rules do
not read, is smaller. All runs are tiny, in fp32, in this process.
"""

from __future__ import annotations

import copy
import json as json_format
import string
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moe.data import open_data
from moe.data.order import TrainSet
from moe.launch import exit_codes
from moe.recipe.load import build_run, load, published_names, recipe_names
from moe.recipe.presets import PRESETS
from moe.recipe.sections import Data
from moe.records.metrics import read
from moe.records.results import write_json
from moe.records.rules import Finding, Live, diagnose
from moe.records.windows import windows_of
from moe.router.checks import looks_ahead, only_second_choices_look_ahead
from moe.train.loop import trainer
from moe.train.start.restore import choose, restore
from moe.verify.small import small
from parallel.errors import BadInput
from parallel.fixes import put
from parallel.process.process import World

Values = dict[str, Any]
TINY: Values = {
    "model": {"num_layers": 2, "d_model": 32, "num_heads": 2, "d_ff": 64, "max_length": 64, "moe_every": 1, "tied_embeddings": False},
    "experts": {"num_experts": 8},
    "router": {"preset": "switch", "capacity_factor": None},
    "precision": {"compute": "fp32"},
    "optimizer": {"lr": 0.003, "warmup_steps": 40},
    "train": {"steps": 80, "global_batch": 8, "eval_every": 0, "eval_sequences": 8, "save_every": 0, "sample_tokens": 0}
    | {"measure_speed": False, "report": False},
}
STEPS = TINY["train"]["steps"]
Harm = Callable[[Path], float]  # folder of a run -> a number that is smaller in a healthy run


def changed(values: Values, changes: Values) -> Values:
    """Return a copy of a recipe's values with some dotted keys set."""
    values = copy.deepcopy(values)
    for key, value in changes.items():
        put(values, key, value)
    return values


def trained(values: Values, out: Path, *, init_from: Path | None = None) -> list[Finding]:
    """Train the recipe in this process. Return what the rules find in its records."""
    run = build_run(values)
    trainer.train(run, out=out, world=World(), display=False, init_from=init_from, force=True)
    return diagnose(read(out), run)


# --- harms: measured without the rules ----------------------------------------------------------------------------------------------------


def loss_on(text: Callable[[Path], Path] | None = None) -> Harm:
    """Return the harm "mean loss on 200 sequences of a text", in nats a byte. text: makes the file; None: the standard library."""

    def measured(out: Path) -> float:
        source = Data() if text is None else Data(source="text", path=str(text(out.parent)))
        model = restore(choose(out))
        data = open_data(source, max_length=64, vocab_size=256, seed=0, tokenizer={"kind": "bytes"}, log=lambda line: None)
        assert isinstance(data.train, TrainSet)
        rows = torch.from_numpy(data.train.sequences(np.arange(200)))
        with torch.no_grad():
            logits = model(rows[:, :-1]).logits_BLV
        return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten()))

    return measured


def _last(out: Path, of: Callable[[dict[str, Any]], float]) -> float:
    train = [line for line in read(out) if line["kind"] == "train"]
    return float(np.mean([of(line) for line in train[-len(train) // 4 :]]))


def busiest(out: Path) -> float:
    """Largest load over fair share in the last quarter, mean over steps and layers."""
    return _last(out, lambda line: float(np.mean([max(layer["load"]) * len(layer["load"]) for layer in line["moe"]])))


def dropped(out: Path) -> float:
    return _last(out, lambda line: line["dropped_share"])


def peeks(out: Path) -> float:
    """Largest change of the logits at the first half of a sequence if its second half changes."""
    model = restore(choose(out))
    rows = torch.from_numpy(np.random.default_rng(0).integers(97, 122, (16, 64)))
    other = rows.clone()
    other[:, 32:] = (rows[:, 32:] - 97 + 7) % 25 + 97
    with torch.no_grad():
        one, two = (model(each).logits_BLV[:, :32] for each in (rows, other))
    return float((one - two).abs().max())


# --- texts --------------------------------------------------------------------------------------------------------------------------------


def _text(name: str, content: Callable[[str], str]) -> Callable[[Path], Path]:
    def made(folder: Path) -> Path:
        path = folder / f"{name}.txt"
        if not path.exists():
            source = "".join(file.read_text() for file in sorted(Path(string.__file__).parent.glob("[a-c]*.py")))
            path.write_text(content(source)[:400_000])
        return path

    return made


_LETTERS = string.ascii_letters + string.digits + string.punctuation + " "
_MIXED = "".join(np.random.default_rng(3).permutation(list(_LETTERS)))
code = _text("code", lambda text: text)
other_letters = _text("other_letters", lambda text: text.translate(str.maketrans(_LETTERS, _MIXED)))
one_letter = _text("one_letter", lambda text: "a" * 400_000)


@dataclass(frozen=True)
class Sick:
    """A sick run. rule: the name that is right. made: folder for texts -> changes of TINY. remedy: what a finding's words mean here, if its
    fix is no data. after: values of a run whose weights it begins with."""

    name: str
    rule: str
    made: Callable[[Path], Values]
    harm: Harm
    remedy: Callable[[Path], Values] | None = None
    after: Callable[[Path], Values] | None = None


def _sources(folder: Path) -> list[Values]:
    return [{"path": str(code(folder)), "weight": 99.0}, {"path": str(other_letters(folder)), "weight": 1.0}]


PATHOLOGIES = (
    Sick("router lr too high", "router saturates", lambda folder: {"optimizer.lr": 0.3}, loss_on()),
    Sick("no balance loss", "no balance loss", lambda folder: {"router.balance_weight": 0.0}, busiest),
    Sick("capacity 0.5", "capacity", lambda folder: {"router.capacity_factor": 0.5}, dropped),
    Sick(
        "bias rate 1",
        "bias rate",
        lambda folder: {"router": {"preset": "deepseek_v3", "num_choices": 2, "select": "top_k", "gate_scale": 1.0, "bias_rate": 1.0}},
        busiest,
    ),
    Sick(
        "bf16 router", "bf16 weights", lambda folder: {"precision": {"compute": "bf16", "master": "bf16"}, "optimizer.lr": 1e-4}, loss_on()
    ),
    Sick(
        "one source dominating",
        "one source",
        lambda folder: {"data": {"source": "text", "sources": _sources(folder)}},
        loss_on(other_letters),
    ),
    Sick(
        "expert choice in eval",
        "looks ahead",
        lambda folder: {"router": {"preset": "expert_choice", "allow_noncausal": True}},
        peeks,
    ),
    Sick(
        "all equal tokens",
        "equal tokens",
        lambda folder: {"data": {"source": "text", "path": str(one_letter(folder))}},
        loss_on(code),
        remedy=lambda folder: {"data": {"source": "text", "path": str(code(folder))}},
    ),
    Sick(
        "frozen router after vocabulary change",
        "frozen router",
        lambda folder: {"data": {"source": "text", "path": str(other_letters(folder))}, "train.freeze": ["router"]},
        busiest,
        after=lambda folder: {"data": {"source": "text", "path": str(code(folder))}},
    ),
    Sick(
        "warm-up too short",
        "warm-up",
        lambda folder: {"data": {"source": "text", "path": str(code(folder))}, "optimizer.lr": 0.04, "optimizer.warmup_steps": 0},
        loss_on(code),
        after=lambda folder: {"data": {"source": "text", "path": str(code(folder))}},
    ),
)


def sick(folder: Path, only: str = "") -> Iterator[dict[str, Any]]:
    for number, one in enumerate(PATHOLOGIES):
        if only in one.name:
            try:
                yield tried(one, folder, number)
            except (BadInput, RuntimeError) as error:
                yield {"run": one.name, "error": str(error), "passed": False}


def tried(one: Sick, folder: Path, number: int) -> dict[str, Any]:
    """Make the sick run and the run with its remedy. Return the row of both."""
    values, before = changed(TINY, one.made(folder)), None
    if one.after is not None:
        before = folder / f"{number}-before"
        trained(changed(TINY, one.after(folder)), before)
    found = trained(values, folder / f"{number}-sick", init_from=before)
    row = {"run": one.name, "lines": [each.line for each in found], "named": [each.rule for each in found] == [one.rule]}
    right = next((each for each in found if each.rule == one.rule), None)
    harms = [one.harm(folder / f"{number}-sick")]
    if right is not None:
        mended = changed(values, one.remedy(folder) if one.remedy else {})
        for fix in right.fix.ways("")[:1]:
            fix.apply(mended)
        again = trained(mended, folder / f"{number}-mended", init_from=before)
        harms.append(one.harm(folder / f"{number}-mended"))
        row |= {"again": [each.line for each in again], "mended": not again and harms[1] < harms[0]}
    return row | {"harm": harms, "passed": bool(row["named"] and row.get("mended"))}


# --- clean runs ---------------------------------------------------------------------------------------------------------------------------


def shrunk(name: str) -> Values:
    """Return a tiny version of a shipped recipe: its layers, router, optimizer and precision, with TINY's sizes. The warm-up is an equal
    share of the run."""
    run, small_ = load(name)[0], small(name)
    values = changed(TINY, {})
    values["model"] |= small_["model"] | {"moe_every": small_["model"]["moe_every"], "num_heads": 4}
    values["experts"] |= small_["experts"]
    values["data"] = small_["data"]
    if run.model.layers_with_experts():
        values["router"] = {"preset": run.router.preset, "allow_noncausal": run.router.allow_noncausal} | run.router.own
        values["experts"]["num_experts"] = max(8, small_["experts"]["num_experts"])
    optimizer = {key: value for key, value in run.optimizer.model_dump().items() if key not in ("kfac", "muon", "adafactor", "sgd")}
    values["optimizer"] = optimizer | {"warmup_steps": -(-run.optimizer.warmup_steps * STEPS // run.train.steps)}
    values["precision"] = {"compute": "bf16", "master": "bf16"} if run.precision.master == "bf16" else {"compute": "fp32"}
    return values


def of_preset(name: str) -> Values:
    """Return TINY with a published router. 32 experts if it has 8 choices. A router that looks ahead is one of the sick runs in a decoder,
    so it gets an encoder-decoder."""
    spec = PRESETS[name]
    values = changed(TINY, {"router": {"preset": name, "allow_noncausal": bool(looks_ahead(spec))}})
    if looks_ahead(spec) and not only_second_choices_look_ahead(spec):
        values["model"] |= {"kind": "encoder_decoder", "positions": "t5"}
        values["data"] = {"objective": "span_corruption"}
    values["experts"]["num_experts"] = 32 if spec.num_choices > 4 else 8
    return values


def clean(folder: Path, only: str = "") -> Iterator[dict[str, Any]]:
    runs = {name: lambda name=name: shrunk(name) for name in (*recipe_names(), *published_names())}
    runs |= {f"preset {name}": lambda name=name: of_preset(name) for name in PRESETS}
    for number, (name, values) in enumerate(runs.items()):
        if only in name:
            try:
                trained(values(), folder / str(number))
            except BadInput as bad:
                print(name, bad)
                continue
            lines = [line["line"] for line in read(folder / str(number)) if line.get("event") == "alarm"]
            yield {"run": name, "lines": lines, "last": last_window(folder / str(number)), "passed": not lines}


def last_window(out: Path) -> dict[str, float]:
    """Return the numbers of a run's last window that the rules compare with their limits; each the largest of all layers."""
    window = windows_of(read(out), STEPS)[-1]
    of: dict[str, Callable[[Any], float]] = {
        "busiest": lambda layer: layer.load_E.max(),
        "least": lambda layer: -layer.load_E.min(),
        "dropped": lambda layer: layer.dropped,
        "z_loss": lambda layer: layer.z_loss,
    }
    found = {name: abs(float(max(map(each, window.layers)))) for name, each in of.items() if window.layers}
    return {name: round(value, 3) for name, value in (found | {"router_share": window.router_share}).items()}


def cost(folder: Path, only: str = "") -> Iterator[dict[str, Any]]:
    """Milliseconds a step of `Live` for 60 layers with 256 experts, and for comparison of the line's JSON text; all windows of a run."""
    draw = np.random.default_rng(0)
    load = [[round(float(share), 5) for share in row] for row in draw.dirichlet(np.full(256, 30.0), 60)]
    layers = [{"layer": n, "load": row, "kept": 9, "dropped": 1, "z_loss": 1.0, "entropy": 2.0} for n, row in enumerate(load)]
    lines = [
        {"step": n, "loss": 9 / n, "lr": 1e-3, "grad_norm": 1.0, "grad_norm_parts": {"router": 0.1}, "moe": layers} for n in range(1, 401)
    ]
    live, start = Live(build_run(changed(TINY, {"train.steps": len(lines)}))), time.process_time()
    for line in lines:
        live.after_step(line)
    rules, start = time.process_time() - start, time.process_time()
    for line in lines:
        json_format.dumps(line)
    text = time.process_time() - start
    yield {
        "run": "60 layers, 256 experts",
        "rules_ms": 1e3 * rules / len(lines),
        "json_ms": 1e3 * text / len(lines),
        "passed": rules < text,
    }


def main(*, only: str = "", runs: str = "", json: str | None = None) -> int:
    """only: sick, clean, cost, or all if empty. runs: text in the names of the runs."""
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for kind, of in (("sick", sick), ("clean", clean), ("cost", cost)):
        if only not in kind:
            continue
        with tempfile.TemporaryDirectory() as folder:
            for row in of(Path(folder), runs):
                rows.append({"kind": kind} | row)
                print(kind, row, flush=True)
                if json:
                    write_json(json, verb="measured doctor", rows=rows)
    alarms = sum(not row["passed"] for row in rows if row["kind"] == "clean")
    return exit_codes.of(alarms <= 1 and sum(row["kind"] == "sick" and not row["passed"] for row in rows) <= 1)
