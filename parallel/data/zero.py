"""ZeRO with DeepSpeed's engine: optimizer states, then gradients, then parameters are sharded over data-parallel ranks.

    stage 1   every rank keeps all weights, and optimizer states for 1/N of them. With fp32 master weights and no offload, each gradient is
              summed only on its owner, the rank that updates it, in this project's buckets (parallel/data/buckets.py)
    stage 2   also shards gradients: each is summed as soon as the backward pass has computed it, and only its owner keeps the sum
    stage 3   also shards weights (parallel/data/zero3.py)

A parameter is sharded over the ranks that sum its gradient (Layout.summed_over). DeepSpeed reduces (except in stage 1 as above),
partitions, steps and gathers. This project handles precision, loss scale, gradient norm, clipping, and checkpoints, which store tensors
under global names. Source: ZeRO (arXiv 1910.02054).

16-bit weights: DeepSpeed starts from the fp32 model, so its partitions are exact master weights. Then each flat group of weights that the
model reads in 16 bits is replaced by a copy in that dtype. Gradients are still summed in fp32 (Tensor.grad_dtype), over uses, micro-batches
and ranks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from parallel.data.buckets import Buckets, SummedEarly
from parallel.data.deepspeed import dense_axis, set_groups, start_deepspeed, with_mark
from parallel.data.engine import MOMENTS, AdamW, Load, OfStages, Rule, Working
from parallel.data.load import fill, fill_run, held_of
from parallel.data.offload import Offload
from parallel.data.stepped import at_rate
from parallel.mesh.gradients import Bucket, StartedSum, data_axis, start_sum
from parallel.mesh.layout import Layouts
from parallel.mesh.mesh import Mesh
from parallel.watch.audit import Held, copies_of

BUCKET_ELEMENTS = 8 * 2**20  # elements of gradients that are summed by one collective: 32 MiB in fp32


class DeepSpeed(OfStages):
    """Base class of the engines of all ZeRO stages: forward pass, backward pass and step by DeepSpeed's engine."""

    module: nn.Module
    engine: Any
    zero: Any  # DeepSpeed's sharded optimizer
    rule: Rule
    mesh: Mesh

    def forward(self, *args: Any, last: bool) -> Any:
        if self.mesh.axis("pp").size > 1:
            return self.module(*args)  # DeepSpeed's hooks would expect one loss of the whole model
        self.engine.set_gradient_accumulation_boundary(last)
        return self.engine(*args)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(loss)
        if not last:
            self.engine.step()  # only counts the micro-batch: DeepSpeed updates weights only at the last one

    def reduce(self) -> None:
        # called only with pipeline stages: an earlier sum by DeepSpeed would block the rank, and delay its other stages
        self.engine.set_gradient_accumulation_boundary(True)
        self.zero.setup_buckets()
        self.zero.reduce_gradients(pipeline_parallel=True)

    @abstractmethod
    def masters(self) -> Iterable[Tensor]:
        """Return this rank's flat shards of master weights."""

    def step(self, lr: float, *, factor: float = 1.0) -> None:
        with at_rate(lr, factor, self.zero.optimizer, weights=self.masters()):
            self.engine.step()


class _OnOwners(Buckets):
    """Sums each gradient on the ranks that update its elements: half the bytes of an all-reduce. owned: parameter name -> its shards,
    each as (index of its owner on the axis, its elements of the flattened gradient)."""

    def __init__(
        self, parameters: dict[str, nn.Parameter], layouts: Layouts, mesh: Mesh, owned: dict[str, list[tuple[int, slice]]]
    ) -> None:
        super().__init__(parameters, layouts, mesh)
        self.owned = owned

    def begin(self, bucket: Bucket, grads: Mapping[str, Tensor]) -> Sequence[StartedSum]:
        shards: dict[int, list[Tensor]] = {}
        for name, grad in grads.items():
            for owner, part in self.owned[name]:
                shards.setdefault(owner, []).append(grad.view(-1)[part])
        return [start_sum(parts, bucket.axis, first=bucket.names[0], root=owner) for owner, parts in sorted(shards.items())]


class Zero(SummedEarly, DeepSpeed):
    """The engine of stages 1 and 2 for a model in the master dtype. `working`: parameter name -> dtype of the copy that the model reads;
    None: the model reads the master weights."""

    def __init__(
        self, model: nn.Module, stage: int, *, layouts: Layouts, mesh: Mesh, optimizer: AdamW, offload: Offload, working: Working | None
    ) -> None:
        device = next(model.parameters()).device
        deepspeed = start_deepspeed(device)
        self.rule = optimizer
        self.module, self.layouts, self.mesh = model, layouts, mesh
        self.parameters = dict(model.named_parameters())
        made = group_parameters(self.parameters, layouts, optimizer, working=working, mesh=mesh, marked=True)
        groups, self.groups = [group.settings for group in made], made
        self.shards_gradients = stage == 2
        self.offloads = offload.optimizer != "none"
        mpu, more = set_groups(mesh, layouts.values()), offload.sections(None, largest=0, device=device)
        wide = all(p.dtype == torch.float32 for p in model.parameters())  # else DeepSpeed adds gradients up in its own fp32 buffers
        early = stage == 1 and wide and not self.offloads
        if early or mesh.axis("pp").size > 1:
            more["overlap_comm"] = False  # nothing to overlap: DeepSpeed sums only after the last backward pass, or not at all
        self.engine, _, _, _ = deepspeed.initialize(
            model=with_mark(model) if any("moe" in group for group in groups) else model,
            optimizer=optimizer.build(groups),
            dist_init_required=False,
            mpu=mpu,
            config=settings(stage, more, device=device) | {"gradient_allreduce_op": "sum"},
        )
        self.zero = self.engine.optimizer
        assert not self.zero.gradient_average, "losses are shares of the global mean: gradients are summed"
        self.zero.scaled_global_norm = lambda *_, **__: torch.zeros(())  # unused, but would cost a collective: clip.py computes the norm
        if working is not None:
            for number, group in enumerate(made):
                self._narrow(number, group.dtype)
        for partition in self.zero.single_partition_of_fp32_groups:  # create states now, as state() may be called before the first step
            zeros = {m: torch.zeros_like(partition) for m in MOMENTS}
            self.zero.optimizer.state[partition] = zeros | {"step": torch.zeros((), device=partition.device)}
        self.zero._lazy_init_hp_params_optimizer_state()
        if early or mesh.axis("pp").size > 1:
            for hook in self.zero._grad_acc_hooks:  # these hooks would sum after each micro-batch; `reduce` sums once
                hook.remove()
        owned = self._owned() if early else {}
        self.apart = [name for name in self.parameters if name in owned]
        self.sums = _OnOwners({name: self.parameters[name] for name in self.apart}, layouts, mesh, owned)
        if early:
            self.zero.reduce_ipg_grads = lambda *_, **__: None  # DeepSpeed must not sum again: `sums` has summed already

    def _owned(self) -> dict[str, list[tuple[int, slice]]]:
        """Return parameter name -> its shards: (index of the rank that updates the shard, the shard's elements of the flattened parameter),
        as DeepSpeed has cut them. For _OnOwners."""
        zero, found = self.zero, dict[str, list[tuple[int, slice]]]()
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        for number, group in enumerate(zero.bit16_groups):
            for parameter in group:
                key, starts = zero.get_param_id(parameter), zero.grad_start_offset[number]
                firsts = sorted((int(starts[rank][key]), rank) for rank in zero.param_to_partition_ids[number][key])
                ends = [first for first, _ in firsts[1:]] + [parameter.numel()]
                found[names[id(parameter)]] = [(rank, slice(first, end)) for (first, rank), end in zip(firsts, ends, strict=True)]
        return found

    def _narrow(self, number: int, dtype: torch.dtype) -> None:
        """Replace flat group `number` of the weights that the model reads by a copy in this dtype. Master weights stay in fp32."""
        zero = self.zero
        if zero.bit16_groups_flat[number].dtype == dtype:
            return
        zero.bit16_groups_flat[number] = flat = zero.bit16_groups_flat[number].to(dtype)
        zero._update_model_bit16_weights(number)
        zero.parallel_partitioned_bit16_groups[number] = zero.get_data_parallel_partitions(flat, number)
        if self.offloads:
            buffers = zero.param_buffer_of_bit16_for_cpu_offload_groups
            pinned = buffers[number].is_pinned()
            buffers[number] = buffers[number].to(dtype).pin_memory() if pinned else buffers[number].to(dtype)
        for parameter in zero.bit16_groups[number]:
            parameter.grad_dtype = torch.float32
            fragment = parameter._hp_mapping
            if fragment is not None:  # make its tensor a view of the new flat group, because a view of the old group would keep that alive
                at = fragment.lp_fragment_address
                fragment.lp_fragment = parameter.data.flatten().narrow(0, at.start, at.numel)

    def forward(self, *args: Any, last: bool) -> Any:
        if self.apart:
            return self.module(*args)
        if self.offloads and not last and self.mesh.axis("pp").size == 1:  # with pipeline stages, gradients accumulate on the device
            self._add_accumulators()
        return super().forward(*args, last=last)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        if self.apart:
            if last:
                self.sums.expect(self.apart)
            loss.backward()  # type: ignore[no-untyped-call]
            if last:
                self.reduce()
            return
        super().backward(loss, last=last)
        if not self.shards_gradients or not last:
            return
        for number, parts in self.zero.averaged_gradients.items():
            if parts:  # a gradient's shard can be a view of the whole gradient; copy it, so that the whole gradient is freed
                self.zero.averaged_gradients[number] = [p.clone() if p.untyped_storage().nbytes() > p.nbytes else p for p in parts]

    def reduce(self) -> None:
        if not self.apart:
            return DeepSpeed.reduce(self)
        super().reduce()
        self.engine.set_gradient_accumulation_boundary(True)
        self.zero.overlapping_partition_gradients_reduce_epilogue()

    def _add_accumulators(self) -> None:
        """Add fp32 buffers on the host for gradients of several micro-batches. DeepSpeed's own buffers would have the weights' dtype."""
        zero = self.zero
        for params in zero.params_in_partition:
            for parameter in params:
                number = zero.get_param_id(parameter)
                if number not in zero.accumulated_grads_in_cpu:
                    buffer = torch.zeros(parameter.numel(), dtype=torch.float32)
                    zero.accumulated_grads_in_cpu[number] = buffer.pin_memory() if zero.cpu_offload_pin_memory else buffer

    def masters(self) -> Iterable[Tensor]:
        masters: Iterable[Tensor] = self.zero.single_partition_of_fp32_groups
        return masters

    def _partitions(self) -> Iterator[tuple[int, Tensor]]:
        if self.offloads:
            for number, partition in enumerate(self.zero.single_partition_of_fp32_groups):
                yield number, partition.grad
            return
        for number, parts in self.zero.averaged_gradients.items():
            for part in parts or ():
                yield number, part

    def owned_gradients(self) -> Iterator[tuple[str, Tensor]]:
        return ((self.groups[number].family, part) for number, part in self._partitions() if self.groups[number].owned)

    def tensors(self) -> Iterator[Held]:
        """Yield weights, with the axes along which ranks hold copies; then DeepSpeed's partitions, without axes, because no other rank has
        a copy."""
        for name, parameter in self.parameters.items():
            yield copies_of(name, "weight", parameter, self.layouts[name])
        for number, partition in enumerate(self.zero.single_partition_of_fp32_groups):
            yield from in_partition(number, partition, self.zero.optimizer)

    def summed_gradients(self) -> Iterator[Held]:
        return (Held(f"partition {number}", "gradient", part) for number, part in self._partitions())

    def copy_again(self) -> bool:
        self.zero.update_lp_params()
        return True

    def drop_gradients(self) -> None:
        zero = self.zero
        zero.zero_grad(set_to_none=True)
        for number in zero.averaged_gradients:
            zero.averaged_gradients[number] = None
            zero.all_grad_tensors[number] = None
        zero.micro_step_id = -1  # the value that DeepSpeed's own step leaves
        if self.offloads:
            zero.reset_cpu_buffers()
            zero._offload_accumulated_param_ids = set()

    def gradient(self, name: str) -> Tensor:
        from deepspeed.utils import safe_get_full_grad

        grad: Tensor = safe_get_full_grad(self.parameters[name])
        return grad

    def state(self, name: str) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        parameter = self.parameters[name]
        if not parameter.requires_grad:
            return {"weight": parameter.detach()}
        moments = {m: safe_get_full_optimizer_state(parameter, m) for m in MOMENTS}
        return {"weight": safe_get_full_fp32_param(parameter)} | moments

    def load_state(self, names: Iterable[str], load: Load, *, steps: int) -> None:
        for name in names:
            parameter: Any = self.parameters[name]
            if not parameter.requires_grad:
                fill(parameter.data, partial(load, name, "weight"))
                continue
            fragment = parameter._hp_mapping  # this rank's shard of the flattened parameter; None: empty
            for kind in ("weight", *MOMENTS) if fragment is not None else ():
                part = fragment.get_hp_fragment(None if kind == "weight" else kind)
                fill_run(part.data, partial(load, name, kind), shape=tuple(parameter.shape), first=fragment.lp_fragment_address.start)
        for state in self.zero.optimizer.state.values():
            state["step"].fill_(float(steps))
        self.zero.update_lp_params()


def in_partition(number: int, master: Tensor, optimizer: torch.optim.Optimizer) -> Iterator[Held]:
    """Yield the flat shard `master` of master weights, then each of its optimizer states, under the name "partition <number>"."""
    for kind, tensor in held_of(master, optimizer):
        yield Held(f"partition {number}", kind, tensor)


def settings(stage: int, more: dict[str, Any], *, device: torch.device) -> dict[str, Any]:
    """Return DeepSpeed's configuration for a model on `device`: no clipping, no loss scale, any optimizer. `more`: further keys of
    `zero_optimization`."""
    sharded = {"stage": stage, "contiguous_gradients": True, "reduce_bucket_size": BUCKET_ELEMENTS}
    sharded["overlap_comm"] = device.type == "cuda"  # needs CUDA streams; without them it only costs a second buffer
    # False: each gradient is summed only on the rank that owns it, so half as many bytes are sent as by an all-reduce
    sharded["use_multi_rank_bucket_allreduce"] = False
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": sharded | more,
    }


class Group(NamedTuple):
    """Parameters that DeepSpeed flattens together. family: label by which gradient norms are grouped (Layout.family). dtype: dtype in
    which the model reads them. owned: whether this rank's shards count in the gradient norm."""

    settings: dict[str, Any]  # torch's parameter group, with DeepSpeed's marks for experts
    family: str
    dtype: torch.dtype
    owned: bool


def group_parameters(
    parameters: dict[str, nn.Parameter], layouts: Layouts, optimizer: AdamW, *, working: Working | None, mesh: Mesh, marked: bool
) -> list[Group]:
    """Return the optimizer's groups. Parameters of a group share family, dtype, weight decay, axis of summation, and `owned`.
    `marked`: whether parameters whose gradients are summed over another group than DeepSpeed's data-parallel group get DeepSpeed's marks:
    `allreduce` False, and the axis's name as `group_name`. `working`: parameter name -> dtype in which the model reads it; None: its own
    dtype. Shapes are read from layouts, because a sharded parameter has lost its shape."""
    keyed: dict[tuple[str, torch.dtype, bool, bool, str], list[nn.Parameter]] = {}
    default = dense_axis(mesh)
    for name, parameter in parameters.items():
        layout = layouts[name]
        dtype = parameter.dtype if working is None else working(name)
        decays = optimizer.decays(name, torch.empty(layout.shape, device="meta"))
        axis = data_axis(layout, mesh)
        other = axis.name if axis.ranks != default.ranks else ""
        if other and marked:
            parameter.allreduce, parameter.group_name = False, other  # type: ignore[attr-defined]
        if parameter.requires_grad:
            keyed.setdefault((layout.family, dtype, decays, layout.shard_counts(mesh), other), []).append(parameter)
    groups = []
    for (family, dtype, decays, owned, other), held in keyed.items():
        group: dict[str, Any] = {"params": held, "weight_decay": optimizer.weight_decay if decays else 0.0}
        groups.append(Group(group | ({"moe": True, "name": other} if other and marked else {}), family, dtype, owned))
    return groups
