"""`moe verify --types`: correct layouts keep every law, faults break the law that they should, and what is not seen is said."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

import pytest
import torch

from moe.recipe.router_spec import RouterSpec
from moe.verify.cases import Case
from moe.verify.twin import first_values
from moe.verify.types import checked
from moe.verify.types.laws import check, laws, of_tokens
from tests.mutations.every import MUTATIONS
from tests.mutations.mutation import Mutation, applied

# a layout of each kind in --kinds, and the faults that are put into it: name -> beginning of the first line
SHOWN = {
    "router_not_reduced": "varies, though it is replicated: gradient of layers.1.moe.router.weight",  # data
    "gather_backward_takes_own_slice": "not conserved: flow of layers.1.ffn_norm = ",  # expert
    "copies_summed_over_tp": "summed, though it is replicated over tp: allreduce at parallel/mesh/gradients.py",  # tensor
    "colossal_gradients_over_sp": "not conserved: flow of ",  # sequence
    "norm_of_one_stage": "varies, though every rank needs it: ",  # pipeline
    "tokens_of_rank_0_take_slots": "expert 0 drops a token of group 6, though a slot is free",
    "every_rank_holds_the_first_experts": "replicated, though it is cut: first value of layers.1.moe.experts.w1",
}


def _named(name: str) -> tuple[Mutation, Case]:
    mutation = next(m for m in MUTATIONS if m.name == name)
    assert isinstance(mutation.case, Case)
    return mutation, mutation.case


def test_a_layout_of_each_kind_passes() -> None:
    cases = [case for _, case in map(_named, SHOWN)]
    rows = list(checked(cases, 2))
    assert [row["case"] for row in rows] == [replace(case, steps=2).in_full for case in cases]
    assert all(row["passed"] and row["laws"] > 15 and row["of_bound"] < 1 for row in rows), rows


@pytest.mark.parametrize("name", SHOWN)
def test_a_fault_of_each_kind_is_found_without_numbers(name: str) -> None:
    mutation, case = _named(name)
    called = mutation.not_called()
    (wrong,) = checked([case], case.world, inside=partial(applied, mutation, called))
    assert called.all() and not wrong["passed"] and "error" not in wrong
    assert any(line.startswith(SHOWN[name]) for line in wrong["broken"]), wrong["broken"]


def test_each_model_has_laws_of_all_its_matrices() -> None:
    """Only biases, sinks and scales of experts have no flow that another tensor must have too."""
    for model in ("dense", "switch", "gshard", "latent", "free", "mixer", "gpt_oss", "mixtral", "qwen3_moe", "ahead", "t5", "t5_untied"):
        run = Case(model, "ddp", 1, 1, 1, "fp32").run()
        names = first_values(run)[0].keys()
        without = names - {key for law in laws(run, names) for key in (*law.left, *law.right)}
        assert {name.rpartition(".weight")[0] or name for name in without if not name.endswith(("bias", "bias.weight", "b1", "b3"))} <= {
            f"layers.{layer}.{last}" for layer in range(2) for last in ("attention.sinks", "router.expert_scale")
        }, without


def _seen() -> list[dict[str, Any]]:
    """Return what two data ranks of a dense model with one norm have seen: the flow of its output is 3 on each, so its gain has 6."""
    run = Case("dense", "ddp", 2, 1, 1, "fp32").run()
    names = list(first_values(run)[0])
    keys = {key for law in laws(run, names) for key in (*law.left, *law.right)}

    def rank(number: int) -> dict[str, Any]:
        flows = {key: [[10 * number + 1, 0.0, 0.0, 0.0]] for key in keys} | {"norm": [[number, 3.0, 1.0, 1.0]]}
        flows |= {name: [[7, 6.0, 1.0, 1.0]] for name in ("norm.weight", "head.weight")} if number == 0 else {}
        copies = [[0, "gradient of norm.weight", "[(0, 24)]", 5, False]]
        call = ["0,1", "allreduce at a.py:1 in f", 10 + number, True]
        return {
            "trained": names, "frozen": [], "flows": [flows], "norms": [2**0.5], "copies": copies, "sums": [call], "said": ["loss 1.0"],
            "choices": [], "gates": [], "balance": [], "scales": [1.0], "columns": [], "moments": [], "remarks": [],
        }  # fmt: skip

    return [rank(0), rank(1)]


BROKEN = {
    "varies, though it is replicated: gradient of norm.weight [(0, 24)] on ranks 0, 1 (step 0)": ("copies", 0, 3, 6),
    "summed, though it is replicated over dp: allreduce at a.py:1 in f": ("sums", 0, 2, 10),
}


def test_laws_of_made_up_ranks() -> None:
    run = Case("dense", "ddp", 2, 1, 1, "fp32").run()
    assert check(run, _seen()).broken == []
    for line, (field, place, index, value) in BROKEN.items():
        seen = _seen()
        seen[1][field][place][index] = value
        assert check(run, seen).broken == [line]
    cut = _seen()
    cut[1]["copies"][0][2] = "[(24, 48)]"
    assert check(run, cut).broken == ["replicated, though it is cut: gradient of norm.weight (step 0)"]
    said = _seen()
    said[1]["said"] = ["loss 2.0"]
    assert check(run, said).broken == ["varies, though every rank needs it: loss 1.0 | loss 2.0"]


@pytest.mark.parametrize(
    ("factor", "lines"),
    [(1.0, []), (0.5, ["flow of norm = flow of norm.weight: 6, 3"]), (2.0, ["flow of norm = flow of norm.weight: 6, 12"])],
)
def test_a_sum_that_lacks_a_share_or_has_it_twice_breaks_conservation(factor: float, lines: list[str]) -> None:
    run, seen = Case("dense", "ddp", 2, 1, 1, "fp32").run(), _seen()
    seen[0]["flows"][0]["norm.weight"][0][1] *= factor
    assert check(run, seen).broken == [f"not conserved: {line} (step 0)" for line in lines]


def test_copies_of_a_value_with_one_gradient_count_once_and_what_was_not_seen_is_said() -> None:
    run = Case("dense", "ddp", 2, 1, 1, "fp32").run()
    alike = _seen()
    for rank in alike:
        rank["flows"][0]["norm"] = [[1, 6.0, 1.0, 1.0]]
    assert check(run, alike).broken == []
    unseen = deepcopy(alike)
    for rank in unseen:
        del rank["flows"][0]["layers.0.ffn"]
    assert check(run, unseen).broken == ["unknown: nothing was seen of layers.0.ffn"]
    other = deepcopy(alike)
    for rank in other:
        rank["norms"] = [3.0]
    assert check(run, other).broken == ["counted wrongly: the norm is 3, of all gradients 1.414214 (step 0)"]
    other[0]["norms"] = other[1]["norms"] = [inf]  # a step that is skipped
    assert check(run, other).broken == []


# two sequences of four tokens, each with the experts of its first and second choice, of which there are three with two slots each
CHOSEN = [[0, 1], [0, 1], [1, 0], [2, 0], [2, 1], [2, 0], [2, 1], [1, 0]]
# choices without a slot: (token, choice). First choices get slots before second ones
FULL = {(2, 1), (3, 1), (1, 1), (6, 0), (6, 1)}


def _routed(*, without: set[tuple[int, int]] = FULL, scale: float = 1.0, apart: float = 0.0) -> list[dict[str, Any]]:
    """Return what two ranks have seen that hold the even and the odd tokens of a router with weight 0.5. scale: of the gradients of its
    probabilities, whose right values are 0.5 * 3 * the expert's share of all choices; apart: their difference between tokens."""
    tokens = [[at, True, chosen, [(at, k) not in without for k in range(2)]] for at, chosen in enumerate(CHOSEN)]
    shares = [sum(chosen.count(expert) for chosen in CHOSEN) / 16 for expert in range(3)]
    return [
        {
            "choices": [[0, "router", tokens[rank::2], 4, 2, 3]], "scales": [1.0],
            "gates": [[0, "router", [(at, kept) for at, _, _, kept in tokens[rank::2]]]],
            "balance": [[0, "router", rank, [0.75 * scale * share for share in shares], [0.1] * 3, [0.1 + apart * rank] * 3]],
        }
        for rank in range(2)
    ]  # fmt: skip


def _of_tokens(seen: list[dict[str, Any]], **changed: Any) -> list[str]:
    spec = RouterSpec(num_choices=2, capacity_factor=0.75, balance_weight=0.5, **changed)
    return [line.removesuffix(" in router (step 0)") for line in of_tokens(spec, seen, 1e-5)]


def test_slots_of_tokens() -> None:
    assert _of_tokens(_routed()) == []
    assert _of_tokens(_routed(without=FULL - {(6, 0)})) == ["expert 2 has 3 tokens of group 1 in 2 slots"]
    assert _of_tokens(_routed(without=FULL | {(7, 1)})) == ["expert 0 drops a token of group 1, though a slot is free"]
    swapped = FULL - {(6, 0)} | {(5, 0)}
    assert _of_tokens(_routed(without=swapped)) == ["expert 2 drops an earlier token of group 1 than it keeps"]
    assert _of_tokens(_routed(without=swapped), drop="random") == []
    padded = _routed(without=FULL - {(6, 0)})
    padded[0]["choices"][0][2][3][1] = False  # token 6
    assert _of_tokens(padded)[0] == "padding has a slot"
    other = _routed()
    other[1]["choices"][0][2].append([0, True, [0, 2], [True, True]])
    assert _of_tokens(other)[0] == "varies, though it is replicated: the choices of token 0"


def test_gates_have_a_gradient_if_their_choice_has_a_slot() -> None:
    lost, without = _routed(), _routed()
    lost[0]["gates"][0][2][0] = (0, [True, False])
    without[1]["gates"][0][2][1] = (3, [True, True])
    assert _of_tokens(lost) == ["lost: of a token's choices with slots some have no gradient"]
    assert _of_tokens(without) == ["not lost: a choice without a slot has a gradient"]
    assert _of_tokens(without, importance_weight=0.1) == []


def test_gradients_of_probabilities_are_shares_of_the_balance_losss_weight() -> None:
    assert _of_tokens(_routed(scale=2.0)) == ["not a mean: the gradients of the probabilities sum to 3, not to weight * experts 1.5"]
    first = "not in proportion: the gradients of the probabilities [0.375, 0.375, 0.250], choices [0.250, 0.250, 0.500]"
    assert _of_tokens(_routed(), balance_counts="first") == [first]
    assert _of_tokens(_routed(apart=0.1)) == []
    apart = "varies, though it is replicated: the gradient of a probability, over tokens"
    assert _of_tokens(_routed(apart=0.1), balance_scope="global_batch") == [apart]
    twice = _routed()  # a rank with the same tokens counts once
    twice[1]["balance"] += [*twice[0]["balance"]]
    assert _of_tokens(twice) == []
    none = _routed()
    for rank in none:
        rank["balance"] = []
    assert _of_tokens(none) == ["not a mean: the gradients of the probabilities sum to 0, not to weight * experts 1.5"]


@pytest.mark.parametrize(("sums", "times"), [((0.05, 0.0025, 1.0), "1"), ((0.1, 0.01, 1.0), "2"), ((0.05, 0.004, 1.0), "1")])
def test_first_moments_are_clipped_gradients(sums: tuple[float, float, float], times: str) -> None:
    """The norm is twice the limit and Adam's beta1 is 0.9, so a first moment is 0.05 of its gradient."""
    run, seen = Case("dense", "ddp", 2, 1, 1, "fp32").run(), _seen()
    limit = 2**0.5 / 2
    run = run.model_copy(update={"optimizer": run.optimizer.model_copy(update={"clip_norm": limit, "beta1": 0.9})})
    seen[0]["moments"] = [["head.weight", *sums]]
    right = sums[1] == 0.0025
    said = f"not in proportion: the first moment of head.weight is {times} times its clipped gradient"
    assert check(run, seen).broken == ([] if right else [said])


def test_the_heads_gradient_sums_to_0_over_the_vocabulary() -> None:
    run, seen = Case("dense", "ddp", 2, 1, 1, "fp32").run(), _seen()
    for rank, sums in zip(seen, ((2.0, -1.0), (-2.0, 1.0)), strict=True):  # each has half of the rows, of two columns
        rank["columns"] = [[0, 6, [(total, 3.0) for total in sums]]]
    assert check(run, seen).broken == []
    seen[1]["columns"][0][2][1] = (1.1, 3.0)
    assert check(run, seen).broken == ["not balanced: the gradient of head.weight does not sum to 0 over the vocabulary (step 0)"]


def test_euler_holds_for_a_product_of_two_shards() -> None:
    """The law itself, without the project's code: of y = x W with W in two columns, all three flows are equal."""
    x, w = torch.randn(5, 4, dtype=torch.float64, requires_grad=True), torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    y = torch.cat([x @ part for part in w.chunk(2, 1)], 1)
    y.retain_grad()
    y.sin().sum().backward()
    flows = [(t * t.grad).sum().item() for t in (x, w, y)]
    assert flows == pytest.approx([flows[0]] * 3, rel=1e-12)
