"""Keeps hidden states and routing of a forward pass for the caller: `model(tokens_BL, keep=("hidden", "routing")).kept`."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from moe.experts.layer import MoELayer
from moe.router.routing import Routing
from parallel.errors import BadInput, did_you_mean

# B sequences, L tokens of each, T = B * L tokens, D model, K choices, E experts
_HIDDEN, _ROUTING = KINDS = ("hidden", "routing")


class Choices(NamedTuple):
    """Routing of one layer. expert_BLK: chosen experts, int64. gate_BLK: their gates, fp32. kept_BLK: False for a dropped choice.
    probs_BLE: the router's probabilities, fp32."""

    expert_BLK: Tensor
    gate_BLK: Tensor
    kept_BLK: Tensor
    probs_BLE: Tensor


class Kept(NamedTuple):
    """Kept values. hidden: layer number -> the layer's output [B, L, D], with gradient. routing: number of a layer with experts -> its
    choices. A field that `keep` does not name is empty."""

    hidden: dict[int, Tensor]
    routing: dict[int, Choices]


@contextmanager
def keeping(blocks: Collection[nn.Module], keep: Collection[str], *, batch: int) -> Iterator[Kept]:
    """Yield a Kept; within this context, fill it with values of the layers `blocks`. keep: names of the values, from KINDS. batch: number
    of sequences of the pass. Raises BadInput for an unknown name."""
    for name in keep:
        if name not in KINDS:
            near = did_you_mean(name, KINDS)
            raise BadInput("keep", got=name, needed=" or ".join(KINDS), fix=f"did you mean {near}?" if near else 'write keep=("hidden",)')
    found = Kept({}, {})

    def hidden(layer: int, module: nn.Module, given: Any, made: Any) -> None:
        found.hidden[layer] = made[0]

    def routing(layer: int, module: nn.Module, given: Any, made: Routing) -> None:
        values = (made.expert_TK, made.gate_TK, made.kept_TK, made.probs_TE)
        found.routing[layer] = Choices(*(x.unflatten(0, (batch, -1)) for x in values))

    with ExitStack() as hooks:
        for block in blocks:
            if _HIDDEN in keep:
                hooks.enter_context(block.register_forward_hook(partial(hidden, block.layer)))  # type: ignore[arg-type]
            for moe in block.modules() if _ROUTING in keep else ():
                if isinstance(moe, MoELayer):
                    hooks.enter_context(moe.router.register_forward_hook(partial(routing, moe.layer)))
        yield found
