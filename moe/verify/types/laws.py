"""The laws of `moe verify --types`: what the ranks of a layout must have in common. No other run and no expected number is needed.

    replicated   copies of gradients, weights, optimizer states and router biases, and the loss and norms, are equal bit by bit
    varying      different shards of a gradient differ
    partial      no sum over ranks has equal terms on all ranks, which would count a replicated value several times; and no sum lacks a
                 rank's term, which the conservation of flows shows

The flow of a tensor x is the sum of x times its gradient over all elements and all ranks; ranks with the same x and the same gradient count
once. In a layer that is linear in its input and in its weights, the flows of input, weights and output are equal (Euler's theorem on
homogeneous functions). They pass through different collectives, so a gradient that lacks a rank's term, has it twice, or has a wrong
factor breaks the law. The laws follow from the model alone, whatever the method of parallelism.

Laws about tokens:

    copies       a token has the same experts on every rank that holds it, and in a recomputed pass
    slots        an expert accepts at most as many choices of a group of tokens as it has slots, drops none while a slot is free, and
                 accepts them in the order of its queue
    gates        a choice without a slot has no gradient; of a token's choices with slots, either all have a gradient or none
    balance      the loss is weight * E * sum over experts e of f_e P_e (f_e: share of the counted choices that went to e; P_e: mean
                 probability of e over tokens). Its gradients with respect to e's probabilities therefore sum, over tokens, to
                 weight * E * f_e. If f_e is counted over the global batch, the gradient is equal for all tokens
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import Any, NamedTuple

from moe.kernels.activation import GATED
from moe.recipe.router_spec import RouterSpec
from moe.recipe.sections import Run
from moe.router.methods import method_of
from moe.verify.types.watch import INPUT, TOKENS
from parallel.errors import some
from parallel.mesh.mesh import AXES, Degrees

# compute dtype -> largest allowed difference of a law's two sides, divided by sqrt(sum of (x g)^2 over both sides); x: elements of the
# tensors, g: their gradients
BOUND = {"fp32": 1e-5, "bf16": 0.1, "fp16": 0.02}
_NORM = 1e-4  # largest allowed relative error of the gradient norm, and of first moments


class Law(NamedTuple):
    """Two sides with equal flows: the sum of the flows of the keys `left` equals that of `right`. A key is a module's path (its output) or
    a parameter's name."""

    left: tuple[str, ...]
    right: tuple[str, ...]

    def __str__(self) -> str:
        return " = ".join(f"flow of {some(sorted(side))}" for side in self)


def laws(run: Run, parameters: Iterable[str]) -> Iterator[Law]:
    """Yield the laws of flows that a recipe's model obeys. parameters: names of its parameters in checkpoints."""
    names, model = set(parameters), run.model

    def of(stem: str, *lasts: str) -> tuple[str, ...]:
        return tuple(f"{stem}.{last}" for last in lasts if f"{stem}.{last}" in names)

    def stems(pattern: str) -> list[str]:
        return sorted(found[1] for name in names if (found := re.fullmatch(rf"(.*){pattern}", name)))

    yield from (Law((path,), (f"{path}.weight",)) for path in stems(r"(?<=norm)\.weight"))
    for path in stems(r"(?<=attention)\.out\.weight") + stems(r"(?<=cross)\.out\.weight"):
        yield Law((path,), of(path, "out.weight", "out_bias.weight"))
        first = ("q.weight", "q_down.weight", "kv_down.weight")
        yield Law((f"{path}_norm",), of(path, *first, *(() if path.endswith("cross") else ("k.weight", "v.weight"))))
        yield from (Law((f"{path}.{one}_down_norm",), up) for one in ("q", "kv") if (up := of(path, f"{one}_up.weight")))
        if of(path, "v.weight") and model.clip_qkv is None:
            yield Law(of(path, "v.weight", "v_bias.weight"), of(path, "out.weight"))
            if model.qk_norm == "none":
                yield Law(of(path, "q.weight", "q_bias.weight"), of(path, "k.weight", "k_bias.weight"))
    for path in stems(r"(?<=\.ffn)\.w2\.weight"):
        yield Law((path,), of(path, "w2.weight"))
        yield Law((f"{path}_norm",), of(path, "w1.weight", "w3.weight"))
        if of(path, "w3.weight") and model.gating is None:
            yield Law(of(path, "w2.weight"), of(path, "w3.weight"))
    for block in stems(r"\.router\.weight"):
        yield from _of_experts(run, block, names)
    ends = ("norm", *(f"ahead.{depth}.norm" for depth in range(model.ahead)))
    reads = (INPUT, *(f"{INPUT} of ahead.{depth}.{TOKENS}" for depth in range(model.ahead)))
    yield Law(("embedding",), (*reads, *(ends if model.tied_embeddings else ())))
    if not model.tied_embeddings:
        yield Law(("head.weight",), ends)
    for depth in range(model.ahead):
        yield Law((f"ahead.{depth}.hidden_norm", f"ahead.{depth}.{TOKENS}"), (f"ahead.{depth}.proj.weight",))
    if "encoder_norm.weight" in names:
        yield Law(("encoder_norm",), tuple(name for name in names if name.endswith((".cross.k.weight", ".cross.v.weight"))))


def _of_experts(run: Run, block: str, names: set[str]) -> Iterator[Law]:
    """Yield the laws of the MoE layer of a block."""
    spec, x = run.router, run.experts

    def these(pattern: str) -> tuple[str, ...]:
        return tuple(name for name in names if re.fullmatch(rf"{re.escape(block)}\.(?:{pattern})", name))

    others = these(r"(shared|residual)\.w2\.weight")
    last = (*these(r"experts\.\d+\.w2|output_bias|experts\.\d+\.output_bias"), *others)
    first = these(r"experts\.\d+\.w[13]|(shared|residual)\.w[13]\.weight|shared_gate\.weight|coefficient\.weight")
    scored = these(r"router\.(weight|noise_weight)")
    if spec.input_norm == "none":
        first += scored
    else:
        yield Law((f"{block}.router.input_norm",), scored)
    if x.skip:  # skip experts have no weights: their flow is in the layer's input and output alone
        yield Law((f"{block}.moe", *first), (f"{block}.ffn_norm", *last))
    else:
        yield Law((f"{block}.moe",), last)
        yield Law((f"{block}.ffn_norm",), first)
    if spec.gate_on == "output" and not spec.importance_weight:
        yield Law((f"{block}.router", *others), (f"{block}.moe",))
    if (x.ffn or run.model.ffn) in GATED and run.model.gating is None and not x.biases:
        yield Law(these(r"experts\.\d+\.w2"), these(r"experts\.\d+\.w3"))


@dataclass
class Checked:
    """Result of checking a layout. broken: a line for each broken law. laws: number of laws on flows (top of this file), not counting
    those with frozen weights. largest: largest difference of two flows, divided by its bound. without: trained parameters that no counted
    law covers; only their copies and sums are checked."""

    broken: list[str]
    laws: int
    largest: float
    without: list[str]


def check(run: Run, seen: list[dict[str, Any]]) -> Checked:
    """Check the ranks' records against the laws at the top of this file. seen: for each rank, the fields of its Seen
    (moe/verify/types/watch.py)."""
    broken = [*_copies([rank["copies"] for rank in seen]), *_sums([rank["sums"] for rank in seen], run.mesh_degrees())]
    for texts in zip(*(rank["said"] for rank in seen), strict=True):
        if len({*texts}) > 1:
            broken.append(f"varies, though every rank needs it: {_odd(texts)}")
    broken += dict.fromkeys(text for rank in seen for text in rank["remarks"])
    broken += [*_moments(run, seen), *_columns(run, seen)]
    broken += of_tokens(run.router, seen, BOUND[run.precision.compute], zero=run.experts.zero)
    frozen = {name for rank in seen for name in rank["frozen"]}
    trained = {name for rank in seen for name in rank["trained"]}
    every = [*laws(run, trained | frozen)]
    held = [law for law in every if not frozen & {*law.left, *law.right}]
    shares = [0.0]
    for step in range(len(seen[0]["norms"])):
        flows = _Flows(step, seen)
        broken += flows.norm(trained)
        for law in held:
            if unseen := [key for key in (*law.left, *law.right) if key not in flows.whole]:
                broken += [] if frozen else [f"unknown: nothing was seen of {some(unseen)}"]
                continue
            left, right, size = flows.sides(law)
            share = abs(left - right) / size / BOUND[run.precision.compute] if size else 0.0
            shares += [share]
            if not share <= 1 and isfinite(seen[0]["norms"][step]):
                broken.append(f"not conserved: {law}: {left:.7g}, {right:.7g} (step {step})")
    return Checked(broken, len(held), max(shares), sorted(trained - {key for law in held for key in (*law.left, *law.right)}))


class _Flows:
    """Flows (sums of x times its gradient) of one step, over all ranks."""

    def __init__(self, step: int, seen: list[dict[str, Any]]) -> None:
        self.step, self.norms = step, [rank["norms"][step] for rank in seen]
        # key of a Law -> hash of a tensor x and its gradient g -> [flow (sum of x g), sum of (x g)^2, sum of g^2]. Copies of x and g on
        # several ranks have the same hash, so they count once
        self.whole: dict[str, dict[int, list[float]]] = {}
        for rank in seen:
            for key, found in rank["flows"][step].items():
                self.whole.setdefault(key, {}).update({int(hashed): numbers for hashed, *numbers in found})

    def _total(self, keys: Iterable[str], of: int) -> float:
        return sum(numbers[of] for key in keys for numbers in self.whole[key].values())

    def sides(self, law: Law) -> tuple[float, float, float]:
        """Return (flow of the left side, flow of the right side, size). size: square root of the sum of (x g)^2 over both sides."""
        return self._total(law.left, 0), self._total(law.right, 0), sqrt(self._total((*law.left, *law.right), 1))

    def norm(self, trained: Iterable[str]) -> Iterator[str]:
        """Yield a line if the recorded gradient norm differs from the norm of all gradients, with each element counted once."""
        whole = sqrt(self._total((name for name in trained if name in self.whole), 2))
        if any(isfinite(norm) and abs(norm - whole) > _NORM * whole for norm in self.norms):
            yield f"counted wrongly: the norm is {self.norms[0]:.7g}, of all gradients {whole:.7g} (step {self.step})"


def _copies(of_ranks: list[list[list[Any]]]) -> Iterator[str]:
    """Yield a line for each tensor with unequal copies, and for each tensor with equal shards. of_ranks: for each rank, Seen.copies."""
    held: dict[tuple[int, str], dict[str, dict[int, int]]] = {}  # (step, tensor) -> region -> rank -> hash
    constant = set[tuple[int, str]]()
    for rank, copies in enumerate(of_ranks):
        for step, name, region, hashed, same in copies:
            held.setdefault((step, name), {}).setdefault(region, {})[rank] = hashed
            constant |= {(step, name)} if same else set()
    for (step, name), regions in held.items():
        for region, hashes in regions.items():
            if len({*hashes.values()}) > 1:
                yield f"varies, though it is replicated: {name} {region} on ranks {some(map(str, hashes))} (step {step})"
        firsts = [next(iter(hashes.values())) for hashes in regions.values()]
        if len({*firsts}) < len(firsts) and (step, name) not in constant:
            yield f"replicated, though it is cut: {name} (step {step})"


def _sums(of_ranks: list[list[list[Any]]], degrees: Degrees) -> Iterator[str]:
    """Yield a line for each sum over ranks that has the same term on all ranks. of_ranks: for each rank, Seen.sums."""
    calls: dict[str, dict[int, list[list[Any]]]] = {}  # ranks of a group -> rank -> its calls in order
    for rank, sums in enumerate(of_ranks):
        for ranks, *what in sums:
            calls.setdefault(ranks, {}).setdefault(rank, []).append(what)
    for ranks, of_rank in calls.items():
        group = tuple(map(int, ranks.split(",")))
        axis = next((a for a in AXES if degrees.along(group[0], a) == group), f"ranks {ranks}")
        lines = dict[str, None]()
        for each in zip(*of_rank.values(), strict=False):
            if len(each) == len(group) and len({hashed for _, hashed, _ in each}) == 1 and all(proper for *_, proper in each):
                lines[f"summed, though it is replicated over {axis}: {each[0][0]}"] = None
        yield from lines


def _moments(run: Run, seen: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each parameter whose first moment (AdamW) after step 0 is not (1 - beta1) times the clipped gradient."""
    norm, limit = seen[0]["norms"][0] / seen[0]["scales"][0], run.optimizer.clip_norm
    if run.optimizer.kind != "adamw" or not isfinite(norm):
        return
    factor = (1 - run.optimizer.beta1) * (1.0 if limit is None or norm <= limit else limit / norm) / seen[0]["scales"][0]
    for name in dict.fromkeys(name for rank in seen for name, *_ in rank["moments"]):
        mg, mm, gg = (sum(column) for column in zip(*(sums for rank in seen for n, *sums in rank["moments"] if n == name), strict=True))
        if gg and not (abs(mg - factor * gg) <= _NORM * factor * gg and mm * gg - mg * mg <= _NORM * mm * gg):
            yield f"not in proportion: the first moment of {name} is {mg / gg / factor:.4g} times its clipped gradient"


def _columns(run: Run, seen: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a line if the head's gradient does not sum to 0 over the vocabulary: one vector added to all rows changes no probability."""
    if run.model.logit_cap is not None or run.train.loss != "cross_entropy":
        return
    found: dict[tuple[int, int], list[tuple[float, float]]] = {}  # (step, column) -> for each shard: sum, sum of absolute values
    for step, first, sums in (each for rank in seen for each in rank["columns"]):
        for column, both in enumerate(sums, first):
            found.setdefault((step, column), []).append(both)
    broken = {
        step
        for (step, _), parts in found.items()
        if abs(sum(total for total, _ in parts)) > BOUND[run.precision.compute] * sum(size for _, size in parts)
    }
    yield from (f"not balanced: the gradient of head.weight does not sum to 0 over the vocabulary (step {step})" for step in sorted(broken))


def _odd(texts: tuple[str, ...]) -> str:
    """Return the ranks' different values, joined by " | ", of the first field in which their texts differ, such as the loss."""
    parts = [re.split(r"(?<=[,(])\s*", text) for text in texts]
    return " | ".join(dict.fromkeys(next((each for each in zip(*parts, strict=False) if len({*each}) > 1), texts)))


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
