"""A step on a GPU keeps its host waiting as seldom as it can. The rehearsal counts the waits, on tensors without values.

The counter itself is compared with operators of which torch's documentation says whether the host waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moe.checks.together import check_run
from moe.nn.linear import normed
from moe.recipe.load import build_run
from moe.rehearse.rehearse import Walked, walk
from parallel.mesh.host import on_device, read_later
from parallel.numerics.clip import squares, squares_together
from parallel.process.process import World
from parallel.rehearse.pretended import RehearsalError
from parallel.rehearse.stage import rehearsal

GPU = torch.device("cuda", 0)
WAITS: dict[str, tuple[int, Callable[[Tensor], Any]]] = {
    "item": (1, lambda x: x[0].item()),
    "tolist": (1, lambda x: x.tolist()),
    "int": (1, lambda x: int(x.sum())),
    "cpu": (1, lambda x: x.cpu()),
    "cpu, not blocking": (0, lambda x: x.to("cpu", non_blocking=True)),
    "nonzero": (1, lambda x: (x > 1).nonzero()),
    "a mask": (1, lambda x: x[x > 1]),
    "indices": (0, lambda x: x[x.clamp(max=2)]),
    "bincount": (2, lambda x: torch.bincount(x)),
    "repeats": (2, lambda x: torch.repeat_interleave(x, x)),
    "repeats of known length": (0, lambda x: torch.repeat_interleave(x, x, output_size=10)),
    "a list": (1, lambda x: torch.tensor([1, 2], device=x.device)),
    "pinned": (0, lambda x: on_device(torch.tensor([1, 2]), x.device)),
    "read later": (1, lambda x: read_later(x, x.sum())()),
    "read after another wait": (1, lambda x: (read := read_later(x), x.sum().item(), read())),
    "arithmetic": (0, lambda x: (x + 1).sort().values.cumsum(0)),
}


@pytest.mark.parametrize("name", WAITS)
def test_an_operator_makes_the_host_wait_as_often_as_a_gpu_would(name: str) -> None:
    waits, run = WAITS[name]
    with rehearsal(World(0, 1, place="cuda")) as pretended:
        x = torch.arange(5, device=GPU)
        pretended.work.begin()
        run(x)
        assert sum(work.waits.total() for work in pretended.work.by_module.values()) == waits
        assert all("test_work.py" in place for work in pretended.work.by_module.values() for place in work.waits)


def test_nccl_refuses_what_it_cannot_send() -> None:
    from parallel.mesh.collectives import sum_over
    from parallel.mesh.mesh import Degrees
    from parallel.process.process import connect

    with rehearsal(World(1, 2, place="cuda")):
        axis = connect(Degrees(dp=2), World(1, 2, place="cuda")).axis("dp")
        sum_over(torch.zeros(2, 3, device=GPU), axis)
        with pytest.raises(RehearsalError, match="of torch.int16, which NCCL does not know"):
            sum_over(torch.zeros(3, dtype=torch.int16, device=GPU), axis)
        with pytest.raises(RehearsalError, match="not contiguous"):
            torch.distributed.all_reduce(torch.zeros(2, 3, device=GPU).t(), group=axis.group)


def test_the_norm_of_all_gradients_is_at_most_ten_kernels_and_equals_one_sum_for_each() -> None:
    families, shapes = ("dense", "expert", "router"), [(3, 4), (5,), (2, 2, 7), (1,)] * 10
    mine = [(families[i % 2], torch.randn(shape, generator=torch.Generator().manual_seed(i))) for i, shape in enumerate(shapes)]
    together = squares_together(mine, families)
    torch.testing.assert_close(together, squares(mine, families=families, device=torch.device("cpu")), rtol=1e-12, atol=0)
    assert together[0] > 0 and together[2] == 0
    with rehearsal(World(0, 1, place="cuda")) as pretended:
        grads = [(family, torch.empty(grad.shape, device=GPU)) for family, grad in mine]
        pretended.work.begin()
        squares(grads, families=families, device=GPU)
        assert pretended.work.now.kernels <= 10 and not pretended.work.now.waits


@pytest.mark.parametrize("centred", [False, True])
def test_a_norm_of_16_bits_is_read_and_written_once_and_keeps_no_wider_copy(centred: bool) -> None:
    with rehearsal(World(0, 1, place="cuda")) as pretended:
        x = torch.empty(64, 1024, dtype=torch.bfloat16, device=GPU, requires_grad=True)
        gain = torch.ones(1024, device=GPU, requires_grad=True)
        pretended.work.begin()
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
            normed(x, gain, centred=centred, eps=1e-6)
        assert pretended.work.now.moved_bytes <= 2 * x.nbytes + 8 * 1024 + 8 * 64
        assert sum(t.nbytes for t in kept) <= x.nbytes + 2 * 1024 + 2 * 4 * 64


# dispatch section, ep, capacity factor, waits of a layer
LAYERS = [
    ({}, 1, None, 0),
    ({}, 1, 1.25, 0),
    ({"kind": "all_to_all"}, 4, None, 1),
    ({"kind": "all_to_all"}, 4, 1.25, 1),
    ({"kind": "all_to_all", "overlap_chunks": 4}, 2, None, 1),
    ({"kind": "hierarchical", "node_size": 2}, 4, None, 1),
    ({"kind": "padded"}, 4, 1.25, 1),
    ({"kind": "padded"}, 4, None, 1),
]


def walked(dispatch: dict[str, Any], ep: int, factor: float | None, *, preset: str = "gshard") -> Walked:
    model = {"num_layers": 1, "moe_every": 1, "d_model": 32, "d_ff": 48, "num_heads": 2, "vocab_size": 256, "max_length": 32}
    router, experts = {"preset": preset, "capacity_factor": factor}, {"num_experts": 8, "ffn": "swiglu"}
    parts = {"experts": experts, "router": router, "degrees": {"ep": ep}, "dispatch": dispatch, "train": {"global_batch": 8}}
    return walk(check_run(build_run({"model": model, "precision": {"compute": "bf16"}, **parts}), ep), World(ep - 1, ep, place="cuda"))


@pytest.mark.parametrize(("dispatch", "ep", "factor", "waits"), LAYERS)
def test_a_step_waits_twice_and_a_layer_at_most_once(dispatch: dict[str, Any], ep: int, factor: float | None, waits: int) -> None:
    found: Counter[tuple[str, str]] = Counter()
    for (module, passing), work in walked(dispatch, ep, factor).work.items():
        assert work.kernels > 0
        found[module, passing] += work.waits.total()
    assert found["layers.0.moe", "forward"] == waits
    assert found["", "forward"] == 2
    assert found.total() == waits + 2  # none in backward, none in attention


# dispatch section, ep, preset, capacity factor, kernels forward, kernels backward
LAUNCHES = [
    ({}, 1, "switch", 1.25, 16, 16),
    ({}, 1, "glam", 1.25, 16, 16),
    ({}, 1, "mixtral", None, 14, 16),
    ({"kind": "all_to_all"}, 4, "switch", 1.25, 24, 20),
    ({"kind": "all_to_all"}, 4, "glam", 1.25, 24, 20),
]


@pytest.mark.parametrize(("dispatch", "ep", "preset", "factor", "forward", "backward"), LAUNCHES)
def test_a_layer_launches_few_kernels(
    dispatch: dict[str, Any], ep: int, preset: str, factor: float | None, forward: int, backward: int
) -> None:
    work = walked(dispatch, ep, factor, preset=preset).work
    assert work["layers.0.moe", "forward"].kernels <= forward
    assert work["layers.0.moe", "backward"].kernels <= backward
