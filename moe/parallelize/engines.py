"""Starts the engine of a recipe's sharding and optimizer around a model.

The replicas of sharding.kind dp (parallel/data/dp.py) share the sequences of a micro-batch. A token's index in the step does not depend on
its replica, so noise, capacity groups and losses are the same as on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from moe.experts.layer import LayerReport
from moe.model.initialize import is_bias, is_stack_of_biases
from moe.model.transformer import Output, Transformer
from moe.nn.linear import Linear
from moe.parallelize.curvature import watched
from moe.parallelize.stages import stages_with
from moe.recipe import sections
from moe.recipe.plugin import is_plugin, load_plugin
from moe.recipe.sections import Run
from parallel.data.dp import SumReplicas
from parallel.data.engine import AdamW, Engine, Rule
from parallel.data.kinds.kind import Setup
from parallel.data.offload import Offload
from parallel.data.tiling import tiles_of
from parallel.errors import BadInput
from parallel.fixes import Words, all_of
from parallel.kfac.grafted import Grafted, KfacEngine
from parallel.kfac.kfac import Settings
from parallel.mesh.gradients import data_axis
from parallel.mesh.layout import Layout, Tile
from parallel.mesh.mesh import Mesh
from parallel.numerics.precision import DTYPES
from parallel.optim.adafactor import Adafactor
from parallel.optim.given import Factory, Given
from parallel.optim.muon import Muon, Orientation
from parallel.optim.sgd import Sgd
from parallel.process.libc import give_freed_memory_back
from parallel.tensor.style import fits

if TYPE_CHECKING:
    from parallel.data.fsdp import Unit

# path patterns of modules; FSDP gathers all parameters of such a module together, but tiles in it (parallel/data/tiling.py) one at a time
UNITS = ("embedding", "layers.*", "layers.*.moe", "layers.*.moe.shared", "layers.*.moe.residual", "ahead.*", "head")

# path patterns of small parameters that FSDP and ZeRO keep and gather in the master dtype: the model reads them in fp32, or casts them
# itself (LoRA)
READ_IN_FP32 = (
    "**norm.weight",
    "**.attention.bias.weight",
    "**.attention.sinks.weight",
    "layers.*.moe.router.**",
    "layers.*.moe.shared_gate.weight",
    "layers.*.moe.coefficient.weight",
    "layers.*.moe.output_bias",
    "**.lora_a",
    "**.lora_b",
    "layers.*.moe.experts.w*_*",
)


def prepare(run: Run, say: Callable[[str], None]) -> None:
    """If optimizer states or parameters are offloaded to a disk, compile DeepSpeed's async_io, once on each machine. Call this before
    `build`. `say`: prints a message. Collective. Raises BadInput if the compilation fails."""
    if offload_of(run.sharding.offload).on_disk:
        from parallel.data.deepspeed import compile_async_io

        compile_async_io(say)
        give_freed_memory_back()  # makes free() slower, but by little compared with the transfers to the disk


def offload_of(settings: sections.Offload) -> Offload:
    return Offload(settings.optimizer, settings.parameters, settings.path)


def setup_of(run: Run, model: Transformer, layouts: dict[str, Layout], mesh: Mesh) -> Setup:
    """Return the recipe's settings and the facts about the model that an engine needs."""
    s, wide, compute, kept = run.sharding, DTYPES[run.precision.master], model.compute, read_in_fp32(model)
    return Setup(
        layouts,
        mesh,
        offload=offload_of(s.offload),
        reshard=run.reshards,
        prefetch=s.prefetch,
        replicas=s.replicas,
        casts=run.precision.casts,
        working=None if compute == wide else lambda name: wide if name in kept else compute,
        units=lambda: units_of(model, lambda name: data_axis(layouts[name], mesh).ranks),
        scatter=scatter,
        gather=gather,
    )


def scatter(args: tuple[Any, ...], devices: Sequence[torch.device], together: Sequence[SumReplicas]) -> list[tuple[Any, ...]]:
    """Return each replica's arguments: its share of the sequences, on its device. `args`: (input ids [B, L], context, target ids).
    `together`: for each replica, the function with which its layers sum tensors over all replicas (Context.of_tokens)."""
    inputs_BL, context, targets_BL = args
    shares = _shares(args, len(devices))
    parts: list[tuple[Any, ...]] = []
    for i, device in enumerate(devices):
        run = Tile(0, i, len(devices)).run(len(inputs_BL))
        tokens = slice(run.start * inputs_BL.shape[1], run.stop * inputs_BL.shape[1])
        mine = (
            replace(context, sequence_B=context.sequence_B[run])
            .of_tokens(
                lambda x_T, tokens=tokens: x_T[tokens],  # type: ignore[misc]
                share=shares[i],
                together=together[i],
            )
            .to(device)
        )
        parts.append((inputs_BL[run].to(device), mine, targets_BL[run].to(device)))
    return parts


def _shares(args: tuple[Any, ...], count: int) -> list[float]:
    """Return the fraction of the micro-batch's valid tokens that each of `count` replicas gets. `args`: as in `scatter`."""
    inputs_BL, context, _ = args
    valid_BL = torch.ones_like(inputs_BL) if context.valid_T is None else context.valid_T.view(inputs_BL.shape)
    held = [int(valid_BL[Tile(0, i, count).run(len(inputs_BL))].sum()) for i in range(count)]
    return [n / max(1, sum(held)) for n in held]


def gather(args: tuple[Any, ...], outputs: Sequence[Output], device: torch.device) -> Output:
    """Combine the replicas' outputs on `device`: losses are summed, and reports of layers are merged, as if one replica had run the
    micro-batch. `args`: the arguments of all replicas, as given to `scatter`."""
    shares = _shares(args, len(outputs))
    layers = []
    for reports in zip(*(output.layers for output in outputs), strict=True):
        names = [f.name for f in fields(LayerReport) if f.name not in ("layer", "share")]
        parts = {name: [getattr(report, name).to(device) for report in reports] for name in names}
        means = {name: [x * share for x, share in zip(xs, shares, strict=True)] for name, xs in parts.items() if xs[0].is_floating_point()}
        layers.append(LayerReport(reports[0].layer, **{name: sum(xs) for name, xs in (parts | means).items()}))
    loss = torch.stack([output.loss.to(device) for output in outputs]).sum()
    return Output(torch.cat([output.logits_BLV.to(device) for output in outputs]), loss, tuple(layers))


def start_engine(run: Run, model: Transformer, layouts: dict[str, Layout], mesh: Mesh, *, rule: Rule | None = None) -> Engine:
    """Start the recipe's data-parallel engine. `rule`: a user's optimizer; None: the recipe's. Collective."""
    optimizer, kind = rule or optimizer_of(run.optimizer), run.carrier
    setup, k = setup_of(run, model, layouts, mesh), run.optimizer.kfac
    for module in model.modules() if kind.frees_weights else ():
        if isinstance(module, Linear):
            module.recast = True  # otherwise autograd stores the cast of a gathered weight until the backward pass
    if run.optimizer.kind != "kfac":
        return kind.start(model, setup, optimizer)
    assert isinstance(optimizer, AdamW)
    kfac = watched(model, layouts, mesh, settings=Settings(k.damping, k.ema, k.refresh_every, k.delay), experts=k.experts)
    return cast(Engine, KfacEngine(kind.start(model, setup, replace(optimizer, make=partial(Grafted, kfac=kfac))), kfac))


def optimizer_of(settings: sections.Optimizer) -> Rule:
    """Return the rule (kind and settings) of the recipe's optimizer; for K-FAC, the rule of its AdamW part."""
    s, betas = settings, (settings.beta1, settings.beta2)
    if is_plugin(s.kind):
        return given_of(s, load_plugin("optimizer.kind", s.kind, arguments=1))
    if s.kind == "muon":
        return Muon(s.muon.momentum, s.muon.scale, s.muon.lr_factor, betas, s.eps, s.weight_decay, decays, matrix)
    if s.kind == "adafactor":
        return Adafactor(s.adafactor.step, s.weight_decay, decays, is_stack_of_biases)
    if s.kind == "sgd":
        return Sgd(s.sgd.momentum, s.weight_decay, decays)
    return AdamW(betas, s.eps, s.weight_decay, decays)


def given_of(settings: sections.Optimizer, factory: Factory) -> Given:
    """Return the settings of the optimizer that the user's function `factory` makes."""
    return Given(factory, "optimizer.kind" if is_plugin(settings.kind) else "optimizer", settings.lr, settings.weight_decay, decays)


def check_given(rule: Given, run: Run, layouts: dict[str, Layout], mesh: Mesh) -> None:
    """Raise BadInput for a user's optimizer if a checkpoint cannot store its states, if updating a shard gives another result than updating
    the whole parameter, or if an update depends on parameters that other ranks hold. `layouts`: of all parameters of the model, so that
    every rank finds the same mistake.
    """
    kind = run.carrier
    unlike = mesh.axis("pp").size > 1  # whether ranks have different parameters or (found below) different shards
    for name, layout in layouts.items():
        num_dims = len(layout.shape)
        rule.kept(name, num_dims)
        apart = {dim for dim in range(num_dims) if any(mesh.axis(axis).size > 1 for axis in layout.cut_by(dim))}
        stacked = {0} if num_dims > 2 else set()  # dim of stacked experts: the optimizer must update each expert as a separate matrix
        if kind.steps == "shards" or layout.tile is not None:
            apart |= set(range(num_dims))
        unlike = unlike or bool(apart)
        if mixed := sorted((apart | stacked) - rule.cuts(name, num_dims)):
            experts = mixed == [0] and bool(stacked)
            what = "the experts of a layer are stacked" if experts else f"the parameter is cut along dim {mixed[-1]}"
            whole = {"sharding.kind": "ddp", "degrees.tp": 1, "degrees.etp": 1, "tiling.ffn": 1, "tiling.head": 1}
            fix = Words("update each expert separately") if experts else all_of(whole)
            got = f"an optimizer that updates a part of {name} differently from the whole parameter"
            fixes = fix | "use an elementwise optimizer for that parameter"
            raise BadInput(rule.key, got=got, needed=f"the same update of a part as in the whole parameter, because {what}", fix=fixes)
    if unlike and rule.coupled({name: len(layout.shape) for name, layout in layouts.items()}):
        got = "an optimizer whose update of a parameter depends on other parameters"
        whole = {"sharding.kind": "ddp", "degrees.pp": 1, "degrees.tp": 1, "degrees.ep": 1, "degrees.etp": 1}
        fixes = all_of(whole) | "clip by optimizer.clip_norm instead"
        raise BadInput(rule.key, got=got, needed="updates that depend on one parameter each: ranks hold different parameters", fix=fixes)


_TABLES = ("embedding", "head")
_GATES = (".router.", ".shared_gate.", ".coefficient.")  # matrices with few outputs a token, which Muon leaves to AdamW


def matrix(name: str, num_dims: int) -> Orientation | None:
    """Return the order of dims of a parameter's matrices, on which Muon's scale depends: "out_in" for [out, in], "in_out" for [in, out].
    Return None for parameters that Muon leaves to AdamW: embedding, head, router, gates, norms and biases. `num_dims`: number of the
    parameter's dims; a stack of experts has three."""
    if num_dims < 2 or is_bias(name) or name.split(".")[0] in _TABLES or any(part in name for part in _GATES):
        return None
    return "in_out" if ".experts." in name else "out_in"


def decays(name: str, parameter: Tensor) -> bool:
    """Return whether weight decay applies: to matrices only, not to norms, biases, or the router."""
    return parameter.ndim > 1 and ".router." not in name and not is_bias(name)


def units_of(model: Transformer, ranks_of: Callable[[str], tuple[int, ...]] = lambda name: ()) -> list[Unit]:
    """Return the units (groups of parameters that FSDP gathers together) in forward order: embedding, Transformer blocks, experts and other
    networks of MoE layers, head. Each tile (slice of a large matrix) is a unit. A unit's parameters are sharded over the same ranks, which
    `ranks_of(parameter)` returns. Units are gathered in the compute dtype, except the embedding, whose gradient is summed over tokens in
    fp32. Parameters in READ_IN_FP32 are in no unit.
    """
    from parallel.data.fsdp import Unit

    tiles = {id(tile) for tile in tiles_of(model)}
    paths = [path for path, module in model.named_modules() if id(module) in tiles or any(fits(unit, path) for unit in UNITS)]
    owned: dict[str, list[str]] = {path: [] for path in sorted(paths, key=lambda path: not path.startswith("embedding"))}
    small = read_in_fp32(model)
    for name, _ in model.named_parameters():
        inside = [path for path in paths if name.startswith(f"{path}.")]
        if inside and name not in small:
            owned[max(inside, key=len)].append(name)
    narrow = model.compute.itemsize < next(model.parameters()).dtype.itemsize
    units = []
    for path, names in _of_equal_ranks(owned, ranks_of):
        if not names:  # for example a layer that this stage has only for its position bias
            continue
        table, tile = path.startswith("embedding"), id(model.get_submodule(path)) in tiles
        tied = table and model.config.tied_embeddings
        dtype = model.compute if narrow and not table else None
        stage = stages_with(model, path, model.parts.values())[0]
        units.append(Unit(path, tuple(names), dtype, backward=tied or not table, ahead=not (tile or tied), stage=stage))
    return units


def _of_equal_ranks(owned: Mapping[str, list[str]], ranks_of: Callable[[str], tuple[int, ...]]) -> Iterator[tuple[str, list[str]]]:
    """Yield (path, parameters) of each FSDP unit. `owned`: path of a module -> its parameters. `ranks_of(name)`: the ranks over which
    a parameter is sharded. Parameters with other ranks than the first one of their module are split off, into one unit for each submodule
    (such as an attention layer)."""
    for path, names in owned.items():
        apart = [name for name in names if ranks_of(name) != ranks_of(names[0])]
        yield path, [name for name in names if name not in apart]
        yield from ((layer, list(those)) for layer, those in groupby(apart, key=lambda name: name.rsplit(".", 2)[0]))


def read_in_fp32(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters() if any(fits(pattern, name) for pattern in READ_IN_FP32)}
