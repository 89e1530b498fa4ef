"""A recipe's pipeline stages: the layers of each stage, and the pp ranks that hold each parameter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import nn

from moe.model.transformer import StageLayers, Transformer
from moe.plan.job.of_recipe import network_of
from moe.plan.pipeline import layers_of, schedule_of
from moe.recipe.sections import Run
from parallel.data.engine import Engine
from parallel.mesh.layout import Layout
from parallel.mesh.mesh import Mesh
from parallel.numerics.weight_gradient import splittable
from parallel.pipeline.links import Links
from parallel.pipeline.runtime import OverlappedReduction, Runtime, StageReplicas
from parallel.pipeline.schedule import Schedule, stage_complete_at


def parts_of(run: Run, schedule: Schedule) -> tuple[StageLayers, ...]:
    """Return the layers of each stage. Raises BadInput if the layers cannot be divided into the schedule's stages."""
    layers, last = layers_of(run, schedule), schedule.num_stages - 1
    return tuple(StageLayers(run_of, begins=stage == 0, ends=stage == last) for stage, run_of in enumerate(layers))


def hold(run: Run, model: Transformer, layouts: dict[str, Layout], mesh: Mesh) -> dict[str, Layout]:
    """Keep only this rank's stages of a model on the meta device. Return the layouts of the kept parameters. If several pp ranks hold a
    parameter, its layout names them (`holders`)."""
    schedule = schedule_of(run)
    parts = parts_of(run, schedule)
    here = mesh.axis("pp").index
    model.hold({stage: parts[stage] for stage in schedule.stages_of(here)})
    held = {}
    for name, layout in layouts.items():
        ranks = sorted({rank for stage in stages_with(model, name, parts) for rank in schedule.homes[stage]})
        if here in ranks:
            held[name] = replace(layout, holders=tuple(ranks) if len(ranks) > 1 else ())
    return held


def stages_with(model: Transformer, name: str, parts: Iterable[StageLayers]) -> list[int]:
    """Return the indices of the stages that read a parameter: one for most parameters; two for an embedding that the last stage also reads;
    several for a position bias that all layers of the encoder or decoder share. parts: layers of each stage, in the stages' order."""
    words, shared, begins = name.split("."), model.config.ends_read_embedding, model.config.decoder_begins

    def reads(part: StageLayers) -> bool:
        if words[0] == "layers" and model.halves and name.endswith(".attention.bias.weight"):
            return bool({*model.config.half_of(int(words[1]))} & {*part.layers})
        if words[0] in ("layers", "encoder_norm"):
            return (int(words[1]) if words[0] == "layers" else begins - 1) in part.layers
        return (part.begins or (part.ends and shared)) if words[0] == "embedding" else part.ends

    return [stage for stage, part in enumerate(parts) if reads(part)]


def stage_of_each(run: Run, model: Transformer, names: Iterable[str]) -> dict[str, int]:
    """Return a dict: parameter's name -> the first stage that reads it."""
    parts = parts_of(run, schedule_of(run))
    return {name: stages_with(model, name, parts)[0] for name in names}


def _names_of(model: Transformer, parts: tuple[StageLayers, ...]) -> dict[int, list[str]]:
    """Return a dict: stage index -> names of the parameters on this rank that only this stage reads, in the model's order. parts: layers of
    each stage."""
    found: dict[int, list[str]] = {}
    for name, _ in model.named_parameters():
        stages = stages_with(model, name, parts)
        if len(stages) == 1:
            found.setdefault(stages[0], []).append(name)
    return found


def overlapped_sums(run: Run, engine: Engine, runtime: Runtime) -> OverlappedReduction:
    """Return an object that starts the data-parallel sum of each gradient as soon as the gradient is complete. If several stages of this
    rank read a parameter, its gradient is complete after the last of these stages."""
    model, schedule, rank = engine.module, runtime.schedule, runtime.axis.index
    assert isinstance(model, Transformer)
    parts, names = parts_of(run, schedule), dict[int, list[str]]()
    ends = {stage: at for at, stage in stage_complete_at(schedule.orders[rank]).items()}
    for name, _ in model.named_parameters():
        last = max((stage for stage in stages_with(model, name, parts) if stage in ends), key=ends.__getitem__)
        names.setdefault(last, []).append(name)
    return OverlappedReduction(schedule, rank, names, expect=engine.expect_sums, start=engine.start_sums)


def start_runtime(run: Run, model: nn.Module, layouts: dict[str, Layout], mesh: Mesh) -> Runtime:
    """Return the runtime that executes this rank's part of the pipeline schedule. Collective, because it makes process groups."""
    assert isinstance(model, Transformer)
    schedule = schedule_of(run)
    parts = parts_of(run, schedule)
    names = ("embedding", *(f"layers.{first}.attention.bias.weight" for first in (0, run.model.decoder_begins)))
    stages = [stages_with(model, name, parts) for name in names]
    shared = {tuple(sorted({rank for stage in those for rank in schedule.homes[stage]})) for those in stages}
    for ranks in sorted(homes for homes in {*schedule.homes} | shared if len(homes) > 1):
        mesh.part("pp", ranks, label="replicas")
    down = mesh.part("pp", tuple(range(mesh.axis("pp").size)), label="down")
    assert down is not None
    replicas = StageReplicas(dict(model.named_parameters()), layouts, mesh, of_stage=_names_of(model, parts))
    # with 16-bit compute, ordinary products would keep a cast copy of a weight for each micro-batch in flight; splittable products do not
    if schedule.splits_backward or model.compute.itemsize < next(model.parameters()).dtype.itemsize:
        splittable(model)
    frozen = network_of(run).unreached
    # with frozen = 0 the first stage may have trained weights without having layers: the embedding
    trained_from = next((stage for stage, part in enumerate(parts) if frozen in part.layers), schedule.num_stages - 1) if frozen else 0
    return Runtime(schedule, mesh.axis("pp"), Links(mesh.axis("pp"), down), replicas, trained_from)


def crossing_shape(run: Run, tokens_BL: Sequence[int]) -> tuple[int, ...]:
    """Return the shape [B, L, D] of the activations that a rank sends to the next stage. `tokens_BL`: shape of the rank's tokens in a
    micro-batch. L is divided by tp with tensor.sequence_parallel, and D by the columns of a tp grid.
    """
    batch, length = tokens_BL
    columns = run.tp_grid().columns
    return batch, length // (run.degrees.tp if run.tensor.sequence_parallel else 1), run.model.d_model // columns
