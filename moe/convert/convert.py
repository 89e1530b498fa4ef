"""`moe convert`: converts a checkpoint of one model into a checkpoint of another, from which `moe train` continues.

    dense run -> moe/convert/upcycle.py -> sparse checkpoint at step 0          copy, granular, noise, drop
    sparse run -> moe/convert/upcycle.py -> fewer experts, or dense             merge, prune

The new model is built as for a new run, so routers get their initial values by name and seed; then every tensor from the source
replaces the initial one. On either side each layer may be dense or sparse. A tensor of the source without a place in the new model
is refused: nothing is lost silently, and nothing is written unless everything fits.
"""

from __future__ import annotations

from json import loads as read_json
from pathlib import Path

import torch
from torch import Tensor

from moe.checks.together import check_together
from moe.convert.checks import Settings, check_convertible
from moe.convert.layers import Conversion, Values
from moe.launch import exit_codes
from moe.model.names import global_name
from moe.model.transformer import Transformer, extra_state
from moe.parallelize.build import build
from moe.parallelize.engines import start_engine
from moe.recipe import hash_table
from moe.recipe.load import build_run, load, resolved_yaml
from moe.recipe.sections import Parallel, Run, Sharding, Tiling
from moe.records import metrics
from moe.records.results import write_json
from moe.train.start import state
from moe.train.start.place import make_writable, settle_precision
from moe.train.start.restore import whole
from moe.train.start.resume import pass_on
from moe.train.start.state import Counters
from parallel.data.engine import MOMENTS, Engine
from parallel.data.load import given
from parallel.errors import BadInput, counted
from parallel.mesh.layout import Layout
from parallel.mesh.mesh import Degrees, Mesh
from parallel.numerics.precision import LossScale
from parallel.process.process import World
from parallel.store import checkpoint
from parallel.store.checkpoint import verify
from parallel.store.lock import alone_in

RECENT = 100  # number of a run's last training lines over which its load is averaged


def find(source: Path) -> Path:
    """Return the folder of a checkpoint: `source` itself, or if it is a run's folder, its newest undamaged checkpoint. Raises BadInput."""
    if (source / "manifest.json").is_file():
        verify(source)
        return source
    path = checkpoint.newest(source / "checkpoints", world=Mesh.of(Degrees()).axis("world"), log=print)
    if path is None:
        raise BadInput("FROM_RUN", got=source, needed="a run with a checkpoint, or a checkpoint", fix="train first: moe train dense_tiny")
    return path


def loads(source: Path, before: Run, *, step: int) -> dict[int, list[float]]:
    """Return layer -> load of each of its experts, from the metrics of the run `source` up to `step`, or from the JSON file `source`.

    A run's load is the mean over its last RECENT training lines. A file maps layer numbers to any numbers: {"1": [900, 20, 4, 76]}.
    Raises BadInput if a layer with experts is missing.
    """
    if source.suffix == ".json":
        try:
            found = {int(layer): [float(n) for n in counts] for layer, counts in read_json(source.read_text()).items()}
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise BadInput("--load", got=f"{source} ({error})", needed='JSON like {"1": [900, 20, 4, 76]}', fix="mend the file") from None
    else:
        lines = [line for line in metrics.read(source) if line.get("kind") == "train" and line["step"] <= step][-RECENT:]
        found = {}
        for line in lines:
            for layer in line.get("moe") or ():
                sums = found.setdefault(layer["layer"], [0.0] * len(layer["load"]))
                found[layer["layer"]] = [a + b / len(lines) for a, b in zip(sums, layer["load"], strict=True)]
    for nth, layer in enumerate(before.model.layers_with_experts()):
        count = before.experts.of_layer(nth)
        if len(found.get(layer, [])) != count:
            got = counted(len(found[layer]), "number") if layer in found else "nothing"
            raise BadInput("--load", got=f"{got} for layer {layer} in {source}", needed=f"{count}, one an expert", fix="--load FILE")
    return found


def convert(run: Run, source: Path, settings: Settings, *, load_from: Path | None = None) -> tuple[Engine, Conversion, Counters]:
    """Convert the checkpoint `source` to a model of the recipe `run`, in one process. Raises BadInput if it cannot be converted.

    `load_from`: a run or JSON file with the experts' loads; None: the source's run. Returns (the engine with the new model and its
    optimizer, the conversion, the counters of samples and steps with which training continues).
    """
    reader = whole(source)
    before = build_run(reader.state["recipe"])
    settings = check_convertible(before, run, settings)
    alone = run.model_copy(update={"degrees": Parallel(dp=1, ep=1), "sharding": Sharding(), "tiling": Tiling()})
    mesh = Mesh.of(Degrees())
    stored = reader.state.get(hash_table.STATE) if hash_table.wanted(run) else None
    table = hash_table.read(run, or_none=stored is not None) or stored
    model, layouts = build(alone, mesh, device=torch.device("cpu"), table=table)
    held = by_global_name(model, layouts)
    conversion = Conversion(before, run, reader, settings, {n: tuple(t.shape) for n, t in held.items()}, held.__getitem__)
    conversion.table = table
    if settings.needs_load:
        step = reader.state["counters"]["step"]
        conversion.load = loads(load_from or source.parent.parent, before, step=step)
    with torch.no_grad():
        for name, value in conversion.values().items():
            held[name].copy_(value)
        for name, bias_E in extra_state(model).items():
            bias_E.copy_(conversion.bias(name, bias_E))
    engine = start_engine(alone, model, layouts, mesh)
    counters = Counters()
    if settings.moments == "copy":
        vars(counters).update(reader.state["counters"])
        _load_moments(engine, conversion, layouts, counters)
    return engine, conversion, counters


def _load_moments(engine: Engine, conversion: Conversion, layouts: dict[str, Layout], counters: Counters) -> None:
    states = {name: engine.state(name) for name in layouts}
    for kind in MOMENTS:
        values = conversion.moments(kind)
        for name, layout in layouts.items():
            for part, into in _parts(name, layout, states[name][kind]):
                if part in values:
                    into.copy_(values[part])
    engine.load_state(states, given(states), steps=counters.updates)


def by_global_name(model: Transformer, layouts: dict[str, Layout]) -> Values:
    """Return the model's parameters by their names in checkpoints, where each expert of a stacked tensor has an entry of its own."""
    parameters = dict(model.named_parameters())
    return {part: view for name, layout in layouts.items() for part, view in _parts(name, layout, parameters[name].detach())}


def _parts(name: str, layout: Layout, whole: Tensor) -> list[tuple[str, Tensor]]:
    """Return (name in checkpoints, tensor) of a parameter, or if it is stacked over experts, one such pair for each expert."""
    if layout.unstack is None:
        return [(global_name(name), whole)]
    return [(layout.unstack.format(i), part) for i, part in enumerate(whole)]


def main(
    source: str,
    to: str,
    *,
    recipe: str,
    overrides: dict[str, str],
    settings: Settings,
    load: str | None = None,
    check: bool = False,
    json: str | None = None,
) -> int:
    """Convert, write the checkpoint to `to`, and print a report."""
    from moe.convert.report import changes_by_part, compared, expected_output, report_lines

    out, path = Path(to), find(Path(source))
    _check_new(out)
    run, origins = load_recipe(recipe, overrides)
    engine, conversion, counters = convert(run, path, settings, load_from=None if load is None else Path(load))
    reader = conversion.reader
    with alone_in(out, what="TO_RUN"):
        _check_new(out)  # a second time, because a run may have begun in this folder before the lock was held
        make_writable(out, World())
        (out / "recipe.yaml").write_text(resolved_yaml(run, origins))
        state.save(
            out / "checkpoints",
            engine,
            Mesh.of(Degrees()),
            counters=counters,
            scale=LossScale.of(run.precision.loss_scale),
            recipe=run.resolve(1).model_dump(mode="json"),
            tokenizer=reader.state["tokenizer"],
            data=reader.state["data"],
            table=conversion.table,
            keep=1,
        )
        pass_on(path, out)
    for line in report_lines(conversion, path, out):
        print(line)
    difference = compared(path, engine.module) if check else None
    if difference:
        print(difference.said())
    if json:
        rows = [{"part": part, "what": what} for part, what in changes_by_part(conversion)]
        about = {"method": conversion.settings.method, "source": str(path), "to": str(out), "output": expected_output(conversion)}
        write_json(json, verb="convert", rows=rows, **about, check=None if difference is None else vars(difference))
    return exit_codes.DONE


def _check_new(out: Path) -> None:
    if checkpoint.numbered(out / "checkpoints"):
        raise BadInput("TO_RUN", got=f"{out}, which has checkpoints", needed="a new folder", fix="choose another, or remove it")


def load_recipe(recipe: str, overrides: dict[str, str]) -> tuple[Run, dict[str, str]]:
    """Load and check a recipe. Returns (the recipe with dtypes in place of auto, key -> origin of its value)."""
    run, origins = load(recipe, overrides)
    check_together(run.resolve(1))
    return settle_precision(run, World()), origins
