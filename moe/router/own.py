"""A user's own function for the router, named in the recipe: scores from logits, the choice of experts, or the balance loss. It is tested
on small tensors before a run.

    router.score: my_parts:squared          logits_TE -> scores_TE, fp32, 0 or more, with gradient
    router.select: my_parts:pairs           (preferred_TE, num_choices) -> expert_TK int64: K different experts for each token; no gradient
    router.balance_loss: my_parts:overload  (load_GE, probs_GE) -> loss_G, with gradient to probs_GE

preferred_TE: the scores with noise and selection bias. load_GE: each expert's share of a group's choices, before drops, no gradient.
probs_GE: its mean router probability. router.balance_scope and router.balance_counts say which tokens and choices a group counts; means
are taken over all ranks that hold the group's tokens. A row's result must not depend on other rows, so that it does not change with the
layout, and no token sees a later one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe.recipe.plugin import is_plugin, load_plugin, loaded
from parallel.errors import BadInput, counted, where

if TYPE_CHECKING:
    from moe.recipe.router_spec import RouterSpec

# T tokens, E experts, K choices, G groups of tokens over which experts should have equal loads

_TOKENS = 7  # tokens on which a function is tried
_BALANCE = "router.balance_loss"
_GROUPS = 3  # groups with random loads on which a balance loss is tried, before one with even loads and one with a single expert


def own_scores(logits_TE: Tensor, name: str) -> Tensor:
    scores_TE: Tensor = loaded("router.score", name, arguments=1)(logits_TE)
    return scores_TE


def own_balance(load_GE: Tensor, probs_GE: Tensor, name: str) -> Tensor:
    """Return the loss of each group by the user's function `name`. Raises BadInput if it is not one number for each group."""
    loss_G: Tensor = loaded(_BALANCE, name, arguments=2)(load_GE, probs_GE)
    if not isinstance(loss_G, Tensor) or loss_G.shape != load_GE.shape[:1] or not loss_G.is_floating_point():
        needed = f"a loss for each of {counted(len(load_GE), 'group')}: numbers of shape [{len(load_GE)}]"
        raise BadInput(_BALANCE, got=f"{_shown(loss_G)} from {name}", needed=needed, fix="sum over dim 1 only")
    return loss_G


def check_own(spec: RouterSpec, num_experts: int) -> None:
    """Load the functions that the spec names, and try them on a few tokens. Raises BadInput if one raises an error, or if its results have
    a wrong shape, dtype or range, lack a gradient, or depend on other tokens.
    """
    for key, name, arguments in (("router.score", spec.score, 1), ("router.select", spec.select, 2), (_BALANCE, spec.balance_loss, 2)):
        if is_plugin(name):
            load_plugin(key, name, arguments=arguments)
    draw = torch.Generator(device="cpu").manual_seed(0)
    with torch.device("cpu"), torch.inference_mode(False):  # the caller may build a model on the meta device, which has no values
        logits_TE = torch.randn(_TOKENS, num_experts, generator=draw)
        if is_plugin(spec.score):
            _try_score(spec.score, logits_TE)
        if is_plugin(spec.select):
            _try_select(spec.select, logits_TE.softmax(-1), spec.num_choices)
        if spec.own_balance:
            _try_balance(spec.own_balance, logits_TE.softmax(-1))


def _try_score(name: str, logits_TE: Tensor) -> None:
    key, given_TE, function = "router.score", logits_TE.clone().requires_grad_(), partial(own_scores, name=name)
    with torch.enable_grad():
        scores_TE = _called(key, name, function, given_TE)
    needed = f"scores {list(logits_TE.shape)} in float32, each 0 or more"
    if not isinstance(scores_TE, Tensor) or scores_TE.shape != logits_TE.shape or scores_TE.dtype != torch.float32:
        raise BadInput(key, got=f"{_shown(scores_TE)} from {name}", needed=needed, fix="return one score for each logit")
    if not (scores_TE >= 0).all() or not scores_TE.isfinite().all():
        wrong = scores_TE[~((scores_TE >= 0) & scores_TE.isfinite())][0].item()
        raise BadInput(key, got=f"{wrong:g} from {name}", needed=needed, fix="for example: torch.nn.functional.softplus")
    if not scores_TE.requires_grad or torch.autograd.grad(scores_TE.square().sum(), given_TE)[0].eq(0).all():
        needed = "scores that change with the logits: otherwise the router does not learn"
        raise BadInput(key, got=f"scores without a gradient from {name}", needed=needed, fix="compute them by torch's operations")
    _check_alone(key, name, function, logits_TE)


def _try_select(name: str, scores_TE: Tensor, k: int) -> None:
    key, example = "router.select", "for example: scores.topk(k).indices"

    def function(rows_TE: Tensor) -> Tensor:
        expert_TK: Tensor = loaded(key, name, arguments=2)(rows_TE, k)
        return expert_TK

    expert_TK = _called(key, name, function, scores_TE)
    if not isinstance(expert_TK, Tensor) or expert_TK.shape != (len(scores_TE), k) or expert_TK.dtype != torch.int64:
        raise BadInput(key, got=f"{_shown(expert_TK)} from {name}", needed=f"experts [{_TOKENS}, {k}] in int64", fix=example)
    if not ((expert_TK >= 0) & (expert_TK < scores_TE.shape[1])).all() or any(len(set(row)) < k for row in expert_TK.tolist()):
        needed = f"different experts from 0 to {scores_TE.shape[1] - 1} for each token"
        raise BadInput(key, got=f"{expert_TK[0].tolist()} from {name}", needed=needed, fix=example)
    _check_alone(key, name, function, scores_TE)


def _try_balance(name: str, rows_TE: Tensor) -> None:
    """Refuse a balance loss that is not finite or has no gradient, or whose group depends on other groups. Raises BadInput."""
    num_experts, example = rows_TE.shape[1], "for example: (load * probs).sum(1)"
    special_2E = torch.stack((torch.full((num_experts,), 1 / num_experts), torch.eye(num_experts)[0]))
    load_GE, probs_GE = (torch.cat((rows_TE[i : i + _GROUPS], special_2E)) for i in (0, _GROUPS))
    probs_GE.requires_grad_()

    def function(rows_GE: Tensor) -> Tensor:
        load_GE, probs_GE = rows_GE.clone().chunk(2, 1)
        return own_balance(load_GE.detach(), probs_GE, name)

    with torch.enable_grad():
        loss_G = _called(_BALANCE, name, function, torch.cat((load_GE, probs_GE), 1))
        if not loss_G.requires_grad:
            needed = "a loss computed from probs, the second argument: otherwise the router does not learn"
            raise BadInput(_BALANCE, got=f"{name}, whose losses have no gradient", needed=needed, fix=example)
        (slope_GE,) = torch.autograd.grad(loss_G.sum(), probs_GE)
    for rows, tokens in ((slice(_GROUPS), "any tokens"), (slice(-2, -1), "even loads"), (slice(-1, None), "all tokens at one expert")):
        for what, x in (("loss", loss_G[rows]), ("gradient", slope_GE[rows])):
            if not x.isfinite().all():
                got = f"{name}, whose {what} is {x[~x.isfinite()][0].item():g} with {tokens}"
                raise BadInput(_BALANCE, got=got, needed="finite numbers", fix="clamp(min=1e-9) before a logarithm, root or division")
    if num_experts > 1 and torch.equal(slope_GE, slope_GE[:, :1].expand_as(slope_GE)):
        needed = "a gradient that differs between experts, because probabilities sum to 1"
        raise BadInput(_BALANCE, got=f"{name}, whose gradient moves no expert", needed=needed, fix=example)
    _check_alone(_BALANCE, name, function, torch.cat((load_GE, probs_GE.detach()), 1), row="group")


def _check_alone(key: str, name: str, function: Callable[[Tensor], Tensor], rows_TE: Tensor, *, row: str = "token") -> None:
    """Refuse a function if its result for a row changes with the other rows, or from call to call. `row`: what a row is. Raises
    BadInput."""
    whole = _called(key, name, function, rows_TE)
    alone = torch.cat([_called(key, name, function, row_1E) for row_1E in rows_TE.split(1)])
    same = torch.allclose(whole, alone, rtol=1e-5) if whole.is_floating_point() else torch.equal(whole, alone)
    if not same:
        needed = f"a result of each {row} by itself, equal at each call: otherwise it depends on the layout and on later tokens"
        raise BadInput(
            key,
            got=f"{name}, whose result for a {row} depends on other {row}s or on the call",
            needed=needed,
            fix=f"compute each {row}'s row by itself",
        )


def _called(key: str, name: str, function: Callable[[Tensor], Tensor], rows_TE: Tensor) -> Tensor:
    try:
        return function(rows_TE)
    except BadInput:
        raise
    except Exception as error:
        raise BadInput(
            key, got=f"{name}, which raised {where(error)}", needed="a function that runs on a few tokens", fix="correct the function"
        ) from error


def _shown(value: object) -> str:
    return f"{value.dtype} of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
