"""ZeRO stage 3 with DeepSpeed: a rank holds 1/N of every weight, gradient and optimizer state, and a whole weight only during its use.

    forward, backward of a module    all-gather its weights | compute | free them
    backward                         and reduce-scatter its gradients to their owners
    step                             each rank on its own shard; nothing is gathered

Each parameter's attribute `ds_zero_partition_process_group` is the process group over which it is sharded, from its layout: experts over
edp (the ranks with copies of the same experts), the others over dp and sp. Weights are sharded module by module as they are made, so no
rank ever holds the whole model.
Sources: ZeRO (arXiv 1910.02054), ZeRO-Infinity (arXiv 2104.07857).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel.data.deepspeed import group_of, set_groups, start_deepspeed
from parallel.data.engine import MOMENTS, AdamW, Load, Working
from parallel.data.load import boxes, fill_run
from parallel.data.offload import Offload
from parallel.data.zero import BUCKET_ELEMENTS, DeepSpeed, Group, group_parameters, in_partition, settings
from parallel.mesh.gradients import data_axis
from parallel.mesh.layout import Layouts
from parallel.mesh.mesh import Mesh
from parallel.numerics.first_values import Fill
from parallel.watch.audit import Held


class ShardedInit:
    """Callable that replaces the weights of a model on the meta device by this rank's shards on `device`, module by module. Sends nothing.

    `fill` writes the shard's first values. While DeepSpeed shards a weight, the other ranks' part of it is allocated but never written."""

    def __init__(self, layouts: Layouts, mesh: Mesh, *, device: torch.device, fill: Fill, offload: Offload) -> None:
        self.deepspeed = start_deepspeed(device)
        self.layouts, self.device, self.fill = layouts, device, fill
        self.mpu = set_groups(mesh, layouts.values())
        self.folder, self.mesh = offload.folder(), mesh
        largest = max(math.ceil(math.prod(layout.local_shape(mesh)) / data_axis(layout, mesh).size) for layout in layouts.values())
        sections = offload.sections(None if self.folder is None else self.folder.name, largest=largest, device=device)
        self.settings = settings(3, _LIMITS | sections, device=device)

    def __call__(self, model: nn.Module) -> None:
        cut = self._cutter()
        for path, module in model.named_modules():
            for name, _ in list(module.named_parameters(recurse=False)):
                self._make(f"{path}.{name}" if path else name, module, cut)

    def _make(self, full: str, module: nn.Module, cut: Callable[[nn.Parameter], None]) -> None:
        name = full.rpartition(".")[2]
        parameter = nn.Parameter(torch.empty_like(module.get_parameter(name), device=self.device))
        axis = data_axis(self.layouts[full], self.mesh)
        parameter.ds_zero_partition_process_group = group_of(axis, self.mesh)  # type: ignore[attr-defined]
        parameter.sharded_init = self  # type: ignore[attr-defined]  # Zero3 reads it there
        each, flat = -(-parameter.numel() // axis.size), parameter.data.view(-1)
        for at, box in boxes(tuple(parameter.shape), axis.index * each, min((axis.index + 1) * each, parameter.numel())):
            shape = [part.stop - part.start for part in box]
            self.fill(full, flat[at : at + math.prod(shape)].view(shape), box)
        cut(parameter)
        setattr(module, name, parameter)
        self.first = parameter

    def _cutter(self) -> Callable[[nn.Parameter], None]:
        """Return a function that cuts a parameter to this rank's shard. DeepSpeed's own Init would first broadcast the whole weight."""

        class Init(self.deepspeed.zero.Init):  # type: ignore[misc, name-defined]
            def _zero_init_param(self, parameter: Any) -> None:
                self._convert_to_deepspeed_param(parameter)
                parameter.partition()

        init = Init(
            data_parallel_group=self.mpu.get_data_parallel_group(),
            config_dict_or_path=self.settings,
            mem_efficient_linear=False,
            mpu=self.mpu,
        )  # fp32, as the settings have neither fp16 nor bf16; DeepSpeed ignores the argument `dtype` on some processors
        assert init.dtype == torch.float32, f"{init.dtype} would round weights on a disk"
        if init.param_swapper is not None:
            _read_each_once(init.param_swapper)
        return lambda parameter: init._convert_to_zero_parameters([parameter])


_LIMITS = {
    "stage3_param_persistence_threshold": 0,  # no weight stays gathered, however small
    "stage3_max_reuse_distance": 0,  # no weight stays gathered until its next use, however soon
    "stage3_prefetch_bucket_size": BUCKET_ELEMENTS,
    "stage3_max_live_parameters": 2 * BUCKET_ELEMENTS,  # largest number of gathered elements, unless a single layer has more
}


class Zero3(DeepSpeed):
    """The engine of stage 3, for a model made by ShardedInit. `working`: parameter name -> dtype in which the model reads it; None: the
    master weights' dtype."""

    def __init__(
        self, model: nn.Module, *, layouts: Layouts, mesh: Mesh, optimizer: AdamW, offload: Offload, working: Working | None
    ) -> None:
        self.rule = optimizer
        self.module, self.layouts, self.mesh = model, layouts, mesh
        self.sharded_init: ShardedInit = next(model.parameters()).sharded_init  # type: ignore[attr-defined]
        self.offload = offload
        self.parameters = dict(model.named_parameters())
        groups = group_parameters(self.parameters, layouts, optimizer, working=working, mesh=mesh, marked=False)
        self.engine, _, _, _ = self.sharded_init.deepspeed.initialize(
            model=model,
            optimizer=optimizer.build([group.settings for group in groups]),
            dist_init_required=False,
            mpu=self.sharded_init.mpu,
            config=self.sharded_init.settings,
        )
        for module in model.modules():
            module.register_forward_hook(_hook_dataclass)
        self.zero = zero = self.engine.optimizer
        model.register_forward_hook(self._no_backward_pass)
        zero._gradient_averaging_world_size = lambda params, ranks: 1  # losses are shares of the global mean, so gradients are not averaged
        zero._get_norm_groups = lambda: [torch.zeros(())]  # unused: clip.py computes the norm
        zero.unscale_and_clip_grads = lambda *_: None  # it would multiply all gradients by 1
        # for each of DeepSpeed's sub-groups (parameters in one flat tensor), the parameter group to which it belongs
        self.of_sub_group = [groups[zero.sub_group_to_group_id[i]] for i in range(len(zero.fp16_groups))]
        if working is not None:
            self._narrow([group.dtype for group in self.of_sub_group])
        for number, master in enumerate(zero.fp32_partitioned_groups_flat):  # create states, so that state() works before the first step
            with self._swapped_in(number, write=True):
                zeros = {m: torch.zeros_like(master, requires_grad=False) for m in MOMENTS}
                zero.optimizer.state[master] = zeros | {"step": torch.zeros((), device=master.device)}

    def _no_backward_pass(self, *_: Any) -> None:
        """If gradients are off, free the weights that DeepSpeed has prefetched for a backward pass, because no backward pass follows."""
        if not torch.is_grad_enabled():
            self.zero._partition_all_parameters()

    @contextmanager
    def _swapped_in(self, number: int, *, write: bool) -> Iterator[None]:
        """Return a context manager that reads the optimizer states of sub-group `number` from the disk, if they are offloaded to one.
        write: also write them back."""
        zero = self.zero
        swapped = zero._swappable_optimizer_subgroup(number)
        if swapped:
            zero._optimizer_states_and_gradient_swap_in(number)
        try:
            yield
        finally:
            if swapped:
                (zero._optimizer_states_and_gradient_swap_out if write else zero._release_swap_buffers)(number)

    def _narrow(self, dtypes: list[torch.dtype]) -> None:
        """Convert the flat tensors of weights that the model reads: sub-group i to dtypes[i]. Weights on a disk are left as they are."""
        zero = self.zero
        masters = {flat.data_ptr() for flat in zero.fp32_partitioned_groups_flat}
        for number, dtype in enumerate(dtypes):
            flat = zero.fp16_partitioned_groups_flat[number]
            if flat is None or (flat.dtype == dtype and flat.data_ptr() in masters):
                continue  # the weights are on a disk (flat is None), or the model reads the fp32 master weights themselves
            narrow = flat.to(dtype, copy=True)
            zero.fp16_partitioned_groups_flat[number] = narrow.pin_memory() if flat.is_pinned() else narrow
            zero._unflatten_partitioned_parameters(number)
            for parameter in zero.fp16_groups[number]:
                parameter.data = torch.empty(0, dtype=dtype, device=parameter.device)
                parameter.grad_dtype = torch.float32
        if self.offload.parameters == "none":
            zero.lp_param_buffer = torch.empty(0)  # free the old buffer, copied above group by group
        if self.offload.parameters == "cpu":
            zero.param_groups_fp16_flat_cpu_memory = []

    def _gradients(self) -> Iterator[tuple[Group, nn.Parameter, Tensor]]:
        """Yield (group, parameter, this rank's shard of its summed gradient), in the order of the shards in DeepSpeed's gradient buffer."""
        zero, at = self.zero, 0
        for number, params in enumerate(zero.fp16_groups):
            for parameter in params:
                size = parameter.partition_numel()
                yield self.of_sub_group[number], parameter, zero.grad_partitions_flat_buffer.narrow(0, at, size)
                at += size

    def owned_gradients(self) -> Iterator[tuple[str, Tensor]]:
        return ((group.family, part) for group, _, part in self._gradients() if group.owned)

    def tensors(self) -> Iterator[Held]:
        """Yield this rank's partitions that are not on a disk. For each sub-group of parameters: the master weights, their optimizer
        states, then the weights that the model reads; then frozen weights. No other rank has copies."""
        zero = self.zero
        for number, master in enumerate(zero.fp32_partitioned_groups_flat):
            if not zero._swappable_optimizer_subgroup(number):
                yield from in_partition(number, master, zero.optimizer)
            working = zero.fp16_partitioned_groups_flat[number]
            if working is not None and working.numel():
                yield Held(f"partition {number}", "working weight", working)
        frozen: Any = {name: parameter for name, parameter in self.parameters.items() if not parameter.requires_grad}
        yield from (Held(name, "weight", parameter.ds_tensor) for name, parameter in frozen.items() if parameter.ds_tensor.numel())

    def summed_gradients(self) -> Iterator[Held]:
        return (
            Held(f"a parameter of {group.family}, number {n}", "gradient", part) for n, (group, _, part) in enumerate(self._gradients())
        )

    def copy_again(self) -> bool:
        return False

    def masters(self) -> Iterable[Tensor]:
        masters: Iterable[Tensor] = self.zero.fp32_partitioned_groups_flat
        return masters

    def drop_gradients(self) -> None:
        zero = self.zero
        zero._pre_step()
        zero._partition_all_parameters()
        zero.zero_grad(set_to_none=True)
        zero.averaged_gradients = {}
        if self.offload.optimizer != "none":
            zero.reset_cpu_buffers()

    def _whole(self, parameter: Any, part: Tensor) -> Tensor:
        group = parameter.ds_process_group
        whole = part.new_empty(len(part) * dist.get_world_size(group), device=self.sharded_init.first.device)
        dist.all_gather_into_tensor(whole, part.to(whole.device).contiguous(), group=group)
        return whole[: parameter.ds_numel].view(parameter.ds_shape)

    def gradient(self, name: str) -> Tensor:
        wanted = self.parameters[name]
        part = next(part for _, parameter, part in self._gradients() if parameter is wanted)
        return self._whole(wanted, part)

    def state(self, name: str) -> dict[str, Tensor]:
        parameter, zero = self.parameters[name], self.zero
        if not parameter.requires_grad:
            return {"weight": self._whole(parameter, parameter.ds_tensor)}  # type: ignore[attr-defined]
        number, first, size = zero.grad_position[zero.get_param_id(parameter)]
        with self._swapped_in(number, write=False):
            master = zero.fp32_partitioned_groups_flat[number]
            held = {"weight": master.detach()} | {m: zero.optimizer.state[master][m] for m in MOMENTS}
            return {kind: self._whole(parameter, tensor.narrow(0, first, size)) for kind, tensor in held.items()}

    def load_state(self, names: Iterable[str], load: Load, *, steps: int) -> None:
        zero = self.zero
        given = {id(self.parameters[name]): name for name in names}
        for name in given.values():
            frozen: Any = self.parameters[name]
            if not frozen.requires_grad:
                size = frozen.partition_numel()
                begin = dist.get_rank(frozen.ds_process_group) * size
                part = frozen.ds_tensor.data.view(-1).narrow(0, 0, max(0, min(size, frozen.ds_numel - begin)))
                fill_run(part, partial(load, name, "weight"), shape=tuple(frozen.ds_shape), first=begin)
        for number, params in enumerate(zero.fp16_groups):
            master = zero.fp32_partitioned_groups_flat[number]
            with self._swapped_in(number, write=True):
                for parameter in (p for p in params if id(p) in given):
                    _, first, size = zero.grad_position[zero.get_param_id(parameter)]
                    begin = dist.get_rank(parameter.ds_process_group) * size
                    length = max(0, min(size, parameter.ds_numel - begin))  # the last ranks may hold fewer elements, or none
                    for kind in ("weight", *MOMENTS):
                        held = master.data if kind == "weight" else zero.optimizer.state[master][kind]
                        part, wanted = held.narrow(0, first, length), partial(load, given[id(parameter)], kind)
                        fill_run(part, wanted, shape=tuple(parameter.ds_shape), first=begin)
                zero.optimizer.state[master]["step"].fill_(float(steps))
                zero._reassign_or_swap_out_partitioned_parameters(number)


def _read_each_once(swapper: Any) -> None:
    """Remove duplicates from DeepSpeed's prefetches. A weight that is used twice is listed twice, and its second read would fail."""
    read = swapper.swap_in

    def swap_in(params: list[nn.Parameter], **options: Any) -> None:
        read(list({id(parameter): parameter for parameter in params}.values()), **options)

    swapper.swap_in = swap_in


def _hook_dataclass(module: Any, _: Any, output: Any) -> Any:
    """Hook the tensors of a dataclass output. DeepSpeed, which gathers weights for the backward pass by such hooks, finds only tuples."""
    if not is_dataclass(output) or isinstance(output, type):
        return output
    tensors = {f.name: value for f in fields(output) if isinstance(value := getattr(output, f.name), Tensor) and value.requires_grad}
    return replace(output, **{name: module.pre_bwd_fn.apply(tensor) for name, tensor in tensors.items()})
