"""What a kernel may touch while rows travel. NCCL sends on a CUDA stream of its own: nothing but `wait` orders it after and before kernels.

    kernels      | permute, start | shared network | wait | experts      backward: wait | shared network's gradients | start
    NCCL's stream                 | rows                  |

Fake CUDA tensors, with a stand-in for the exchange that knows when it began and was waited for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from moe.experts.dispatch import open_exchange
from moe.experts.dispatch.dispatcher import Sizes
from moe.experts.layer import MoELayer
from moe.nn.context import Context
from moe.nn.linear import FeedForward
from moe.recipe import sections
from parallel.mesh import collectives
from parallel.mesh.mesh import Degrees
from parallel.process import process
from parallel.process.process import World
from parallel.rehearse.pretended import Pretended
from parallel.rehearse.stage import _triton_kernels, rehearsal

D, F, SHARED, E = 32, 48, 80, 8
EXCHANGES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "all_to_all": ({}, {"ep": 2}),
    "chunks": ({"overlap_chunks": 4}, {"ep": 2, "etp": 2}),
    "padded": ({"kind": "padded"}, {"ep": 2}),
    "all_gather": ({"kind": "all_gather"}, {"ep": 2, "etp": 2}),
    "hierarchical": ({"kind": "hierarchical", "node_size": 2}, {"ep": 4, "ep_inner": 2}),
}


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Message:
    """An exchange under way. Like NCCL's kernel, it does not keep its tensors in memory."""

    def __init__(self, traffic: InFlight, sent: Tensor, received: Tensor) -> None:
        self.traffic, self.sent, self.received = traffic, storage(sent), storage(received)
        self.memory = [StorageWeakRef(t.untyped_storage()) for t in (sent, received)]

    def wait(self) -> None:
        assert not any(memory.expired() for memory in self.memory), "rows were freed before they arrived"
        self.traffic.messages.remove(self)


class InFlight:
    """Checks each kernel against the messages under way. `beside`: numbers of products and Triton's kernels meanwhile, by pass and name."""

    def __init__(self, pretended: Pretended, patch: pytest.MonkeyPatch) -> None:
        self.messages: list[Message] = []
        self.beside, self.started = Counter[tuple[str, str]](), 0
        self.work, operator = pretended.work, pretended.work.operator

        def noted(collective: Callable[..., Any]) -> Callable[..., Any]:
            def started(out: Tensor, rows: Tensor, *splits: Any, async_op: bool = False, **named: Any) -> Any:
                collective(out, rows, *splits, **named)
                if async_op:
                    self.started += 1
                    self.messages.append(Message(self, rows, out))
                    return self.messages[-1]

            return started

        def run(func: Any, args: Any, kwargs: Any, tensors: Any, made: Any) -> None:
            written = [a for a, s in zip(args, func._schema.arguments, strict=False) if s.alias_info is not None and s.alias_info.is_write]
            if not func.is_view:
                self.kernel(func._opname, tensors, [t for t in written if isinstance(t, Tensor)])
            if self.messages and func._opname == "mm":
                self.beside[self.work.passing, "shared" if SHARED in (*args[0].shape, *args[1].shape) else "mm"] += 1
            operator(func, args, kwargs, tensors, made)

        patch.setattr(dist, "all_to_all_single", noted(dist.all_to_all_single))
        for name in ("_all_gather", "_reduce_scatter"):
            patch.setattr(collectives, name, noted(getattr(collectives, name)))
        patch.setattr(pretended.work, "operator", run)
        for kernels in _triton_kernels():
            patch.setattr(kernels, "run", self.launched(kernels.run))

    def kernel(self, name: str, read: list[Tensor], written: list[Tensor]) -> None:
        for message in self.messages:
            assert message.received not in map(storage, read), f"{name} reads rows before they arrive"
            assert message.sent not in map(storage, written), f"{name} writes rows that are being sent"

    def launched(self, launch: Callable[..., Any]) -> Callable[..., Any]:
        def run(kernel: Any, *args: Any, **named: Any) -> Any:
            tensors = [value for value in (*args, *named.values()) if isinstance(value, Tensor)]
            self.kernel(kernel.fn.__name__, tensors, [])
            self.beside[self.work.passing, kernel.fn.__name__] += bool(self.messages)
            return launch(kernel, *args, **named)

        return run


@pytest.mark.parametrize("name", EXCHANGES)
def test_the_shared_network_is_computed_while_rows_travel_and_no_kernel_touches_them(name: str) -> None:
    settings, degrees = EXCHANGES[name]
    ep, etp = degrees["ep"], degrees.get("etp", 1)
    world = World(ep * etp - 1, ep * etp, place="cuda")
    with rehearsal(world) as pretended, pytest.MonkeyPatch.context() as patch:
        mesh = process.connect(Degrees(dp=world.size, **degrees), world)
        experts = sections.Experts(num_experts=E, shared=1, shared_gate=True)
        router = sections.Router(preset="gshard", capacity_factor=1.25)
        with torch.device("meta"):
            shared = FeedForward(D, SHARED, "swiglu", recast=True)
            layer = MoELayer(experts, router, d_model=D, d_ff=F, ffn="swiglu", layer=0, shared=shared)
            layer.experts.hold(range(E // ep), hidden=slice(0, F // etp))
        layer.to_empty(device=world.device)
        opened = open_exchange(sections.Dispatch(**settings), mesh, Sizes(D, E, 2, layer.experts.kernels))
        layer.dispatcher = opened.layer("here")
        found = InFlight(pretended, patch)
        x_BLD = torch.empty(4, 16, D, dtype=torch.bfloat16, device=world.device, requires_grad=True)
        y_BLD, _ = layer(x_BLD, Context.of(torch.zeros(4, 16, device=world.device)))
        assert not found.messages
        y_BLD.sum().backward()
        assert not found.messages and found.started >= (2 if name == "all_gather" else 4)
    assert found.beside["forward", "shared"] == 3 and found.beside["backward", "shared"] == 6
    if name == "chunks":
        assert found.beside["forward", "up"] == found.beside["backward", "back"] == 4  # the experts' kernels too
