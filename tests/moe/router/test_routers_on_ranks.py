"""Every kind of router on two ranks equals one process, with micro-batches, recomputation, padding and three dispatchers.

Model and step are those of `moe verify`, with experts on both ranks.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tests.moe.train.parts.test_batch_counts import PLAIN, Layout, assert_same, each_computed, lengthened

ROUTERS: dict[str, dict[str, Any]] = {
    "switch_mtf": {"preset": "switch_mtf", "group": "sequence"},
    "mixtral, noisy": {
        "preset": "mixtral",
        "balance_scope": "global_batch",
        "noise": "noisy_top_k",
        "jitter": 0.2,
        "importance_weight": 0.1,
    },
    "gumbel": {"preset": "glam", "noise": "gumbel", "gates": "after_drop", "capacity_factor": 0.8},
    "megatron": {"preset": "megatron", "balance_scope": "sequence", "group": 1, "capacity_factor": 0.8, "min_capacity": 1},
    "by lot": {"preset": "glam", "drop": "random", "queue": "tokens_first", "capacity_factor": 0.8},
    "sqrt softplus, batch-prioritized": {
        "preset": "glam",
        "score": "sqrt_softplus",
        "drop": "lowest_gate",
        "group": 2,
        "capacity_factor": 0.8,
    },
    "expert choice": {"preset": "expert_choice", "balance_weight": 0.0, "capacity_factor": 1.0},
    "hash": {"preset": "switch", "select": "hash", "num_choices": 2, "balance_weight": 0.0, "capacity_factor": 0.8},
    "sinkhorn": {"preset": "switch", "select": "sinkhorn", "score": "sigmoid", "balance_weight": 0.0, "capacity_factor": 0.8},
}
LAYOUTS = [(Layout(2, 3, "selective"), "all_to_all"), (Layout(2, 1, "full"), "padded"), (Layout(2, 3), "all_gather")]
LENGTHS = [10, 4, 11, 7, 11, 9, 2, 11, 6, 11, 10, 11]


def test_a_router_is_the_same_on_every_layout() -> None:
    """Loss, choices, drops, router losses and every gradient are equal, for twelve sequences of which nine have padding."""
    padded = lengthened(LENGTHS)
    cases: list[tuple[Layout, Tensor | None, dict[str, Any]]] = []
    for number, options in enumerate(ROUTERS.values()):
        two = LAYOUTS[: number % 3] + LAYOUTS[number % 3 + 1 :]  # each router on two layouts, each layout with six routers
        cases.append((PLAIN, padded, {"router": options}))
        cases += [(layout, padded, {"router": options, "dispatch": {"kind": kind}}) for layout, kind in two]
    found = iter(each_computed(cases))
    for name, want, *others in zip(ROUTERS, found, found, found, strict=True):
        assert sum(want[1][0].choices) == want[1][0].kept + want[1][0].dropped > 0, name
        for other in others:
            assert_same(other, want)
