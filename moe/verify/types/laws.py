"""The laws of `moe verify --types`: what the ranks of a layout must have in common. No other run and no expected number is needed.

    replicated   copies of gradients, weights, optimizer states and router biases, and the loss and norms, are equal bit by bit
    varying      different shards of a gradient differ
    partial      no sum over ranks has equal terms on all ranks, which would count a replicated value several times; and no sum lacks a
                 rank's term, which the conservation of flows shows

The flow of a tensor x is the sum of x times its gradient over all elements and all ranks; ranks with the same x and the same gradient count
once. In a layer that is linear in its input and in its weights, the flows of input, weights and output are equal (Euler's theorem on
homogeneous functions). They pass through different collectives, so a gradient that lacks a rank's term, has it twice, or has a wrong
factor breaks the law. The laws follow from the model alone, whatever the method of parallelism.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import Any, NamedTuple

from moe.kernels.activation import GATED
from moe.recipe.sections import Run
from moe.verify.types.tokens import of_tokens
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
