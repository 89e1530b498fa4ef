"""`moe verify --peer NAME`: runs parallel programs of other projects (peers) on gloo ranks of a CPU, and compares each with the same model
on one process.

    adapter   moe/verify/peers/NAME.py, found by its name: see below
    pair      one tiny model in one layout: `one` records a step on one process, `many` the same step on several ranks (moe/verify/yours)
    row       result of a pair: the first deviation that `moe verify --compare` finds in the forward pass, or else in the backward pass

All layouts of a model are compared with the same recording of one process. A pair that cannot run on a CPU gets a row with the reason.
An adapter has

    PACKAGES    module -> package that pip installs
    MODELS      names for --model; ROUTED: those with routers
    DEGREES     the axes that it supports, from ep, tp and fsdp
    load()      imports the modules, before ranks are forked
    pairs(models, degrees, pin)   yields a Pair for each comparison. degrees: axis -> number of ranks. pin: routers on several ranks
                                  choose the experts that they chose on one process (moe/verify/yours/choices.py)
    others()    optional: returns further names for --model, which depend on the installed release; `--model others` is all of them
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe.launch import exit_codes
from moe.records.results import write_json
from moe.verify.yours.compare import first_deviations, judged
from moe.verify.yours.recorder import record
from parallel.errors import BadInput, counted, cut, did_you_mean
from parallel.process.fork import run_on_ranks

Say = Callable[[str], None]
Row = dict[str, Any]
say_now: Say = partial(print, flush=True)  # each row must be printed immediately, also into a pipe


def names() -> list[str]:
    """Return the names of all adapters."""
    return sorted(file.stem for file in (Path(__file__).parent / "peers").glob("[a-z]*.py"))


def main(
    peer: str,
    *,
    model: str | None = None,
    degrees: dict[str, int] | None = None,
    only: str | None = None,
    pin: bool = False,
    json: str | None = None,
    timeout_s: float | None = None,
    say: Say = say_now,
) -> int:
    """Run `moe verify --peer`: compare each pair of a model and a layout with one process, and print a row for it. Returns 0 if all are
    equal, 1 if a pair deviates or could not be compared.

    model: comma-separated names, by default the adapter's MODELS; "others": all further models of the installed release, if the adapter
    lists them (`others`). degrees: ep, tp, fsdp -> number of ranks; None: 2 for each axis that the peer supports. only: run only pairs
    whose row contains this text in model or layout. pin: ranks replay the choices of experts that the single process made. timeout_s: time
    limit for the recording of one step."""
    adapter = _adapter(peer)
    known = degrees or dict.fromkeys(adapter.DEGREES, 2)
    for name, degree in known.items():
        if name not in adapter.DEGREES:
            needed = f"only --{' and --'.join(adapter.DEGREES)} with {peer}"
            raise BadInput(f"--{name}", got=degree, needed=needed, fix=f"remove --{name}")
        if degree not in (2, 4):
            needed = "2 or 4, which divide the tiny models' 4 samples, heads and experts"
            raise BadInput(f"--{name}", got=degree, needed=needed, fix=f"--{name} 2")
    torch.set_num_threads(1)  # for each rank, too: ranks are forked from this process
    models = _models(model, adapter, peer, pin)
    pairs = list(adapter.pairs(models, known, pin))
    idle = [name for name in models if name not in {pair.model for pair in pairs}]
    if idle and (model is not None or not pairs):
        given = " ".join(f"--{name} {degree}" for name, degree in known.items())
        raise BadInput("--model", got=f"{idle[0]} with {given}", needed="degrees with which this model is tested", fix=f"remove {given}")
    if not (chosen := [pair for pair in pairs if only is None or only in f"{pair.model} {pair.layout}"]):
        titles = cut(", ".join(f"{pair.model} {pair.layout}" for pair in pairs))
        raise BadInput("--only", got=only, needed=f"a part of a row's text: {titles}", fix=f'--only "{pairs[0].layout}"')
    adapter.load()
    rows, started = list[Row](), time.perf_counter()
    say(f"{peer} {_version(adapter)}" + (", routers replay the choices of the run on one process" if pin else ""))
    say(_line("model", "layout", "ranks", "equal", "differ", "not compared", "first deviation"))
    with tempfile.TemporaryDirectory(prefix="peers-") as home:
        for row in _rows(chosen, Path(home), 300.0 if timeout_s is None else timeout_s):
            rows.append(row)
            say(_line(*(str(row[n]) for n in ("model", "layout", "world", "equal", "differ", "open", "said"))))
    states = [row["passed"] for row in rows]
    least = "" if all(states) or False in states else ": not all could be compared"
    say(
        f"{states.count(True)} passed, {states.count(False)} failed, {states.count(None)} did not run{least}; "
        f"{counted(len(rows), 'pair')} in {time.perf_counter() - started:.0f} s"
    )
    if json is not None:
        write_json(json, verb="verify peer", rows=rows, passed=states.count(True), peer=peer, version=_version(adapter))
    return exit_codes.of(all(states))


def _rows(pairs: list[Pair], home: Path, timeout_s: float) -> Iterator[Row]:
    """Run the pairs and yield their rows. `equal`, `differ`: numbers of values within and beyond their bounds. `open`: number of values
    that are not compared. `passed`: None for a pair that did not run."""
    failed: dict[str, str] = {}
    for pair in pairs:
        one, many = home / pair.model / "one", home / pair.model / pair.layout.replace(" ", "-")
        row: Row = {"model": pair.model, "layout": pair.layout, "world": pair.world, "equal": "", "differ": "", "open": "", "passed": None}
        try:
            if pair.model in failed:
                raise RuntimeError(failed[pair.model])
            if not one.exists():
                run_on_ranks(_call(pair.one, one), 1, timeout_s=timeout_s)
            run_on_ranks(_call(pair.many, many), pair.world, timeout_s=timeout_s)
        except RuntimeError as error:
            if not list(one.glob("rank-0.json")):
                failed[pair.model] = str(error)
            yield row | {"said": f"did not run: {_reason(str(error))}"}
            continue
        comparison, lacking = judged(one, many)
        wrong = [deviation for deviation, _ in comparison.found if not deviation.passed]
        numbers = {"equal": len(comparison.found) - len(wrong), "differ": len(wrong), "open": len(comparison.refused)}
        first = next((cells for cells in first_deviations(comparison) if cells is not None), None)
        said = _said(*first) if first is not None else lacking or "none"
        yield row | numbers | {"said": said, "passed": not wrong and not lacking, "rows": [deviation.row() for deviation in wrong]}


def _said(name: str, value: str, deviation: str, bound: str, factor: str, cause: str) -> str:
    return f"{name}: {value} off by {deviation} (bound {bound}): {cause}"


def _call(function: Callable[[Path], None], folder: Path) -> Callable[[int], None]:
    return lambda rank: function(folder)


def _reason(error: str) -> str:
    """Return the error at the end of a rank's traceback. Prefer ranks that failed themselves to ranks that only lost the connection to
    another. Without a traceback, return the line about the first rank that did not end."""
    tracebacks = re.split(r"^rank \d+ failed:\n", error, flags=re.M)[1:]
    parts = [[" ".join(part.split()) for part in re.split(r"\n +[^\n]*(?=\n)", traceback)] for traceback in tracebacks]
    ends = [next(filter(None, reversed(part)), "no error") for part in parts]
    head, *lines = error.splitlines() if not ends else ("",)
    ends = ends or [f"{head}: {(*lines, 'no error')[0].removesuffix(' at:')}"]
    return next((end for end in ends if "gloo" not in end), ends[0])[:200]


def _adapter(peer: str) -> Any:
    """Return the adapter's module. Raises BadInput for an unknown name, and if a package is not installed."""
    if peer not in names():
        meant = did_you_mean(peer, names())
        raise BadInput("--peer", got=peer, needed=f"one of {', '.join(names())}", fix=f"--peer {meant or 'transformers'}")
    adapter = import_module(f"moe.verify.peers.{peer}")
    if lacking := [name for name in adapter.PACKAGES if find_spec(name.partition(".")[0]) is None or find_spec(name) is None]:
        needed, fix = f"the package {lacking[0]}", f"pip install {adapter.PACKAGES[lacking[0]]}"
        raise BadInput("--peer", got=f"{peer} without {lacking[0]}", needed=needed, fix=fix)
    return adapter


def _models(model: str | None, adapter: Any, peer: str, pin: bool) -> tuple[str, ...]:
    """Return the chosen models. With `pin`, only models with routers can be chosen."""
    known = adapter.ROUTED if pin else adapter.MODELS
    if not known:
        raise BadInput("--pin_routing", got=f"--pin_routing with {peer}", needed="a peer with routers", fix="remove --pin_routing")
    chosen = known if model is None else tuple(model.split(","))
    if hasattr(adapter, "others") and not set(chosen) <= set(known):
        others = adapter.others()
        chosen, known = others if model == "others" else chosen, known + others
    for name in (name for name in chosen if name not in known):
        meant = did_you_mean(name, known)
        raise BadInput("--model", got=name, needed=f"some of {','.join(known)}", fix=f"--model {meant or known[0]}")
    return chosen


def _version(adapter: Any) -> str:
    return str(import_module(next(iter(adapter.PACKAGES))).__version__)


def _line(model: str, layout: str, *cells: str) -> str:
    return f"{model:<14} {layout:<20} {cells[0]:>5} {cells[1]:>6} {cells[2]:>6} {cells[3]:>12}  {cells[4]}"


VOCABULARY = 264  # number of token ids


@dataclass(frozen=True)
class Pair:
    """A comparison to run: a model in a layout. one: records a step on one process into a folder. many: records the same step on each of
    `world` ranks. `many` may read the recording of `one`, which is in the folder `one` next to the folder of `many`."""

    model: str
    layout: str
    world: int
    one: Callable[[Path], None]
    many: Callable[[Path], None]


def subsets(degrees: dict[str, int]) -> Iterator[dict[str, int]]:
    """Yield each non-empty subset of the axes, as a dict: axis -> degree. Small subsets come first."""
    for size in range(1, len(degrees) + 1):
        yield from map(dict, combinations(degrees.items(), size))


def batch() -> Tensor:
    """Return the global batch [4, 11] of token ids."""
    return torch.randint(0, VOCABULARY, (4, 11), generator=torch.Generator().manual_seed(1))


def write_weights(model: nn.Module, folder: Path) -> None:
    """Add random numbers to the weights, since initial values of 0 or 1 would hide faults. Write weights and buffers to weights.pt."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({name: value.detach() for name, value in [*model.named_parameters(), *model.named_buffers()]}, folder / "weights.pt")


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits [B, L, V]."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def train(folder: Path, model: nn.Module, logits: Callable[[Tensor], Tensor], tokens: Tensor, *, pin: bool = False) -> None:
    """Record a training step with AdamW on these token ids into the folder. pin: replay the routers' choices that the single process
    recorded. logits: token ids -> the model's logits."""
    optimizer = adamw(model)
    for step in record(folder, model, optimizer, pin=folder.parent / "one" if pin else None):
        loss = loss_of(logits(tokens[:, :-1]), tokens[:, 1:])
        step.note("loss", loss)
        loss.backward()
        optimizer.step()


def adamw(model: nn.Module) -> Any:
    """Return the AdamW with which all adapters train. Its eps is large, so that a tiny gradient does not cause an update as large as lr."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-6, foreach=False)
