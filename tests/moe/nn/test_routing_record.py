"""Routing records (replay of recorded experts): a model's own record gives the same bits; another model's record gives its experts, with
gates of the current logits.

The reference is in this file: experts and loads from the record, gates by the formulas of docs/moe/routing.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moe import Context, RoutingRecord, Transformer
from moe.recipe import sections
from moe.recipe.presets import PRESETS
from moe.recipe.router_spec import RouterSpec
from moe.train.parts.passes import Pass
from moe.verify.cases import BATCH, LENGTH, Case
from moe.verify.plain.batches import batch
from parallel.errors import BadInput
from tests.moe.train.parts.test_batch_counts import owned
from tests.support.ranks import run_on_ranks
from tests.support.routed import B, D, L, by_hand, context, ids, layer_of, random, route, router_of
from tests.support.tiny import start

SMALL: dict[str, Any] = {"num_choices": 2, "expert_groups": 2, "top_groups": 1}  # smaller than in published routers, to fit 4 experts


def options_of(preset: str) -> dict[str, Any]:
    spec = PRESETS[preset]
    own = {key: value for key, value in SMALL.items() if getattr(spec, key) > value}
    return {"preset": preset, "group": "sequence", "allow_noncausal": True} | own


ROUTERS: dict[str, dict[str, Any]] = {name: options_of(name) for name in PRESETS if name != "expert_choice"} | {
    "noisy, few slots": {"preset": "glam", "noise": "noisy_top_k", "load_weight": 0.1, "capacity_factor": 0.6, "min_capacity": 1},
    "gumbel by lot": {"preset": "switch", "noise": "gumbel", "jitter": 0.2, "drop": "random", "allow_noncausal": True},
    "sinkhorn": {"select": "sinkhorn", "balance_weight": 0, "allow_noncausal": True},
    "sparsemixer": {"preset": "mixtral", "softmax_over": "all", "select": "sparsemixer", "mixer_margin": 0.5},
    "hash": {"select": "hash", "balance_weight": 0},
    "biased": {"preset": "glam", "bias_rate": 0.1, "balance_counts": "unbiased"},
}


def model_of(options: dict[str, Any], *, seed: int = 3, recompute: str = "none") -> Transformer:
    sizes = {"num_layers": 3, "d_model": 16, "num_heads": 2, "d_ff": 24, "moe_layers": (0, 2), "max_length": L}
    model = Transformer(sections.Model(**sizes), sections.Experts(num_experts=4), sections.Router(**options), vocab_size=11, seed=seed)
    for block in model.layers:
        block.recompute = recompute
    return model


def passed(model: Transformer, **records: RoutingRecord | None) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Run one forward and backward pass. Return (logits, load of each layer, all gradients)."""
    found = model(ids(), Context.of(ids(), seed=5, step=2, auxiliary_scale=0.5, **records))
    (found.logits_BLV * torch.linspace(-1, 1, 11)).sin().sum().backward()
    return found.logits_BLV, [r.load_E for r in found.layers], [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("name", ROUTERS)
def test_replaying_a_models_own_record_gives_the_same_bits(name: str, recompute: str) -> None:
    want = passed(model_of(ROUTERS[name]))
    record = RoutingRecord(B, L)
    passed(model_of(ROUTERS[name], recompute=recompute), record_routing=record)
    again = RoutingRecord.of(record.experts)
    got = passed(model_of(ROUTERS[name], recompute=recompute), replay_routing=again)
    assert torch.equal(got[0], want[0]) and all(map(torch.equal, got[1], want[1])) and all(map(torch.equal, got[2], want[2]))
    k = sections.Router(**ROUTERS[name]).num_choices
    assert {layer: (x.shape, x.dtype) for layer, x in record.experts.items()} == dict.fromkeys((0, 2), ((B, L, k), np.int32))


@pytest.mark.parametrize("name", [name for name in ROUTERS if name != "hash"])
def test_other_weights_take_the_records_experts(name: str) -> None:
    """In training and in evaluation, each layer takes every token's experts from the record. Without it, some experts would differ."""
    record, other = RoutingRecord(B, L), RoutingRecord(B, L)
    passed(model_of(ROUTERS[name]), record_routing=record)
    passed(model_of(ROUTERS[name], seed=4), record_routing=other)
    assert all((record.experts[layer] != other.experts[layer]).any() for layer in (0, 2))
    for training in (True, False):
        taken = RoutingRecord(B, L)
        passed(model_of(ROUTERS[name], seed=4).train(training), record_routing=taken, replay_routing=record)
        assert all((taken.experts[layer] == record.experts[layer]).all() for layer in (0, 2))


def chosen_of(k: int) -> Tensor:
    """Return random experts, different for each token: [B, L, k]."""
    return torch.rand(B, L, 4, generator=torch.Generator().manual_seed(2)).argsort(-1)[..., :k]


GATES: dict[str, tuple[dict[str, Any], Callable[[Tensor, Tensor], Tensor]]] = {
    "switch": ({"preset": "switch", "capacity_factor": None}, lambda logits, e: logits.softmax(-1).gather(1, e)),
    "mixtral": ({"preset": "mixtral", "balance_weight": 0.3}, lambda logits, e: logits.gather(1, e).softmax(-1)),
    "deepseek": (
        {"preset": "deepseek_v3", "gate_scale": 2.5, "balance_counts": "all", **SMALL},
        lambda logits, e: 2.5 * logits.sigmoid().gather(1, e) / logits.sigmoid().gather(1, e).sum(1, keepdim=True),
    ),
}


@pytest.mark.parametrize("name", GATES)
def test_gates_are_computed_from_current_logits(name: str) -> None:
    """Output, balance loss and gradients equal the formulas, with recorded experts that the router would not choose."""
    options, gates = GATES[name]
    layer = layer_of(num_experts=4, **options)
    chosen_BLK = chosen_of(layer.router.spec.num_choices)
    x_BLD = random(B, L, D).requires_grad_()
    there = context(replay_routing=RoutingRecord.of({1: chosen_BLK.numpy()}), auxiliary_scale=0.7)
    y_BLD, report = layer(x_BLD, there)
    expert_TK = chosen_BLK.flatten(0, 1)
    logits_TE = x_BLD.flatten(0, 1) @ layer.router.weight.T
    made = replace(route(layer.router, x_BLD.flatten(0, 1)), expert_TK=expert_TK, gate_TK=gates(logits_TE, expert_TK))
    want_BLD = by_hand(layer, x_BLD, replace(made, kept_TK=torch.ones_like(expert_TK, dtype=torch.bool)))
    torch.testing.assert_close(y_BLD, want_BLD, rtol=1e-5, atol=1e-5)
    score_TE = logits_TE.sigmoid() if name == "deepseek" else logits_TE.softmax(-1)
    probs_TE = score_TE / score_TE.sum(1, keepdim=True)
    groups = B if layer.router.spec.balance_scope == "sequence" else 1
    share_GE = torch.stack([torch.bincount(part.flatten(), minlength=4) / part.numel() for part in expert_TK.chunk(groups)])
    balance = 4 * (share_GE * torch.stack([part.mean(0) for part in probs_TE.chunk(groups)])).sum(1).mean()
    torch.testing.assert_close(report.balance_loss, balance, rtol=1e-5, atol=1e-6)
    weight = random(B, L, D, seed=5)
    leaves = [x_BLD, *layer.parameters()]
    got = torch.autograd.grad((y_BLD * weight).sum(), leaves)
    wanted = torch.autograd.grad((want_BLD * weight).sum() + 0.7 * layer.router.spec.balance_weight * balance, leaves)
    assert wanted[1].abs().sum() > 0
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)


def test_a_replayed_choice_can_be_dropped() -> None:
    """A record does not say which choices are dropped. If all choices name one expert, it keeps the first 3 tokens of each sequence."""
    router = router_of(num_experts=4, preset="switch", capacity_factor=0.8, min_capacity=1)
    routing = route(router, random(B * L, D), replay_routing=RoutingRecord.of({1: np.full((B, L, 1), 3)}))
    assert routing.capacity == 3 and torch.equal(routing.kept_TK.view(B, L), (torch.arange(L) < 3).expand(B, L))


def test_the_router_chooses_for_tokens_with_minus_one() -> None:
    """A token with -1 in the record gets the router's own experts. Inference engines leave -1 for the last token."""
    for options in (ROUTERS["mixtral"], ROUTERS["sparsemixer"]):
        router, x_TD = router_of(num_experts=4, **options).eval(), random(B * L, D)
        own_BLK = route(router, x_TD).expert_TK.view(B, L, -1)
        given_BLK = chosen_of(2)
        given_BLK[:, -1] = -1
        got_BLK = route(router, x_TD, replay_routing=RoutingRecord.of({1: given_BLK})).expert_TK.view(B, L, -1)
        assert torch.equal(got_BLK[:, :-1], given_BLK[:, :-1]) and torch.equal(got_BLK[:, -1], own_BLK[:, -1])


def test_shards_of_sequences_record_and_replay_their_rows() -> None:
    router, x_BLD, record = router_of(num_experts=4, preset="mixtral").eval(), random(B, L, D), RoutingRecord(B, L)
    route(router, x_BLD.flatten(0, 1), record_routing=record)
    parts = []
    for rows, places in ((slice(0, 2), [0, 3, 4, 11]), (slice(0, 2), [1, 2, 5, 6, 7, 8, 9, 10, 12, 13]), (slice(2, 3), list(range(L)))):
        here, sizes = {"first_sequence": rows.start, "positions": places, "length": L}, {"sequence_tokens": len(places)}
        mine, x_TD = RoutingRecord(B, L), x_BLD[rows][:, places].flatten(0, 1)
        router(x_TD, **sizes, context=Context.of(ids()[rows][:, places], record_routing=mine, **here))
        parts.append(mine.experts)
        want = torch.as_tensor(record.experts[1][rows][:, places]).flatten(0, 1)
        other = router(-x_TD, **sizes, context=Context.of(ids()[rows][:, places], replay_routing=record, **here))
        assert torch.equal(other.expert_TK, want.long())
    assert (parts[0][1] == -1).any() and (RoutingRecord.of(*parts).experts[1] == record.experts[1]).all()


def test_every_layout_takes_the_same_experts() -> None:
    """On ep 2 and in micro-batches, with a user's loss, the loss and every gradient equal one process."""
    drawn = torch.rand(BATCH, LENGTH, 4, generator=torch.Generator().manual_seed(6)).argsort(-1)[..., :2]

    def computed(world: int, microbatches: int) -> tuple[float, dict[str, Tensor], list[dict[int, Any]]]:
        def work(rank: int) -> tuple[float, dict[str, Tensor], dict[int, Any]]:
            tiny = start(Case("gshard", "ddp", world, world, microbatches, "fp32"), rank)
            record = RoutingRecord.of({layer: drawn for layer in tiny.model.expert_counts})
            mine, each_has = tiny.shard.of_batch(batch(0))[:, :-1], BATCH // world // microbatches
            first, seen, total = rank * BATCH // world, RoutingRecord(BATCH, LENGTH), [0.0]
            passes = [
                Pass(part, None, Context.of(part, seed=7, first_sequence=first + n * each_has, auxiliary_scale=1 / world / microbatches,
                                            record_routing=seen, replay_routing=record), 1 / world / microbatches)
                for n, part in enumerate(mine.chunk(microbatches))
            ]  # fmt: skip

            def loss(number: int, output: Any) -> Tensor:
                chosen_BL = output.logits_BLV.log_softmax(-1).gather(2, passes[number].inputs_BL.unsqueeze(2))
                found: Tensor = chosen_BL.sum() / (BATCH * LENGTH)
                total[0] += found.item()
                return found

            tiny.executor.run(passes, loss)
            return total[0], dict(owned(tiny)), {layer: torch.from_numpy(x) for layer, x in seen.experts.items()}

        ranks = run_on_ranks(work, world, timeout_s=60)
        gradients = {name: g for _, mine, _ in ranks for name, g in mine.items()}
        return sum(loss for loss, _, _ in ranks), gradients, [seen for _, _, seen in ranks]

    want = computed(1, 1)
    for world, microbatches in ((1, 3), (2, 1), (2, 3)):
        got = computed(world, microbatches)
        assert got[0] == pytest.approx(want[0], rel=1e-6) and got[1].keys() == want[1].keys()
        for name, gradient in want[1].items():
            torch.testing.assert_close(got[1][name], gradient, rtol=1e-5, atol=1e-5 * gradient.abs().max().item() + 1e-9, msg=name)
        record = RoutingRecord.of(*got[2])
        assert all((record.experts[layer] == drawn.numpy()).all() for layer in want[2][0])


GOOD = np.array([[[0, 2], [1, 3], [3, 0]]])


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({}, "no layer"),
        ({1: GOOD.astype(float)}, "got float64 of shape"),
        ({1: GOOD[0]}, r"of shape \[3, 2\]"),
        ({1: GOOD, 2: GOOD[:, :2]}, r"\[1, 2, ...\] and \[1, 3, ...\]"),
        ({1: np.where(GOOD == 1, 3, GOOD)}, r"\[3, 3\] for position 1 of sequence 0 in layer 1"),
        ({1: np.where(GOOD == 1, -1, GOOD)}, r"\[-1, 3\] for position 1"),
        ({1: np.where(GOOD == 1, -2, GOOD)}, "expert -2 in layer 1"),
    ],
)
def test_what_is_no_record_is_one_line(given: dict[int, Any], line: str) -> None:
    with pytest.raises(BadInput, match=line) as refused:
        RoutingRecord.of(given)
    assert "\n" not in str(refused.value)


def test_a_record_of_something_else_is_one_line() -> None:
    tokens, router = torch.zeros(1, 3, dtype=torch.long), router_of(num_experts=4, preset="mixtral")

    def asked(given: dict[int, Any], spec: RouterSpec | None = None, **where: int) -> Any:
        router.spec = spec or router.spec
        return router(random(3, D), sequence_tokens=3, context=Context.of(tokens, replay_routing=RoutingRecord.of(given), **where))

    assert asked({1: GOOD}).expert_TK.tolist() == GOOD[0].tolist()
    for given, where, line in (
        ({2: GOOD}, {}, "a record of layers 2, needed a record of all layers with experts, also of layer 1"),
        ({1: GOOD + 1}, {}, "2 choices of experts up to 4 in layer 1, needed 2 choices of experts 0 to 3"),
        ({1: GOOD[..., :1]}, {}, "got 1 choice of experts up to 3 in layer 1, needed 2 choices"),
        ({1: GOOD}, {"first_sequence": 1}, "a record of 1 sequence of 3 tokens, needed one with sequence 1"),
        ({1: GOOD}, {"length": 5}, "of sequences of 5 tokens"),
    ):
        with pytest.raises(BadInput, match=line):
            asked(given, **where)
    with pytest.raises(BadInput, match="different experts for the same token in layer 1"):
        RoutingRecord.of({1: GOOD}, {1: GOOD[..., ::-1]})
    with pytest.raises(BadInput, match="select expert_choice"):
        asked({1: GOOD}, PRESETS["expert_choice"])
