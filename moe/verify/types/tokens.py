"""The laws of `moe verify --types` about tokens: their experts, slots, and shares of the balance loss.

copies     a token has the same experts on every rank that holds it, and in a recomputed pass
slots      an expert accepts at most as many choices of a group of tokens as it has slots, drops none while a slot is free, and accepts
           them in the order of its queue
gates      a choice without a slot has no gradient; of a token's choices with slots, either all have a gradient or none
balance    the loss is weight * E * sum over experts e of f_e P_e (f_e: share of the counted choices that went to e; P_e: mean probability
           of e over tokens). Its gradients with respect to e's probabilities therefore sum, over tokens, to weight * E * f_e. If f_e is
           counted over the global batch, the gradient is equal for all tokens
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from moe.recipe.router_spec import RouterSpec
from moe.router.methods import method_of

# T tokens, E experts, K choices

Token = tuple[bool, list[int], list[bool]]  # (False if padding, expert of each choice, whether each choice has a slot)


def of_tokens(spec: RouterSpec, seen: list[dict[str, Any]], bound: float, *, zero: int = 0) -> Iterator[str]:
    """Yield a line for each law of routing that does not hold. seen: each rank's record (class Seen of watch.py) as a dict. bound: largest
    allowed relative difference between the gradient of the balance loss and its formula. zero: number of zero experts (experts that return
    0), which have the last indices."""
    routers: dict[tuple[int, str], dict[int, Token]] = {}  # (step, router) -> position in the step -> token
    sizes: dict[str, tuple[int, int | None, int]] = {}  # router -> (tokens of a sequence, slots of an expert, number of experts)
    for step, router, tokens, length, slots, experts in (each for rank in seen for each in rank["choices"]):
        known, sizes[router] = routers.setdefault((step, router), {}), (length, slots, experts)
        for position, *token in tokens:
            if known.setdefault(position, tuple(token)) != tuple(token):  # type: ignore[comparison-overlap]
                yield f"varies, though it is replicated: the choices of token {position} in {router} (step {step})"
    for (step, router), found in routers.items():
        length, slots, experts = sizes[router]
        if spec.group != "rank":
            for line in dict.fromkeys(_slots(spec, found, length, slots)):
                yield f"{line} in {router} (step {step})"
        flags = [each for rank in seen for s, r, each in rank["gates"] if (s, r) == (step, router)]
        if flags and not spec.importance_weight:  # an importance loss gives every gate a gradient
            yield from (f"{line} in {router} (step {step})" for line in dict.fromkeys(_gates(found, flags, experts - zero)))
        sums = [(name, *each) for rank in seen for s, r, name, *each in rank["balance"] if (s, r) == (step, router)]
        yield from (f"{line} in {router} (step {step})" for line in _balance(spec, experts, found, sums, seen[0]["scales"][step], bound))


def _slots(spec: RouterSpec, tokens: dict[int, Token], length: int, slots: int | None) -> Iterator[str]:
    """Yield a line for each broken law of slots in one step of a router. tokens: position in the step -> token. length: tokens of a
    sequence. slots: slots of an expert for a group of tokens; None: no limit."""
    method, each = method_of(spec), length * (1 if spec.group == "sequence" else int(spec.group))
    # (group, expert) -> for each choice in the queue: (place by which the queue is sorted, whether the choice has a slot)
    queues: dict[tuple[int, int], list[tuple[tuple[int, int], bool]]] = {}
    for position, (valid, chosen, kept) in tokens.items():
        if not valid and any(kept):
            yield "padding has a slot"
        for k, (expert, has) in enumerate(zip(chosen, kept, strict=True)):
            # queues have choices with a slot, and choices that certainly asked for one: a random second choice without a slot may not have
            if valid and (has or (method.tokens_choose and not (k and spec.random_second))):
                place = (k, position) if spec.queue == "choices_first" else (position, k)
                queues.setdefault((position // each, expert), []).append((place, has))
    for (group, expert), queue in queues.items():
        served = [has for _, has in sorted(queue)]
        if slots is not None and sum(served) > slots:
            yield f"expert {expert} has {sum(served)} tokens of group {group} in {slots} slots"
        if not all(served) and (slots is None or sum(served) < slots):
            yield f"expert {expert} drops a token of group {group}, though a slot is free"
        if spec.drop == "position" and served != sorted(served, reverse=True):
            yield f"expert {expert} drops an earlier token of group {group} than it keeps"


def _gates(tokens: dict[int, Token], flags: list[list[Any]], computing: int) -> Iterator[str]:
    """Yield a line for each broken law of gates. flags: for each pass, (position, whether each gate has a gradient) of each token.
    computing: number of experts other than zero experts; zero experts have the last indices."""
    has: dict[int, list[bool]] = {}  # position -> whether each of its gates has a gradient on any rank
    for position, mine in (pair for each in flags for pair in each):
        has[position] = [a or b for a, b in zip(mine, has.get(position, mine), strict=True)]
    for position, gradients in has.items():
        _, chosen, kept = tokens[position]
        if any(given and not slot for given, slot in zip(gradients, kept, strict=True)):
            yield "not lost: a choice without a slot has a gradient"
        if len({given for given, slot, expert in zip(gradients, kept, chosen, strict=True) if slot and expert < computing}) > 1:
            yield "lost: of a token's choices with slots some have no gradient"


def _balance(
    spec: RouterSpec, experts: int, tokens: dict[int, Token], sums: list[tuple[Any, ...]], scale: float, bound: float
) -> Iterator[str]:
    """Yield a line for each broken law of the balance loss. sums: for each pass, (hash of its tokens, sum_E, minimum_E, maximum_E),
    over tokens, of the gradient of each expert's probability; (hash, sum_E) for a pass without tokens. scale: loss scale. bound: as in
    `of_tokens`."""
    once = {name: sum_E for name, sum_E, *_ in sums}  # ranks with the same tokens count once
    whole = [sum(column) for column in zip(*once.values(), strict=True)] or [0.0] * experts
    total = spec.balance_weight * experts * scale
    if not spec.balance_weight or not tokens:
        return
    if spec.own_balance:  # a user's loss may have any gradient that is equal for a group's tokens
        pass
    elif abs(sum(whole) - total) > bound * total:
        yield f"not a mean: the gradients of the probabilities sum to {sum(whole) / scale:.6g}, not to weight * experts {total / scale:.6g}"
    elif spec.balance_counts != "unbiased" and method_of(spec).tokens_choose:
        first = 1 if spec.balance_counts == "first" else None
        counts = Counter(expert for valid, chosen, _ in tokens.values() if valid for expert in chosen[:first])
        shares = [counts[expert] / counts.total() for expert in range(experts)]
        if any(abs(mine - total * share) > bound * total for mine, share in zip(whole, shares, strict=True)):
            yield f"not in proportion: the gradients of the probabilities {_short(whole, total)}, choices {_short(shares, 1.0)}"
    extremes = [each[2:] for each in sums if len(each) > 2]  # (minimum_E, maximum_E) of each pass that has tokens
    if spec.balance_scope == "global_batch" and extremes:
        least, most = (
            [pick(column) for column in zip(*side, strict=True)] for pick, side in zip((min, max), zip(*extremes, strict=True), strict=True)
        )
        if any((b - a) * len(tokens) > bound * total for a, b in zip(least, most, strict=True)):
            yield "varies, though it is replicated: the gradient of a probability, over tokens"


def _short(values: list[float], whole: float) -> str:
    return "[" + ", ".join(f"{value / whole:.3f}" for value in values) + "]"
