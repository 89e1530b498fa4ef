"""ZeRO through DeepSpeed's engine: optimizer state, then gradients, then parameters are sharded over data-parallel ranks.

    stage 1   every rank keeps all weights and gradients, and the optimizer's state for 1/N of them

Expert parameters are sharded over edp, dense ones over dp. The policy stays ours: precision (weights are cast where they
are used), loss scale, gradient norm and clipping by ownership (an engine that averages per-rank expert norms is wrong),
checkpoints by global names. DeepSpeed reduces, partitions, steps and gathers. This is the one file that imports its runtime.
Source: ZeRO (arXiv 1910.02054).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel.data.engine import MOMENTS, AdamW
from parallel.layout import Layout
from parallel.mesh import Mesh


class Zero1:
    """Stage 1. `layouts` by module parameter name; the model's weights are in the master dtype."""

    def __init__(self, model: nn.Module, *, layouts: dict[str, Layout], mesh: Mesh, optimizer: AdamW) -> None:
        deepspeed = start_deepspeed()
        self.module, self.layouts, self.mesh = model, layouts, mesh
        self.parameters = dict(model.named_parameters())
        shards = mesh.axis("ep").size * mesh.axis("etp").size  # to DeepSpeed a part of an expert is an expert: copies are edp either way
        groups, self.families = _groups(self.parameters, layouts, optimizer, ep=shards)
        self.engine, _, _, _ = deepspeed.initialize(
            model=_marked(model, ep=shards) if shards > 1 else model,
            optimizer=optimizer.build(groups),
            dist_init_required=False,
            config={
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": 1,
                "gradient_clipping": 0.0,
                "zero_optimization": {"stage": 1, "overlap_comm": False, "contiguous_gradients": True},
            },
        )
        self.zero = self.engine.optimizer
        for partition in self.zero.single_partition_of_fp32_groups:  # now, so that state() can be asked before the first step
            zeros = {m: torch.zeros_like(partition) for m in MOMENTS}
            self.zero.optimizer.state[partition] = zeros | {"step": torch.zeros((), device=partition.device)}
        self.zero._lazy_init_hp_params_optimizer_state()

    def forward(self, *args: Any, last: bool) -> Any:
        self.engine.set_gradient_accumulation_boundary(last)
        return self.engine(*args)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(loss)
        if last:
            # DeepSpeed has divided every sum by the number of data ranks, but our losses are shares of the global mean already. Here
            # and not in the loss, because times 3 rounds every gradient of a 16-bit backward pass anew.
            self.scale_gradients(float(self.mesh.axis("dp").size))
        else:
            self.engine.step()  # counts a micro-batch; steps only at the boundary

    def _owned(self) -> Iterator[tuple[str, Tensor]]:
        for number, parts in self.zero.averaged_gradients.items():
            for part in parts or ():
                yield self.families[number], part

    def owned_gradients(self) -> Iterator[tuple[str, Tensor]]:
        return self._owned()

    def scale_gradients(self, factor: float) -> None:
        torch._foreach_mul_([part for _, part in self._owned()], factor)

    def step(self, lr: float) -> None:
        for group in self.zero.optimizer.param_groups:
            group["lr"] = lr
        self.engine.step()

    def drop_gradients(self) -> None:
        self.zero.zero_grad(set_to_none=True)
        for number in self.zero.averaged_gradients:
            self.zero.averaged_gradients[number] = None
            self.zero.all_grad_tensors[number] = None

    def gradient(self, name: str) -> Tensor:
        from deepspeed.utils import safe_get_full_grad

        grad: Tensor = safe_get_full_grad(self.parameters[name])
        return grad

    def state(self, name: str) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        parameter = self.parameters[name]
        moments = {m: safe_get_full_optimizer_state(parameter, m) for m in MOMENTS}
        return {"weight": safe_get_full_fp32_param(parameter)} | moments

    def load_state(self, states: dict[str, dict[str, Tensor]], *, steps: int) -> None:
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        for name, new in states.items():
            parameter = self.parameters[name]
            safe_set_full_fp32_param(parameter, new["weight"].to(parameter.device, torch.float32))
            for moment in MOMENTS:
                safe_set_full_optimizer_state(parameter, new[moment].to(parameter.device, torch.float32), moment)
        for state in self.zero.optimizer.state.values():
            state["step"].fill_(float(steps))
        self.zero.update_lp_params()


def _groups(
    parameters: dict[str, nn.Parameter], layouts: dict[str, Layout], optimizer: AdamW, *, ep: int
) -> tuple[list[dict[str, Any]], list[str]]:
    """The optimizer's groups, one family each, and their families in order; DeepSpeed knows experts by `allreduce` False."""
    groups: list[dict[str, Any]] = []
    families: list[str] = []
    for family in dict.fromkeys(layout.family for layout in layouts.values()):
        held = [(name, p) for name, p in parameters.items() if layouts[name].family == family]
        apart = ep > 1 and any("ep" in layouts[name].split.values() for name, _ in held)
        for group in optimizer.groups(held):
            if apart:
                group |= {"moe": True, "name": f"ep_size_{ep}"}
                for parameter in group["params"]:
                    parameter.allreduce, parameter.group_name = False, f"ep_size_{ep}"
            groups.append(group)
            families.append(family)
    return groups, families


def load_deepspeed() -> Any:
    """Import DeepSpeed, quiet and with its communication through torch alone.

    Its CPU backend would compile a shared-memory op on first use (80 to 120 s) that training does not need, and whose
    kernels fault on processors without AVX2: it is marked as unavailable before anything asks for it.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    os.environ.setdefault("LOCAL_RANK", "0")
    import deepspeed

    with suppress(ImportError):  # what the first engine imports (1.2 s), now: ranks forked after this have it
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def start_deepspeed() -> Any:
    """DeepSpeed with its communication up."""
    deepspeed = load_deepspeed()
    if not dist.is_initialized():  # one process: DeepSpeed wants a group all the same
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed(dist_init_required=False)
    return deepspeed


def _marked(model: nn.Module, *, ep: int) -> nn.Module:
    """The model with an empty layer of DeepSpeed's MoE class beside it, by which the engine learns that there are experts."""
    from deepspeed.moe.layer import MoE
    from deepspeed.utils import groups

    class Mark(MoE):  # type: ignore[misc]
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.num_experts = ep

        def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
            if f"ep_size_{ep}" not in groups._get_expert_parallel_group_dict():
                groups._create_expert_and_data_parallel(ep)

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.mark = model, Mark()

        def forward(self, *args: Any) -> Any:
            return self.model(*args)

    return Wrapped()
