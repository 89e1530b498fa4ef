"""Makes an optimizer with a user's function. Test steps on small parameters, named like the model's, show which layouts this optimizer
supports.

    factory([{"params": [...], "names": [...], "weight_decay": 0.1, "lr": 0.001}, ...])  ->  a torch.optim.Optimizer

    if these two give equal parameters                                            the optimizer supports
    three steps; two steps, then one by a new optimizer with the old states       checkpoints
    steps of a stack of experts; steps of each expert alone                       experts on any ranks
    steps of a matrix; steps of its upper and its lower part alone                shards of a matrix on different ranks (fsdp, tp, etp)
    steps of all parameters; steps of each parameter alone                        different parameters on different ranks (pp, ep, ...)

Optimizer states must have the shape of their parameter, because checkpoints shard them like the parameter.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from parallel.data.engine import Rule, StateDims
from parallel.data.load import fill_stepped
from parallel.data.whole import Whole
from parallel.errors import BadInput

Groups = list[dict[str, Any]]
Factory = Callable[[Groups], torch.optim.Optimizer]
_SIZES = (2, 3, 5)  # shape of small parameters; different sizes, so that a transposed state is noticed
_STEPS = 3


@dataclass
class Given(Rule):
    """Settings of an optimizer that a user's function makes.
    factory: the function. key: the recipe's key that names the function, for error messages. lr: the recipe's learning rate. decays: (name,
    parameter) -> True if weight decay applies."""

    factory: Factory
    key: str
    lr: float
    weight_decay: float
    decays: Callable[[str, Tensor], bool]
    _kept: dict[tuple[str, int], StateDims] = field(default_factory=dict)
    _cuts: dict[tuple[str, int], frozenset[int]] = field(default_factory=dict)

    def groups(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> Groups:
        held = list(parameters)
        names = {id(parameter): name for name, parameter in held}
        made = super().groups(held)
        return [group | {"names": [names[id(p)] for p in group["params"]], "lr": self.lr} for group in made]

    def build(self, groups: Groups, wholes: Mapping[int, Whole] | None = None) -> torch.optim.Optimizer:
        """Call the user's function. Raises BadInput if it fails, or does not return an optimizer of exactly these parameters."""
        asked = {id(p) for group in groups for p in group["params"]}
        rates = [group["lr"] for group in groups]
        try:
            made = self.factory(groups)
        except Exception as error:
            raise self._refused(f"{type(error).__name__}: {error}") from error
        if not isinstance(made, torch.optim.Optimizer):
            raise self._refused(f"a {type(made).__name__}")
        held = [id(p) for group in made.param_groups for p in group["params"]]
        if sorted(held) != sorted(asked):
            got = f"an optimizer of {len(held)} parameters, not of the {len(asked)} given"
            raise self._refused(got, "an optimizer that has every parameter once")
        if any(group["lr"] not in rates for group in made.param_groups):
            got, needed = "a parameter group with its own learning rate", "the recipe's learning rate, which is set before each step"
            raise BadInput(self.key, got=got, needed=needed, fix="set optimizer.lr, and leave lr out of the groups")
        return made

    def kept(self, name: str, num_dims: int) -> StateDims:
        """Return a dict with a key for each optimizer state of a parameter: the state's name. All values are None, because each state has
        the parameter's shape. Raises BadInput if checkpoints cannot save or load these states."""
        if (name, num_dims) not in self._kept:
            self._kept[name, num_dims] = self._tried(name, num_dims)
        return self._kept[name, num_dims]

    def cuts(self, name: str, num_dims: int) -> frozenset[int]:
        """Return the dims along which the parameter may be sharded, because the updates of its shards equal the update of the whole."""
        at = name, num_dims
        if at not in self._cuts:
            whole = _small(num_dims)
            stepped = self._stepped(name, whole)[0]

            def of_parts(dim: int) -> Tensor:
                return torch.cat([self._stepped(name, whole, dim, part)[0] for part in (slice(0, 1), slice(1, None))], dim)

            self._cuts[at] = frozenset(dim for dim in range(num_dims) if _equal(of_parts(dim), stepped))
        return self._cuts[at]

    def coupled(self, num_dims: Mapping[str, int]) -> bool:
        """Return True if a parameter's updates depend on other parameters. num_dims: name of each parameter -> number of its dims."""
        small = {name: torch.cos(_small(dims) + number) for number, (name, dims) in enumerate(num_dims.items())}
        together = self._together(small)
        return not all(_equal(self._together({name: value})[name], together[name]) for name, value in small.items())

    def _together(self, small: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return name -> value of parameters after a few steps of one optimizer. small: name -> initial value."""
        parameters = {name: nn.Parameter(value.clone()) for name, value in small.items()}
        optimizer = self.build(self.groups(parameters.items()))
        for step in range(_STEPS):
            for name, parameter in parameters.items():
                parameter.grad = torch.sin(small[name] * (step + 2))
            self._step(optimizer)
        return {name: parameter.detach() for name, parameter in parameters.items()}

    def _tried(self, name: str, num_dims: int) -> StateDims:
        whole = _small(num_dims)
        kept: dict[str, int | None] = {}
        through, optimizer, parameter = self._stepped(name, whole)
        for kind, value in optimizer.state.get(parameter, {}).items():
            if kind == "step" or value is None:
                continue
            if not isinstance(value, Tensor) or value.shape != parameter.shape or not value.is_floating_point():
                held = f"tensor {list(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
                got, shape = f"an optimizer that keeps {kind}, a {held}, for {name}", list(parameter.shape)
                needed = f"floating-point tensors of the parameter's shape {shape}, which checkpoints can cut for any layout"
                raise BadInput(self.key, got=got, needed=needed, fix="keep only `step` and such tensors in the state of the optimizer")
            kept[kind] = None
        if not _equal(self._stepped(name, whole, again=kept)[0], through):
            needed = "all of its states in optimizer.state: tensors of the parameter's shape, and `step`"
            fix = "keep no state in the parameter groups or in other attributes, and keep torch.optim's form of state_dict"
            raise BadInput(self.key, got=f"an optimizer that does not continue from its saved states, for {name}", needed=needed, fix=fix)
        return kept

    def _stepped(
        self, name: str, whole: Tensor, dim: int = 0, part: slice = slice(None), *, again: StateDims | None = None
    ) -> tuple[Tensor, torch.optim.Optimizer, nn.Parameter]:
        """Return (final value, optimizer, parameter) after _STEPS steps of a parameter whose initial value is `whole`, or only its slice
        `part` along dim `dim`.
        again: names of optimizer states; if given, a new optimizer makes the last step with these states, as after loading a checkpoint."""
        at = (slice(None),) * dim + (part,)
        parameter = nn.Parameter(whole[at].clone())
        optimizer = self.build(self.groups([(name, parameter)]))
        for step in range(_STEPS):
            if again is not None and step == _STEPS - 1:
                state = {kind: copy.deepcopy(optimizer.state[parameter].get(kind)) for kind in again}
                left = {"weight": parameter.detach().clone()} | {k: v for k, v in state.items() if v is not None}
                parameter = nn.Parameter(parameter.detach().clone())
                optimizer = self.build(self.groups([(name, parameter)]))
                fill_stepped(parameter, optimizer, lambda kind, box: left[kind][box], kept=again, steps=step, start=())  # noqa: B023
            parameter.grad = torch.sin(whole * (step + 2))[at].clone()
            self._step(optimizer)
        return parameter.detach(), optimizer, parameter

    def _step(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group["lr"] = self.lr
        try:
            optimizer.step()
        except Exception as error:
            raise self._refused(f"an optimizer whose step() raised {type(error).__name__}: {error}") from error

    def _refused(self, got: str, needed: str = "a function of torch's parameter groups that returns a torch.optim.Optimizer") -> BadInput:
        fix = "for example: lambda groups: torch.optim.RMSprop(groups)"
        return BadInput(self.key, got=got, needed=needed, fix=fix)


def _small(num_dims: int) -> Tensor:
    sizes = _SIZES[-num_dims:] if num_dims else ()
    return torch.cos(torch.arange(float(torch.Size(sizes).numel())) + 1).reshape(sizes)


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-5, atol=1e-5)
