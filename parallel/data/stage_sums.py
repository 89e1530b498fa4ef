"""Starts the reduce-scatters ("scatters") of FSDP's gradients with pipeline stages, also if the schedule splits the backward pass.

    once a batch   F0 F1 I0 W0 F2 I1 W1 I2 W2 | scatter of the stage    unsharded gradients accumulate; weights stay gathered until then
    each pass      F0 F1 I0 W0* F2 I1 W1* I2 W2*                        gradients stay sharded; I and B gather weights and free them
                   * W starts each unit's scatter before it computes the next unit

Fi: forward pass of micro-batch i. Ii, Wi: the two parts of its backward pass, for gradients of inputs and of weights. B: both at once.
`sharding.reshard` false is once a batch, true is each pass.

W multiplies inputs by output gradients, so no weights are gathered for it. B scatters each unit's gradients as a backward pass without
pipeline stages does. Units (fsdp.py) are scattered one by one, in the order of the backward pass. Collectives start only at actions of the
schedule, so ranks with the same stages call the same collectives in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState  # no public module has it

from parallel.numerics.weight_gradient import PendingGradients


class StageSums:
    """Reduce-scatters the gradients of a model that fully_shard has cut, unit by unit. A unit: parameters that FSDP gathers together.
    once: reduce-scatter after the last backward pass of a batch, when `start` is called; if False, after each backward pass."""

    def __init__(self, model: nn.Module, *, once: bool) -> None:
        assert isinstance(model, FSDPModule)
        self.model, self.once = model, once
        self.groups: list[Any] = []  # torch's FSDPParamGroup of each unit, in the order of the backward pass
        for module in reversed(list(model.modules())):
            self.groups += module._get_fsdp_state()._fsdp_param_groups if isinstance(module, FSDPModule) else []
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.of = {names[id(param.sharded_param)]: group for group in self.groups for param in group.fsdp_params}
        model.set_is_last_backward(False)  # a backward pass does not wait for its reduce-scatters: `finish` does
        if once:
            # all units' scatters run at the same time, each from an input buffer, which replaces the unit's gradients in memory
            model.set_reduce_scatter_max_input_buffers(max(1, len(self.groups)))
        model.set_reshard_after_backward(not once)

    @contextmanager
    def backward(self, pending: PendingGradients | None) -> Iterator[None]:
        """Return a context for a backward pass. pending: receives deferred weight gradients; None: the pass defers nothing. If gradients
        are reduce-scattered after each pass, units without deferred gradients, such as the embedding, are reduce-scattered at the context's
        end."""
        # mark all units as done: at the end of the pass, torch frees the weights of units that are not, such as other stages' units
        for group in self.groups:
            group._training_state = TrainingState.POST_BACKWARD
        self.model.set_requires_gradient_sync(not self.once and pending is None)
        yield
        if not self.once and pending is not None:
            later = {id(weight) for weights in pending.weights() for weight in weights}
            self._scatter(group for group in self.groups if not any(id(p._unsharded_param) in later for p in _gathered(group)))

    def deferred(self, pending: PendingGradients) -> None:
        """Compute the deferred weight gradients (W). If gradients are reduce-scattered after each pass, the reduce-scatter of an FSDP unit
        starts before the gradients of the next unit are computed."""
        if self.once:
            pending.compute()
            return
        unit = {id(param._unsharded_param): number for number, group in enumerate(self.groups) for param in _gathered(group)}
        parts = pending.split(lambda weight: unit.get(id(weight), -1))
        for number in sorted(parts):
            parts[number].compute()
            self._scatter(self.groups[number : number + 1] if number >= 0 else ())

    def start(self, names: Iterable[str]) -> None:
        """Start the reduce-scatters of the FSDP units that hold these parameters, and free the units' weights. The gradients of these units
        must be complete."""
        held = {id(self.of[name]) for name in names if name in self.of}
        self._scatter((group for group in self.groups if id(group) in held), frees=True)

    def finish(self) -> None:
        """Wait for all reduce-scatters that have started."""
        self.model.set_is_last_backward(True)
        self.model._get_fsdp_state()._root_post_backward_final_callback()
        self.model.set_is_last_backward(False)

    def _scatter(self, groups: Iterable[Any], *, frees: bool = False) -> None:
        """Start the reduce-scatters of the gradients of these FSDP units, if they have any. frees: also free their gathered weights."""
        for group in groups:
            before = group.reduce_grads, group.reshard_after_backward, group._training_state
            group.reduce_grads, group.reshard_after_backward = True, frees
            group.post_backward()
            group.reduce_grads, group.reshard_after_backward, group._training_state = before


def _gathered(group: Any) -> list[Any]:
    """Return the parameters of an FSDP unit that have been gathered at least once, and so have an object for the unsharded parameter."""
    return [param for param in group.fsdp_params if hasattr(param, "_unsharded_param")]
