"""Builds this rank's shards of a recipe's model, in this order: model on the meta device, LoRA adapters, recomputation and tiles, layouts,
the rank's pipeline stages, its shards and the exchanges between ranks, initial values, compilation.
"""

from __future__ import annotations

import re

import torch
from torch import nn

from moe.experts.experts import MATRICES, Experts
from moe.model.initialize import FirstValues, SigmaOf, global_name, initialize, zero_buffers
from moe.model.transformer import Block, Transformer, embedding_as_module, moe_layers
from moe.nn.blocks import Form
from moe.nn.lora import TARGETS, adapt, freeze
from moe.parallelize import stages
from moe.parallelize.compiled import compile_between_products
from moe.parallelize.engines import setup_of
from moe.parallelize.plan import axes_of_tokens, lay_out, plan_for
from moe.parallelize.sequence import slice_sequences
from moe.recipe import hash_table, sections
from moe.recipe.frozen import is_frozen
from moe.recipe.hash_table import Table
from moe.recipe.sections import Lora, Run
from moe.router.own import check_own
from parallel.errors import BadInput
from parallel.mesh.gradients import data_axis
from parallel.mesh.layout import Layout
from parallel.mesh.mesh import Mesh
from parallel.numerics.precision import DTYPES
from parallel.tensor.style import Plan, apply, fits

# modules that tiling.ffn replaces by sums of narrower ones, with the same values (parallel/data/tiling.py)
TILED = ("layers.*.ffn", "layers.*.moe.experts", "layers.*.moe.shared", "layers.*.moe.residual", "ahead.*.block.ffn")
VOCABULARY = ("embedding", "head")  # modules that tiling.head cuts into tiles


def laid_out(run: Run, mesh: Mesh) -> tuple[Transformer, Plan, dict[str, Layout]]:
    """Return (this rank's shards of the model on the meta device, with their communication between ranks; the plan; the shards'
    layouts)."""
    with torch.device("meta"):
        compute = DTYPES.get(run.precision.compute, torch.float32)
        model = Transformer(run.model, run.experts, run.router, vocab_size=run.vocab_size, compute=compute)
        adapt(model, run.lora)
        model.adapted = run.lora.rank > 0
        save_memory(model, recompute=run.recompute, tiling=run.tiling)
        model.to(DTYPES[run.precision.master])
    if run.carrier.by_module or run.degrees.tp > 1:
        embedding_as_module(model)
    plan = plan_for(run)
    layouts = lay_out(model, plan)
    for layout in layouts.values():
        data_axis(layout, mesh)  # makes process groups: collective, so each rank does it also for parameters of other stages
    axes_of_tokens(run, mesh)
    if mesh.axis("pp").size > 1:
        layouts = stages.hold(run, model, layouts, mesh)
    apply(model, plan, layouts, mesh)
    slice_sequences(run, model, mesh)
    return model, plan, layouts


def build(
    run: Run, mesh: Mesh, *, device: torch.device, table: Table | None = None, spread: SigmaOf | None = None
) -> tuple[Transformer, dict[str, Layout]]:
    """Return (this rank's shards of the model, parameter's name -> layout). Collective. `table`: a checkpoint's table of experts for hash
    routers; None: the recipe's file is read. spread: computes standard deviations of initial values (FirstValues). Raises BadInput if the
    compute dtype is `auto`, if the table does not fit the recipe, or if a user's router is wrong (`check_own`).
    """
    if run.precision.compute not in DTYPES:
        fix = "call settle_precision first, as train() does, or set bf16"
        raise BadInput("precision.compute", got=run.precision.compute, needed=f"one of {', '.join(DTYPES)}", fix=fix)
    model, _, layouts = laid_out(run, mesh)
    # here and not in laid_out, because `moe show --plan` calls laid_out and must not run a user's router functions
    for num_experts in set(model.expert_counts.values()):
        check_own(run.router, num_experts)
    if run.lora.in_blocks:
        layouts = _in_blocks(model, layouts, run.lora, run.lora.in_blocks, device)
    first = FirstValues(run.model, layouts, mesh, seed=run.train.seed, spread=spread)
    cut = run.carrier.cut
    if cut is None:
        initialize(model, first, device=device)
    else:
        cut(model, setup_of(run, model, layouts, mesh), device, first.fill)
        zero_buffers(model, device=device)
    if model.adapted:
        freeze(model)
    for name, parameter in model.named_parameters():
        if is_frozen(global_name(name), run.train.freeze):
            parameter.requires_grad_(False)
    if run.train.compile:
        compile_between_products(model)
    _give_tables(run, model, table, device=device)
    return model, layouts


def _in_blocks(model: Transformer, layouts: dict[str, Layout], lora: Lora, form: Form, device: torch.device) -> dict[str, Layout]:
    """Replace frozen matrices of the kinds `lora.blocks_of` by quantized blocks of the format `form` (moe/nn/blocks.py). Return the layouts
    of the remaining parameters, which engines manage."""
    left, patterns = dict(layouts), [TARGETS[kind] for kind in lora.blocks_of]
    for path, module in model.named_modules():
        if any(re.fullmatch(pattern, path) for pattern in patterns):
            names = [name for name in MATRICES if getattr(module, name) is not None] if isinstance(module, Experts) else ["weight"]
            module.keep_in_blocks(form, {name: left.pop(f"{path}.{name}") for name in names}, device)  # type: ignore[operator]
    return left


def _give_tables(run: Run, model: Transformer, table: Table | None, *, device: torch.device) -> None:
    if hash_table.wanted(run) is None:
        return
    if table is None:
        table = hash_table.read(run)
    else:
        hash_table.check(table, run, where="the checkpoint")
    assert table is not None
    made: dict[int, torch.Tensor] = {}  # id() of a table -> its tensor, because layers can share a table
    for layer in moe_layers(model):
        rows = hash_table.of_layer(table, layer.layer)
        if id(rows) not in made:
            made[id(rows)] = torch.tensor(rows, device=device).reshape(len(rows), -1)
        layer.router.table_VK = made[id(rows)]


def whole_layouts(run: Run) -> dict[str, Layout]:
    """Return parameter's name -> layout for the entire model, including other pipeline stages."""
    with torch.device("meta"):
        model = Transformer(run.model, run.experts, run.router, vocab_size=run.vocab_size)
        adapt(model, run.lora)
    return lay_out(save_memory(model, tiling=run.tiling))


def save_memory(model: Transformer, *, recompute: sections.Recompute | None = None, tiling: sections.Tiling | None = None) -> Transformer:
    """Apply the recipe's recomputation and tiling to the model in place, and return it."""
    recompute, tiling = recompute or sections.Recompute(), tiling or sections.Tiling()
    model.loss_chunks = recompute.loss_chunks
    for block in model.modules():
        if isinstance(block, Block):  # also the blocks of multi-token prediction
            block.recompute = recompute.of_layer(block.layer)
    if tiling.head > 1:
        embedding_as_module(model)
        _tile(model, VOCABULARY, tiling.head)
    if tiling.ffn > 1:
        _tile(model, TILED, tiling.ffn)
    return model


def _tile(model: nn.Module, patterns: tuple[str, ...], count: int) -> None:
    for path in [path for path, _ in model.named_modules() if any(fits(pattern, path) for pattern in patterns)]:
        parent, _, last = path.rpartition(".")
        setattr(model.get_submodule(parent), last, model.get_submodule(path).in_tiles(count))  # type: ignore[operator]
