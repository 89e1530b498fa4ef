"""A user's own function for the router, named in the recipe: scores from logits, or the choice of experts. It is tested on a few tokens
before a run.

    router.score: my_parts:squared      logits_TE -> scores_TE, fp32, 0 or more, with gradient
    router.select: my_parts:pairs       (preferred_TE, num_choices) -> expert_TK int64: K different experts for each token; no gradient

preferred_TE: the scores with noise and selection bias. A token's result must not depend on other tokens, so that it does not change with
the layout, and no token sees a later one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe.recipe.plugin import is_plugin, load_plugin, loaded
from parallel.errors import BadInput, where

if TYPE_CHECKING:
    from moe.recipe.router_spec import RouterSpec

# T tokens, E experts, K choices

_TOKENS = 7  # tokens on which a function is tried


def own_scores(logits_TE: Tensor, name: str) -> Tensor:
    scores_TE: Tensor = loaded("router.score", name, arguments=1)(logits_TE)
    return scores_TE


def check_own(spec: RouterSpec, num_experts: int) -> None:
    """Load the functions that the spec names, and try them on a few tokens. Raises BadInput if one raises an error, or if its results have
    a wrong shape, dtype or range, lack a gradient, or depend on other tokens.
    """
    for key, name, arguments in (("router.score", spec.score, 1), ("router.select", spec.select, 2)):
        if is_plugin(name):
            load_plugin(key, name, arguments=arguments)
    draw = torch.Generator(device="cpu").manual_seed(0)
    with torch.device("cpu"), torch.inference_mode(False):  # the caller may build a model on the meta device, which has no values
        logits_TE = torch.randn(_TOKENS, num_experts, generator=draw)
        if is_plugin(spec.score):
            _try_score(spec.score, logits_TE)
        if is_plugin(spec.select):
            _try_select(spec.select, logits_TE.softmax(-1), spec.num_choices)


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


def _check_alone(key: str, name: str, function: Callable[[Tensor], Tensor], rows_TE: Tensor) -> None:
    """Refuse a function if its result for a token changes with the other tokens, or from call to call. Raises BadInput."""
    whole = _called(key, name, function, rows_TE)
    alone = torch.cat([_called(key, name, function, row_1E) for row_1E in rows_TE.split(1)])
    same = torch.allclose(whole, alone, rtol=1e-5) if whole.is_floating_point() else torch.equal(whole, alone)
    if not same:
        needed = "a result of each token by itself, equal at each call: otherwise it depends on the layout and on later tokens"
        raise BadInput(
            key,
            got=f"{name}, whose result for a token depends on other tokens or on the call",
            needed=needed,
            fix="compute each token's row by itself",
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
