"""The laws of `moe verify --types`: what the ranks of a layout must have in common. They need no twin and no expected number.

    replicated   copies of a gradient, weight, optimizer state, bias or number are equal bit by bit on all ranks that hold them
    varying      different shards of a gradient differ
    partial      no sum over ranks adds one and the same value of all ranks; and a sum is complete and counted once: the flow is conserved

The flow of a tensor x is the sum of x times its gradient over all elements, and over all ranks with different values. A function that is
linear in its weights w and in x has the same flow at its output, in w, and in x (Euler's theorem). So the flows of a layer's output,
weights and input, which come from different collectives, must agree, whatever the method of parallelism: a gradient that lacks a rank's
share, has it twice, or has a factor, breaks the law.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import sqrt
from typing import Any

from moe.kernels.activation import GATED
from moe.recipe.sections import Run
from moe.verify.types.watch import INPUT
from parallel.errors import some
from parallel.mesh.mesh import AXES, Degrees

# largest deviation of two flows, as a share of the root of the summed squares (x g)^2 of all their elements
BOUND = {"fp32": 1e-4, "bf16": 0.5, "fp16": 0.1}


@dataclass(frozen=True)
class Law:
    """Flows that must agree: the sums over the keys on both sides. A key is a module's output (its path) or a parameter (its name)."""

    left: tuple[str, ...]
    right: tuple[str, ...]

    def __str__(self) -> str:
        return f"the flow of {some(self.left)} = the flow of {some(self.right)}"


def laws(run: Run, trained: Iterable[str]) -> Iterator[Law]:
    """Yield the laws of a recipe's model. trained: names of the parameters that have gradients."""
    names, model = set(trained), run.model

    def of(stem: str, *lasts: str) -> tuple[str, ...]:
        return tuple(f"{stem}{last}" for last in lasts if f"{stem}{last}" in names)

    for norm in (name.removesuffix(".weight") for name in names if name.endswith("norm.weight")):
        yield Law((norm,), (f"{norm}.weight",))
    for out in (name for name in names if name.endswith((".attention.out.weight", ".cross.out.weight"))):
        path = out.removesuffix(".out.weight")
        yield Law((path,), of(path, ".out.weight", ".out_bias.weight"))
        if path.endswith(".attention"):
            yield Law((f"{path}_norm",), of(path, *(f".{one}.weight" for one in ("q", "k", "v", "q_down", "kv_down"))))
        else:
            yield Law((f"{path}_norm",), of(path, ".q.weight"))
        latent = of(path, ".kv_up.weight")
        if latent:
            yield Law((f"{path}.kv_down_norm",), latent)
        elif model.clip_qkv is None:
            yield Law(of(path, ".v.weight", ".v_bias.weight"), of(path, ".out.weight"))
            if model.qk_norm == "none":
                yield Law(of(path, ".q.weight", ".q_bias.weight"), of(path, ".k.weight", ".k_bias.weight"))
        if of(path, ".q_up.weight"):
            yield Law((f"{path}.q_down_norm",), of(path, ".q_up.weight"))
    for w2 in (name for name in names if name.endswith(".ffn.w2.weight")):
        path = w2.removesuffix(".w2.weight")
        yield Law((path,), (w2,))
        yield Law((f"{path}_norm",), of(path, ".w1.weight", ".w3.weight"))
        if of(path, ".w3.weight") and model.gating is None:
            yield Law((w2,), of(path, ".w3.weight"))
    for block in (name.removesuffix(".router.weight") for name in names if name.endswith(".router.weight")):
        yield from _of_experts(run, block, names)
    ends = ("norm", *(f"ahead.{depth}.norm" for depth in range(model.ahead)))
    yield Law(("embedding",), (INPUT, *(ends if model.tied_embeddings else ())))
    if not model.tied_embeddings:
        yield Law(("head.weight",), ends)
    for depth in range(model.ahead):
        yield Law((f"ahead.{depth}.hidden_norm", f"ahead.{depth}.token_norm"), (f"ahead.{depth}.proj.weight",))
    if "encoder_norm.weight" in names:
        yield Law(("encoder_norm",), tuple(name for name in names if name.endswith((".cross.k.weight", ".cross.v.weight"))))


def _of_experts(run: Run, block: str, names: set[str]) -> Iterator[Law]:
    """Yield the laws of the MoE layer of a block."""
    spec, x = run.router, run.experts

    def these(pattern: str) -> tuple[str, ...]:
        return tuple(name for name in names if re.fullmatch(rf"{re.escape(block)}\.(?:{pattern})", name))

    others = these(r"(shared|residual)\.w2\.weight")
    last = (*these(r"experts\.\d+\.w2|output_bias(\.\d+)?|experts\.\d+\.output_bias"), *others)
    scored = these(r"router\.(weight|noise_weight)")
    first = these(r"experts\.\d+\.w[13]|(shared|residual)\.w[13]\.weight|shared_gate\.weight|coefficient\.weight")
    if spec.input_norm == "none":
        first += scored
    else:
        yield Law((f"{block}.router.input_norm",), scored)
    if x.skip:  # skip experts return their input, so the layer's output and input have their flow too
        yield Law((f"{block}.moe", *first), (f"{block}.ffn_norm", *last))
    else:
        yield Law((f"{block}.moe",), last)
        yield Law((f"{block}.ffn_norm",), first)
    if spec.gate_on == "output" and not spec.importance_weight:
        yield Law((f"{block}.router", *others), (f"{block}.moe",))
    gated, plain = (x.ffn or run.model.ffn) in GATED, run.model.gating is None
    if gated and plain and not x.biases:
        yield Law(these(r"experts\.\d+\.w2"), these(r"experts\.\d+\.w3"))


def findings(run: Run, precision: str, seen: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each broken law. seen: of each rank, the fields of Seen."""
    degrees = run.mesh_degrees()
    yield from _copies([rank["copies"] for rank in seen])
    yield from _sums([rank["sums"] for rank in seen], degrees)
    for texts in zip(*(rank["said"] for rank in seen), strict=True):
        if len({*texts}) > 1:
            yield f"varies, though every rank needs it: {_first_difference(texts)}"
    for step in range(min(len(rank["flows"]) for rank in seen)):
        yield from (line for line, share in flows(run, step, seen) if not share <= BOUND[precision])


def _copies(of_ranks: list[list[list[Any]]]) -> Iterator[str]:
    held: dict[tuple[int, str], dict[str, dict[int, int]]] = {}
    constant = set[tuple[int, str]]()
    for rank, copies in enumerate(of_ranks):
        for step, name, region, hashed, same in copies:
            held.setdefault((step, name), {}).setdefault(region, {})[rank] = hashed
            if same:
                constant.add((step, name))
    for (step, name), regions in held.items():
        for region, hashes in regions.items():
            if len({*hashes.values()}) > 1:
                yield f"varies, though it is replicated: {name} {region} on ranks {[*hashes]} (step {step})"
        firsts = [next(iter(hashes.values())) for hashes in regions.values()]
        if len({*firsts}) < len(firsts) and (step, name) not in constant:
            yield f"replicated, though it is cut: {name} (step {step})"


def _sums(of_ranks: list[list[list[Any]]], degrees: Degrees) -> Iterator[str]:
    groups: dict[str, list[list[list[Any]]]] = {}
    for rank, sums in enumerate(of_ranks):
        mine: dict[str, list[list[Any]]] = {}
        for ranks, *what in sums:
            mine.setdefault(ranks, []).append(what)
        for ranks, calls in mine.items():
            groups.setdefault(f"{ranks}", []).append(calls)
        del rank
    for ranks, calls in groups.items():
        of = tuple(map(int, ranks.split(",")))
        names = [axis for axis in AXES if degrees.size(axis) > 1 and degrees.along(of[0], axis) == of] or [f"ranks {ranks}"]
        lines = dict[str, None]()
        for each in zip(*calls, strict=False):
            if len(each) == len(of) and len({hashed for _, hashed, _ in each}) == 1 and all(proper for *_, proper in each):
                lines[f"summed, though it is replicated over {names[0]}: {each[0][0]}"] = None
        yield from lines


def _first_difference(texts: tuple[str, ...]) -> str:
    words = [re.split(r"(?<=[,(])\s*", text) for text in texts]
    odd = next((each for each in zip(*words, strict=False) if len({*each}) > 1), texts)
    return " | ".join(dict.fromkeys(odd))


def flows(run: Run, step: int, seen: list[dict[str, Any]]) -> Iterator[tuple[str, float]]:
    """Yield (line about a law, deviation of its two flows as a share of their size) for each law of one step."""
    whole: dict[str, dict[int, tuple[float, float]]] = {}
    for rank in seen:
        for key, found in rank["flows"][step].items():
            whole.setdefault(key, {}).update({int(hashed): (flow, squares) for hashed, flow, squares in found})
    if not whole:
        return
    for law in laws(run, whole):
        if not law.left or not law.right or not all(key in whole for key in (*law.left, *law.right)):
            continue
        left, right = (sum(flow for key in side for flow, _ in whole[key].values()) for side in (law.left, law.right))
        size = sqrt(sum(squares for key in (*law.left, *law.right) for _, squares in whole[key].values()))
        yield f"not conserved: {law}: {left:.6g}, {right:.6g} (step {step})", abs(left - right) / size if size else 0.0
