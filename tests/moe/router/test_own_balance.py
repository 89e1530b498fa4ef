"""router.balance_loss: a user's function gives the numbers of the built-in loss that it repeats, over groups, ranks and the whole step; a
wrong one is refused in one line; the functions of docs/use/balance.py train and pass `moe verify --recipe`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from moe.recipe.router_spec import RouterSpec
from moe.router.losses import StepMeans, balance_loss, own_balance_loss
from moe.router.own import check_own
from moe.verify.verify import main
from parallel.errors import BadInput
from tests.support import trained

# T tokens, E experts, K choices, G groups

PAGE = Path(__file__).resolve().parents[3] / "docs/use/balance.py"


def switch(load_GE: Tensor, probs_GE: Tensor) -> Tensor:
    return load_GE.shape[1] * (load_GE * probs_GE).sum(1)


def squares(load_GE: Tensor, probs_GE: Tensor) -> Tensor:
    return ((load_GE + probs_GE) ** 3).sum(1)


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The functions of docs/use/balance.py, as the module `balance`."""
    spec = importlib.util.spec_from_file_location("balance", PAGE)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    made.switch = switch  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "balance", made)
    yield made


def drawn(tokens: int, num_experts: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (probabilities [T, E] with gradient, experts [T, K], which tokens count [T])."""
    draw = torch.Generator().manual_seed(5)
    probs_TE = torch.randn(tokens, num_experts, generator=draw).mul(2).softmax(-1).requires_grad_()
    return probs_TE, probs_TE.detach().topk(k).indices, torch.rand(tokens, generator=draw) > 0.3


def same(found: Tensor, wanted: Tensor, *by: Tensor) -> None:
    torch.testing.assert_close(found, wanted)
    for one, other in zip(torch.autograd.grad(found, by), torch.autograd.grad(wanted, by, retain_graph=True), strict=True):
        torch.testing.assert_close(one, other)


def test_the_users_loss_equals_the_built_in_one_that_it_repeats() -> None:
    probs_TE, expert_TK, valid_T = drawn(21, 5, 2)
    step = StepMeans(torch.rand(5).softmax(0), torch.zeros(5), prob_E=torch.rand(5).softmax(0))
    empty_T = valid_T & (torch.arange(21) >= 7)  # the first group has no tokens
    for how in ({"num_groups": 3}, {"num_groups": 3, "valid_T": valid_T}, {"num_groups": 3, "valid_T": empty_T}):
        same(own_balance_loss(probs_TE, expert_TK, own=switch, **how), balance_loss(probs_TE, expert_TK, **how), probs_TE)
    found, wanted = (loss(probs_TE, expert_TK, step=step, valid_T=valid_T) for loss in (_own_switch, balance_loss))
    torch.testing.assert_close(torch.autograd.grad(found, probs_TE), torch.autograd.grad(wanted, probs_TE))


def _own_switch(*args: Any, **rest: Any) -> Tensor:
    return own_balance_loss(*args, own=switch, **rest)


def test_a_loss_that_is_not_linear_equals_the_plain_one_in_groups_and_parts() -> None:
    """Two ranks with unequal parts of both groups add up to the plain loss, in value and gradient."""
    probs_TE, expert_TK, valid_T = drawn(18, 4, 2)
    rows = [[t for t in range(9 * g, 9 * g + 9) if valid_T[t]] for g in range(2)]
    losses = []
    for mine in rows:
        load = [sum(e in expert_TK[t].tolist() for t in mine) / (2 * len(mine)) for e in range(4)]
        losses.append(len(mine) * sum((load[e] + probs_TE[mine, e].mean()) ** 3 for e in range(4)))
    plain = (losses[0] + losses[1]) / sum(map(len, rows))
    same(own_balance_loss(probs_TE, expert_TK, own=squares, num_groups=2, valid_T=valid_T), plain, probs_TE)
    held, group_T, sums = [torch.arange(18) % 3 == 0, torch.arange(18) % 3 > 0], torch.arange(18) // 9, list[Tensor]()

    def part(rank: int, summed: Any) -> Tensor:
        at = held[rank]
        which = {"valid_T": valid_T[at], "group_T": group_T[at], "num_groups": 2}
        return own_balance_loss(probs_TE[at], expert_TK[at], own=squares, **which, summed=summed)

    for rank in range(2):
        part(rank, lambda mine: sums.append(mine) or mine)  # type: ignore[func-returns-value]
    whole, counts = sums[0] + sums[1], [int((valid_T & at).sum()) for at in held]
    parts = [part(rank, lambda mine: whole) * counts[rank] / sum(counts) for rank in range(2)]
    same(parts[0] + parts[1], plain, probs_TE)


def test_a_users_copy_of_switchs_loss_trains_as_the_built_in_one(mine: ModuleType, tmp_path: Path, home: Path) -> None:
    for scope in ("sequence", "global_batch"):
        for name, loss in (("a", "switch"), ("b", "balance:switch")):
            router = {"balance_loss": loss, "balance_scope": scope, "balance_weight": 0.5}
            run = trained.recipe(home, router=router, train={"steps": 3}, degrees={"ep": 2})
            trained.train(run, tmp_path / scope / name, ranks=2)
        trained.close(tmp_path / scope / "b", tmp_path / scope / "a", rel=1e-6)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda load: load, "that can be called with 2 arguments"),
        (lambda load, probs: (load * probs).sum(), "torch.float32 of shape [] from wrong:loss, needed a loss for each of 5 groups"),
        (lambda load, probs: 1.0, "a float from wrong:loss, needed a loss for each of 5 groups"),
        (lambda load, probs: load.square().sum(1), "whose losses have no gradient"),
        (lambda load, probs: probs.sum(1), "whose gradient moves no expert"),
        (lambda load, probs: (probs * probs.log()).sum(1), "whose loss is nan with all tokens at one expert"),
        (lambda load, probs: probs.var(1).sqrt(), "is nan with even loads"),
        (lambda load, probs: (load * probs).sum(1) / 0, "whose loss is inf with any tokens"),
        (lambda load, probs: (load * probs).sum(1) / len(load), "whose result for a group depends on other groups or on the call"),
        (lambda load, probs: probs @ 3, "which raised TypeError"),
    ],
)
def test_a_wrong_loss_is_refused_in_one_line(loss: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = ModuleType("wrong")
    made.loss = loss  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wrong", made)
    with pytest.raises(BadInput) as bad:
        check_own(RouterSpec(balance_loss="wrong:loss", balance_weight=0.1), 4)
    text = str(bad.value)
    assert text.startswith("router.balance_loss: got ") and said in text and "\n" not in text, text


def test_the_losses_of_the_docs_are_accepted_and_hold_on_two_ranks(
    mine: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("overload", "signs", "entropy"):
        check_own(RouterSpec(balance_loss=f"balance:{name}", balance_weight=0.1), 8)
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    Path("mine.yaml").write_text("extends: switch_tiny\nrouter: {balance_loss: 'balance:overload', balance_weight: 0.3}\n")
    assert main(nproc=2, recipe="mine.yaml", only="sp2 zigzag", say=said.append) == 0, said
    assert any("1 passed, 0 failed" in line for line in said)
