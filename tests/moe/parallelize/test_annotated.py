"""A dense recipe's graph, computed by DTensor on four ranks, has the model's loss, gradients and updated weights, also for shardings that
no `tensor.kind` has.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor  # noqa: F401 (imported before ranks are forked, because it takes a second)

from moe.model.transformer import Transformer
from moe.parallelize.annotated import compute_of, inputs_of, values_of
from moe.plan.operators import gspmd, mesh_tensorflow
from moe.plan.operators.of_recipe import graph_of
from moe.recipe.load import build_run
from moe.recipe.sections import Run
from parallel.annotations.annotated import Annotated, device_mesh
from parallel.annotations.graph import Graph
from parallel.annotations.partition import Program
from parallel.errors import BadInput
from tests.support.ranks import run_on_ranks

MESH = {"rows": 2, "columns": 2}
LATENT = {"key_rank": 10, "rotary_size": 4, "query_rank": 14}
OPTIONS = {
    "qkv_bias": True, "out_bias": True, "qk_norm": "whole", "clip_qkv": 1.0, "logit_cap": 2.0, "attention_sinks": True,
    "rope": {"scaling": "dynamic", "factor": 4.0, "trained_length": 3},
    "sliding_window": 3, "sliding_layers": (0, 2), "ahead": 1, "ahead_weight": 20.0,
}  # fmt: skip
B, L, V = 4, 6, 20


def run_of(**model: Any) -> Run:
    sizes = {
        "num_layers": 2,
        "d_model": 24,
        "num_heads": 4,
        "num_kv_heads": 2,
        "d_ff": 28,
        "ffn": "swiglu",
        "max_length": L,
        "moe_every": 0,
    }
    return build_run(
        {"model": {**sizes, "init_scale": 0.5, "tied_embeddings": False, "vocab_size": V, **model}, "data": {"tokenizer": "bytes"}}
    )


WEIGHTS = {"layers.0.ffn.w1.weight": "rows, columns", "layers.1.attention.q.weight": "_, rows, _, columns", "embedding": "columns, rows"}
LAYOUTS = {
    "batch and width": {"batch": "rows", "width": "columns"},
    "length, heads, hidden": {"length": "rows", "heads": "columns", "hidden": "columns", "vocab": "columns"},
}


def program(graph: Graph, label: str) -> Program:
    return gspmd.program(graph, MESH, WEIGHTS) if label == "some weights" else mesh_tensorflow.program(graph, MESH, LAYOUTS[label])


# case -> (changes of the model, its programs). The other operators take the program that also splits the tied table.
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "rmsnorm, gated": ({}, ("batch and width", "length, heads, hidden", "some weights")),
    "layernorm, tied": ({"norm": "layernorm", "ffn": "gelu", "tied_embeddings": True}, ("length, heads, hidden",)),
    "latents, two depths": (
        {"latent": LATENT, "num_kv_heads": None, "ahead": 2, "ahead_weight": 20.0},
        ("batch and width", "length, heads, hidden"),
    ),
    "options": (OPTIONS, ("length, heads, hidden",)),
}


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(V, (B, L + 1), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def model_of(run: Run) -> Transformer:
    return Transformer(run.model, run.experts, run.router, vocab_size=V)


def _ranks(rank: int) -> dict[str, dict[str, Any]]:
    results: dict[str, dict[str, Any]] = {}
    mesh = device_mesh(MESH)
    for case, (changes, labels) in CASES.items():
        run = run_of(**changes)
        graph = graph_of(run, sequences=B)
        for label in labels:
            ranks = Annotated(program(graph, label), mesh, compute_of(run))
            leaves = {name: ranks.placed(name, value) for name, value in values_of(model_of(run), graph).items()}
            inputs = {name: ranks.placed(name, value) for name, value in inputs_of(run, *batch()).items()}
            made = ranks({**leaves, **inputs})
            loss = made["loss"].sum().full_tensor()
            later = [made[f"ahead.{depth}.loss"].mean().full_tensor() for depth in range(run.model.ahead)]
            (loss + run.model.ahead_weight * sum(later) / max(1, len(later))).backward()
            found = {"loss": loss.detach()} | {
                f"grad {name}": leaf.grad.full_tensor() for name, leaf in leaves.items() if leaf.grad is not None
            }
            update(list(leaves.values()), label)
            results[f"{case}: {label}"] = found | {f"stepped {name}": leaf.detach().full_tensor() for name, leaf in leaves.items()}
    return results


def update(weights: list[Tensor], label: str) -> None:
    """Step by the gradients: AdamW with the most various shardings, otherwise SGD, because AdamW calls ten operators of DTensor."""
    rule = torch.optim.AdamW(weights, lr=0.1, eps=1e-2) if label == "some weights" else torch.optim.SGD(weights, lr=0.1)
    rule.step()


def alone(run: Run, label: str) -> dict[str, Tensor]:
    """Return the model's loss, gradients and weights after one step, on one process, by their names in the graph."""
    model, graph = model_of(run), graph_of(run, sequences=B)
    tokens, targets = batch()
    loss = model(tokens, None, targets).loss
    loss.backward()
    grads = Transformer(run.model, run.experts, run.router, vocab_size=V)
    for parameter, mine in zip(grads.parameters(), model.parameters(), strict=True):
        parameter.data = mine.grad
    update(list(model.parameters()), label)
    found = {f"grad {name}": value for name, value in values_of(grads, graph).items()}
    return {"loss": loss.detach()} | found | {f"stepped {name}": value for name, value in values_of(model, graph).items()}


def test_an_annotated_graph_trains_like_its_model() -> None:
    on_ranks = run_on_ranks(_ranks, 4)
    for case, (changes, labels) in CASES.items():
        for label in labels:
            want = alone(run_of(**changes), label)
            for name, value in want.items():
                for of_rank in on_ranks:
                    got = of_rank[f"{case}: {label}"][name]
                    torch.testing.assert_close(
                        got, value, rtol=1e-4, atol=2e-5, msg=lambda text, at=f"{case}: {label}: {name}": f"{at}: {text}"
                    )


@pytest.mark.parametrize("changes", [{"moe_every": 2}, {"positions": "t5"}, {"dropout": 0.1}, {"document_mask": True}])
def test_models_that_a_graph_does_not_describe_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="a model that its graph describes fully"):
        compute_of(run_of(**changes))
