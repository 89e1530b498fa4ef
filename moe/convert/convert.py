"""`moe convert`: converts a checkpoint of one model into a checkpoint of another, from which `moe train` continues.

    dense run -> moe/convert/upcycle.py -> sparse checkpoint at step 0          methods copy, granular, noise, drop
    sparse run -> moe/convert/upcycle.py -> fewer experts, or dense             methods merge, prune

The new model is built as for a new run. Then converted tensors replace its initial values, which remain only in tensors without a
counterpart in the source, such as new routers. In both models each layer may be dense or sparse. If a tensor of the source
has no counterpart in the new model, or a wrong shape, the conversion is refused before anything is written. A report says how each part of
the model was converted, whether the output is unchanged, and how to continue.
"""

from __future__ import annotations

from dataclasses import dataclass
from json import loads as read_json
from pathlib import Path

import torch
from torch import Tensor

from moe.checks.together import check_together
from moe.convert.checks import Settings, check_convertible, even_gate_sum, experts_of, gate_sum, layers_that, parts
from moe.convert.layers import Conversion, Values, feed_forward
from moe.launch import exit_codes
from moe.model.initialize import global_name
from moe.model.transformer import Transformer, extra_state
from moe.nn.context import Context
from moe.parallelize.build import build
from moe.parallelize.engines import start_engine
from moe.recipe import hash_table
from moe.recipe.changes import ORDER, changes, function_changes
from moe.recipe.load import build_run, resolved_yaml
from moe.recipe.load import load as load_recipe
from moe.recipe.router_spec import RouterSpec
from moe.recipe.sections import Parallel, Run, Sharding, Tiling
from moe.records import metrics
from moe.records.results import write_json
from moe.train.start import state
from moe.train.start.place import make_writable, settle_precision
from moe.train.start.restore import restore, whole
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
from parallel.store.files import reason
from parallel.store.lock import alone_in

RECENT = 100  # an expert's load is averaged over the last RECENT training steps before the checkpoint


def find(source: Path) -> Path:
    """Return the folder of a checkpoint: `source` itself if it is a checkpoint, or the newest undamaged checkpoint of the run `source`.
    Raises BadInput if there is none."""
    if (source / "manifest.json").is_file():
        verify(source)
        return source
    path = checkpoint.newest(source / "checkpoints", world=Mesh.of(Degrees()).axis("world"), log=print)
    if path is None:
        raise BadInput("FROM_RUN", got=source, needed="a run with a checkpoint, or a checkpoint", fix="train first: moe train dense_tiny")
    return path


def loads(source: Path, before: Run, *, step: int) -> dict[int, list[float]]:
    """Return layer -> load of each of its experts. `source`: a JSON file with loads in any unit, such as {"1": [900, 20, 4, 76]}, or a run.
    A run's loads are means over the last RECENT training steps up to `step`, from its metrics. `before`: recipe of the run that is
    converted. Raises BadInput if an MoE layer of `before` has no loads, or a number of loads that differs from its number of experts."""
    if source.suffix == ".json":
        try:
            found = {int(layer): [float(n) for n in counts] for layer, counts in read_json(source.read_text()).items()}
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise BadInput(
                "--load", got=f"{source} ({reason(error)})", needed='JSON like {"1": [900, 20, 4, 76]}', fix="correct the file"
            ) from None
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
            raise BadInput(
                "--load",
                got=f"{got} for layer {layer} in {source}",
                needed=f"{counted(count, 'load')}, one for each expert",
                fix="--load RUN, where RUN is the folder of a run of this model",
            )
    return found


def convert(run: Run, source: Path, settings: Settings, *, load_from: Path | None = None) -> tuple[Engine, Conversion, Counters]:
    """Convert the checkpoint `source` to a model of the recipe `run`, in one process. Raises BadInput if it cannot be converted.
    `load_from`: run or JSON file with the experts' loads; None: the source's run. Returns (engine with the new model and its optimizer,
    conversion, counters with which training continues: the source's if the optimizer states are copied, else zeros)."""
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
        conversion.load = loads(load_from or source.parent.parent, before, step=reader.state["counters"]["step"])
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
    """Load the source's converted AdamW moments and number of updates into the engine's optimizer."""
    states = {name: engine.state(name) for name in layouts}
    for kind in MOMENTS:
        values = conversion.moments(kind)
        for name, layout in layouts.items():
            for part, into in _parts(name, layout, states[name][kind]):
                if part in values:
                    into.copy_(values[part])
    engine.load_state(states, given(states), steps=counters.updates)


def by_global_name(model: Transformer, layouts: dict[str, Layout]) -> Values:
    """Return name in checkpoints -> parameter. In checkpoints, each expert of a stacked tensor has its own name."""
    parameters = dict(model.named_parameters())
    return {part: view for name, layout in layouts.items() for part, view in _parts(name, layout, parameters[name].detach())}


def _parts(name: str, layout: Layout, whole: Tensor) -> list[tuple[str, Tensor]]:
    """Return pairs (name in checkpoints, tensor): one pair for a parameter, or one for each expert if it is a stack of experts."""
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
    """Convert the run or checkpoint `source` to a model of `recipe`, write it to the run folder `to`, and print a report. load: run or JSON
    file with the experts' loads. check: also compare both models' logits on random tokens."""
    out, path = Path(to), find(Path(source))
    _check_new(out)
    run, origins = load_recipe(recipe, overrides)
    check_together(run.resolve(1))
    run = settle_precision(run, World())
    engine, conversion, counters = convert(run, path, settings, load_from=None if load is None else Path(load))
    reader = conversion.reader
    with alone_in(out, what="TO_RUN"):
        _check_new(out)  # again, because a run may have begun in this folder before this process had the lock
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
        raise BadInput("TO_RUN", got=f"{out}, which has checkpoints", needed="a new folder", fix="choose another folder")


def report_lines(conversion: Conversion, source: Path, out: Path) -> list[str]:
    """Return the report's lines: one for each part of the model, then the expected output and the next command."""
    rows = changes_by_part(conversion)
    width = max(len(part) for part, _ in rows)
    return [
        f"{conversion.settings.method}: {source} -> {out}",
        *(f"  {part:<{width}}  {what}" for part, what in rows),
        f"output: {expected_output(conversion)}",
        f"continue with: moe train {out / 'recipe.yaml'} --out {out}",
    ]


def changes_by_part(conversion: Conversion) -> list[tuple[str, str]]:
    """Return the report's rows: pairs (part of the model, how it was converted), then pairs about changed recipe values, optimizer moments
    and the order of samples."""
    s, before, run = conversion.settings, conversion.before, conversion.run
    changed = layers_that("grow", before, run) + layers_that("shrink", before, run)
    kept = [n for n in conversion.shapes if not (feed_forward(n) and int(n.split(".")[1]) in changed)]
    rows = [("unchanged", f"{len(kept)} tensors: all but the feed-forward part of layers {', '.join(map(str, changed))}")]
    rows += [(f"layer {layer}", _layer(conversion, layer)) for layer in changed]
    other = ", ".join(map(str, function_changes(before, run)))
    rows += [("recipe", f"the new recipe changes what the weights compute: {other}")] if other else []
    if s.moments == "copy":
        step = conversion.reader.state["counters"]["step"]
        rows += [("moments", f"the source's, divided by the number of copies; continues at step {step}")]
        changed_order = ", ".join(str(change) for change in changes(before, run) if change.key in ORDER)
        return rows + ([("samples", f"in another order than the source's: {changed_order}")] if changed_order else [])
    return [*rows, ("moments", "fresh; starts at step 0")]


def _layer(conversion: Conversion, layer: int) -> str:
    """Return the report's text about a layer that is converted to experts, to fewer experts or to one dense network."""
    s, before, run = conversion.settings, conversion.before, conversion.run
    old, new = experts_of(before, layer), experts_of(run, layer)
    if new > old:
        one = {
            "copy": "copies of the dense network",
            "granular": f"{parts(before, run)} shards of it, {new // parts(before, run)} copies of each",
            "noise": f"copies with noise of {s.scale:g} standard deviations on {s.share:g} of the weights",
            "drop": f"copies with {s.share:g} of the hidden units drawn anew",
        }[s.method]
        factor = (parts(before, run) if s.method == "granular" else 1) / even_gate_sum(run.router, new)
        scaled = f"; down projection times {factor:g}" if factor != 1 else ""
        beside = "; residual network: the dense one" if run.experts.residual else ""
        beside += "; shared experts: new, their down projection zero" if run.experts.shared else ""
        return f"dense -> {counted(new, 'expert')}, {one}{scaled}; router new, seed {run.train.seed}{beside}"
    into = counted(new, "expert") if new else "dense"
    how = "the most used" if s.method == "prune" else f"means, {s.weights} weights"
    beside = "; shared experts joined to the dense network" if not new and before.experts.shared else ""
    return f"{counted(old, 'expert')} -> {into}: {how}{beside}{'; router rows likewise' if new else ''}"


def expected_output(conversion: Conversion) -> str:
    """Return a text for the report that says whether, and for which tokens, the new model's output equals the source's."""
    s, before, run = conversion.settings, conversion.before, conversion.run
    if s.method in ("noise", "drop"):
        return "near the source's: the experts differ from the source's network on purpose"
    if s.method in ("copy", "granular"):
        if gate_sum(run.router) is None:
            return f"not the source's: {run.router.preset}'s gates do not sum to a constant; equal only if all logits are equal"
        return "the source's, up to rounding, wherever no choice is dropped or declined"
    if run.model.layers_with_experts() and any(getattr(before.router, key) != getattr(run.router, key) for key in RouterSpec.model_fields):
        return "not the source's: the recipe has another router"
    if s.method == "merge":
        return "the source's only where the merged experts were equal"
    as_is = "" if gate_sum(before.router) is not None else "; gates grow by the probability that the pruned experts had"
    return f"the source's for tokens that chose no pruned expert{as_is}"


@dataclass(frozen=True)
class Difference:
    """Result of `compared` on `tokens` random tokens: largest absolute difference between the two models' logits, and largest absolute
    logit of the source."""

    tokens: int
    largest_difference: float
    largest_logit: float

    def said(self) -> str:
        differ = f"logits differ by at most {self.largest_difference:.2e} of {self.largest_logit:.2e}"
        return f"checked on {self.tokens} random tokens: {differ}"


@torch.no_grad()
def compared(source: Path, model: torch.nn.Module) -> Difference:
    """Compare the logits of the checkpoint `source` and of `model` on the same random tokens, in evaluation mode and fp32."""
    assert isinstance(model, Transformer)
    old = restore(source)
    tokens_BL = torch.randint(old.vocab_size, (4, min(128, old.config.max_length)), generator=torch.Generator().manual_seed(0))
    read = tokens_BL.shape[1] // 2 if old.config.kind == "encoder_decoder" else 0
    context, device = Context.of(tokens_BL, source=read), next(old.parameters()).device
    was = model.compute
    old.compute = model.compute = torch.float32
    want = old(tokens_BL.to(device), context.to(device)).logits_BLV.cpu()
    got = model.eval()(tokens_BL, context).logits_BLV
    model.compute = was
    return Difference(got[..., 0].numel(), (got - want).abs().max().item(), want.abs().max().item())
