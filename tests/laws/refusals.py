"""The list of refusals in docs/parallel/combinations.md: each pair of a key's value with a value of another key, or with a kind of
parallelism, that the checks of recipes refuse, and the reason. `WHY` says for a reason why nothing better is worth its code.
"""

from __future__ import annotations

import ast
import copy
import traceback
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

from moe.checks import together
from moe.checks.together import check_run
from moe.plan.job.of_recipe import network_of, plan_of
from moe.plan.machine.cluster import load_cluster
from moe.plan.time.cost import step_time
from moe.recipe.load import build_run, load
from moe.verify.hybrid import Pair, case_of, completed
from parallel.errors import BadInput
from parallel.fixes import put

# values of keys, with further keys that they need: the first one names them
KEYS: tuple[dict[str, Any], ...] = (
    {"optimizer.kind": "muon"},
    {"optimizer.kind": "adafactor"},
    {"optimizer.kind": "kfac"},
    {"optimizer.clip_norm": 1.0},
    {
        "model.kind": "encoder_decoder",
        "model.positions": "t5",
        "data.objective": "span_corruption",
        "model.max_length": 32,
        "model.num_layers": 6,
    },
    {"model.latent.key_rank": 8, "model.latent.rotary_size": 4, "model.num_kv_heads": None},
    {"model.ahead": 1},
    {"model.rope.fraction": 0.5, "model.head_size": 8},
    {"model.rope.scaling": "dynamic", "model.rope.trained_length": 8},
    {"model.scales.residual": 2.0},
    {"model.scales.attention": 0.5},
    {"model.document_mask": True},
    {"model.sliding_window": 4},
    {"model.attention_sinks": True},
    {"model.qk_norm": "whole"},
    {"model.qkv_bias": True},
    {"model.out_bias": True},
    {"model.clip_qkv": 8.0},
    {"model.logit_cap": 30.0},
    {"model.tied_embeddings": True},
    {"experts.biases": True},
    {"experts.skip": 1},
    {"experts.shared": 1},
    {"experts.residual": True},
    {"router.select": "expert_choice", "router.allow_noncausal": True, "router.balance_weight": 0.0, "router.eval_capacity_factor": 1.0},
    {"dispatch.overlap_chunks": 2},
    {"tensor.overlap_chunks": 2, "tensor.kind": "1d", "degrees.tp": 2, "degrees.dp": 1},
    {"experts.rebalance_every": 10},
    {"router.balance_scope": "global_batch"},
    {"tiling.ffn": 2},
    {"tiling.head": 2},
    {"lora.rank": 2},
    {"lora.base": "fp8", "lora.rank": 2},
    {"lora.base": "fp8_all", "lora.rank": 2},
    {"train.freeze": ["head"]},
    {"train.freeze": ["attention"]},
    {"train.freeze": ["layers.0"]},
    {"train.audit_every": 10},
    {"train.compile": True},
    {"train.deterministic": True},
    {"train.save_mode": "async"},
    {"sharding.offload.optimizer": "cpu", "sharding.kind": "zero"},
    {"sharding.offload.parameters": "cpu", "sharding.kind": "zero", "sharding.stage": 3},
    {"sharding.offload.optimizer": "nvme", "sharding.kind": "zero", "sharding.stage": 3, "sharding.offload.path": "."},
    {"sharding.engine": "deepspeed", "sharding.kind": "zero"},
    {"precision.master": "bf16", "precision.compute": "bf16"},
    {"precision.casts": "step", "precision.compute": "bf16"},
)
# kinds of parallelism: value of a factor of moe/verify/hybrid.py -> the name on the page of all values that are refused with it
WITH = {
    ("schedule", "1f1b"): "stages",
    ("schedule", "two_bw"): "pipedream and two_bw",
    ("tensor", "1d"): "1d",
    ("tensor", "dtensor"): "dtensor",
    ("tensor", "2d"): "grids",
    ("sequence", "zigzag"): "ring",
    ("sequence", "ulysses"): "ulysses",
    ("data", "dp"): "dp",
    ("data", "fsdp"): "fsdp",
    ("data", "zero1"): "zero 1",
    ("data", "zero3"): "zero 2 and 3",
    ("experts", "etp2"): "etp",
    ("recompute", "full"): "full",
}
# words of a refusal's `needed` -> why nothing better is worth its code; {grids}: see `_grids`. A refusal without an entry is listed with
# its own words: its two values exclude each other by their meaning
_STALE = (
    "stages update at different times, so no moment has one version of all weights or gradients. `zb_v` goes with all and takes as long"
)
_STALE += ": 48 a further batch (`moe simulate --microbatches 16`)"
_FACTORS = "factors of a d x 4d matrix have 17 d² numbers, 4.25 times the matrix: ranks that need shards have no room for them"
_TILE = "tiles save memory that a step on whole matrices needs again: 2 bytes an element gathered, 4 in the step"
_GRID = "1d with `sequence_parallel` is no worse: 3d takes {grids} of its predicted step (Mixtral, GLaM, GPT-3, Llama 3 on 64 A100, tp 8)"
_HOST = "Muon's step of 7 billion parameters takes 7e14 FLOPs, minutes on a host; Adafactor's states are under 0.1 % of AdamW's; "
_HOST += "K-FAC's factors have 4.25 times a matrix's numbers"
_FETCHED = "7 billion parameters on four ranks: 3.5 GB for each micro-batch, 0.14 s at 25 GB/s; 70 billion on eight: 105 GB of states, "
_FETCHED += "which a host holds"
_THREADS = "replicas are threads of one process, for study: a step takes 1.00 of `ddp`'s (0.71 to 1.23, two replicas on two cores, "
_THREADS += "`python -m tests.measured replicas`, [replicas.json](../benchmarks/replicas.json))"
_T5 = "T5, mT5, UL2 and Switch have none of them"
_DEEPSEEK = "DeepSeek's latents are normed, have no biases, bounds or factors, and turn `rotary_size` channels with YaRN"
_BLOCKS = "`ep` divides the same bytes (44 MB an expert of DeepSeek-V3), and 97 % of that model's weights are experts"
_CHOSEN = "experts choose: at capacity factor 1, random scores leave (7/8)^8 = 34 % of the tokens without any of 8 experts"
_SHARED = "tiles would share LoRA factors, and save little: gathered experts of a Mixtral layer are 2.8 GB, with `ep` 8 0.35 GB"
WHY: dict[str, str] = {
    "K-FAC's factors belong to the weights of one step": _STALE,
    "different versions of": _STALE,
    "steps overlap": _STALE,
    "all gradients of a step before its update": _STALE,
    "stages keep older versions": _STALE,
    "no gradient norm of the whole model": _STALE,
    "the other engines update all stages together": _STALE,
    "K-FAC's direction needs a whole matrix": _FACTORS,
    "whole matrices, on one rank": _FACTORS,
    "a K-FAC factor belongs to a whole matrix": _FACTORS,
    "a tile is a part of a matrix": _TILE,
    "cuts latent attention": _GRID,
    "no grid cuts the blocks": _GRID,
    "the only optimizer with a step on the host": _HOST,
    "it offloads nothing else": _FETCHED,
    "FSDP offloads only the optimizer, and only to cpu": "FSDP shards weights and states, at most 16 bytes a parameter, over all ranks",
    "T5 and Switch have no": _T5,
    **dict.fromkeys(
        ("latent attention has n", "latent attention does not clip", "only YaRN scales", "yarn, as in DeepSeek", "rotary_size sets"),
        _DEEPSEEK,
    ),
    "blocks are made of whole matrices": _BLOCKS,
    **dict.fromkeys(("one replica of each", "runs all replicas"), _THREADS),
    "autograd rounds the gradients": "autograd rounds the gradients of replicas' copies to 8 bits; `ddp` gets them in fp32",
    "already gathers or holds": "the engine already gathers weights in precision.compute (fsdp: each rank casts its 1/N) or holds them so",
    "a token must be able": _CHOSEN,
    "share its LoRA factors": _SHARED,
    "follow only the last one": "of n tiles only the last, 1/n of the products, could hide the all-reduce over tp",
    "states in memory": "ZeRO-3 holds states on a disk once, so there is no copy to compare, and passes do not touch them",
    "copies all states to host": "the copy in host memory is what a disk avoids: 84 GB for 7 billion parameters",
    "a residual network or shared experts": "a residual network is a shared expert whose share is learned",
    "K-FAC preconditions whole matrices": "K-FAC's factor of a d-wide input has d² numbers: d / r times the adapter that it would serve",
}


# functions of moe/checks with refusals of two values that are not on the page -> the reason
ELSEWHERE = {
    "_check_idle": "a key of section sequence that another key of it leaves without effect",
    "_check_order": "a key of section sequence that another key of it leaves without effect",
    "_check_zero": "sharding.engine can carry out some values of sharding.stage",
    "_check_precision": "keys of section precision, which define one another",
    "_check_rope": "a factor of latent attention's logits in a model without it",
    "check_encoder_decoder": "keys that define an encoder-decoder",
}
FOLDER = Path(together.__file__).parent


HEAD = """## Every other refusal

Values of keys, with each other and with kinds of parallelism. Sizes that do not divide are left out.

| refused | because |
|---|---|
"""


def listed(found: dict[Pair, BadInput]) -> str:
    """Return the section of the page for the refused pairs."""
    by_reason: dict[str, list[Pair]] = {}
    for pair, refused in found.items():
        by_reason.setdefault(reason_of(refused), []).append(pair)
    rows = (f"| {'; '.join(_short(pairs))} | {reason.replace('{grids}', _grids())} |\n" for reason, pairs in by_reason.items())
    return HEAD + "".join(rows)


_SHORT = {"stages, pipedream and two_bw": "stages", "1d, dtensor, grids": "tp", "fsdp, zero 1, zero 2 and 3": "fsdp, zero"}


def _short(pairs: list[Pair]) -> list[str]:
    """Return the pairs as texts. Values on the left that are refused with the same values on the right share a text."""
    on_right: dict[tuple[str, str], list[str]] = {}
    for left, (right, other) in pairs:
        on_right.setdefault(left, []).append(f"`{right}` {other}" if "." in right else other)
    lefts: dict[str, dict[str, list[str]]] = {}
    for (key, value), rights in on_right.items():
        lefts.setdefault(", ".join(rights), {}).setdefault(key, []).append(value)
    texts = [", ".join(f"`{key}` {', '.join(values)}" for key, values in keys.items()) + f" x {right}" for right, keys in lefts.items()]
    for long, short in _SHORT.items():
        texts = [text.replace(long, short) for text in texts]
    return texts


def refusals() -> dict[Pair, BadInput]:
    """Return the refused pairs, each of a value in KEYS with a value of `WITH` or with a later value in KEYS. A pair is left out if it is
    refused with the same words without the keys that only one of its values needs."""
    found: dict[Pair, BadInput] = {}
    inside = {_named(keys): [_named(few) for few in KEYS if few.items() < keys.items()] for keys in KEYS}
    inside |= {_named(keys): [("tensor", "1d")] for keys in KEYS if "degrees.tp" in keys}
    for (factor, value), name in WITH.items():
        case = case_of(completed({factor: value, "model": "switch"}), world=None)
        case = replace(case, world=1) if case.engine.threads else case
        values = case.run().model_dump(mode="json")
        for keys in KEYS:
            world = 2 if case.engine.threads and "degrees.tp" in keys else case.world
            if not any(f"{key}." in f"{factor if factor != 'data' else 'sharding'}." for key in (k.split(".")[0] for k in keys)):
                found |= _judged((_named(keys), (factor, name)), values, world, keys)
    case = case_of(completed({"model": "switch"}), world=None)
    values = case.run().model_dump(mode="json")
    for one, other in combinations(KEYS, 2):
        if all(other.get(key, value) == value for key, value in one.items()):
            found |= _judged((_named(one), _named(other)), values, case.world, one | other)

    def again(pair: Pair, refused: BadInput) -> bool:
        smaller = [(a, pair[1]) for a in inside.get(pair[0], ())] + [(pair[0], b) for b in inside.get(pair[1], ())]
        return any(refused.needed == found[few].needed for each in smaller for few in (each, each[::-1]) if few in found)

    idle = "otherwise this key has no effect"
    return {pair: refused for pair, refused in found.items() if not refused.needed.endswith(idle) and not again(pair, refused)}


def reason_of(refused: BadInput) -> str:
    """Return the entry of WHY for a refusal, or else its own reason."""
    return next((why for words, why in WHY.items() if words in refused.needed), refused.needed.partition(": ")[2] or refused.needed)


def _named(keys: dict[str, Any]) -> tuple[str, str]:
    key, value = next(iter(keys.items()))
    return key, " ".join(value) if isinstance(value, list) else str(value).lower()


def _judged(pair: Pair, values: dict[str, Any], world: int, keys: dict[str, Any]) -> Iterator[tuple[Pair, BadInput]]:
    changed = copy.deepcopy(values)
    for key, value in keys.items():
        put(changed, key, value)
    try:
        check_run(build_run(changed), world)
    except BadInput as refused:
        yield pair, refused


def sites() -> dict[tuple[str, int], str]:
    """Return (file of moe/checks, line) -> function, for each statement that refuses two values together (`clash`, `check_others`)."""
    found: dict[tuple[str, int], str] = {}
    for path in sorted(FOLDER.glob("*.py")):
        functions = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)]
        for function in functions if path.name != "clash.py" else ():
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("clash", "check_others"):
                    found[path.name, node.lineno] = function.name
    return found


def site_of(refused: BadInput) -> tuple[str, int]:
    """Return (file of moe/checks, line) of the statement in a check that raised the error."""
    frames = [frame for frame in traceback.extract_tb(refused.__traceback__) if Path(frame.filename).parent == FOLDER]
    last = [frame for frame in frames if Path(frame.filename).name != "clash.py"][-1]
    return Path(last.filename).name, last.lineno or 0


def _grids() -> str:
    """Return the predicted step times of 3D tensor parallelism divided by those of 1d with sequence_parallel, as text."""
    cluster, ratios = load_cluster("a100-80-8").holding(64), []
    for name in ("mixtral_8x7b", "glam_64b_64e", "gpt3_175b", "llama3_405b"):
        run = load(f"recipes/published/{name}.yaml")[0].resolve(64)
        network = network_of(run)
        base = plan_of(run).but(
            dp=8, tp=8, pp=1, sp=1, ep=8, etp=1, engine="zero1", stage_layers=None, chunks=1, microbatch=8, microbatches=1
        )
        grid, line = (step_time(network, base.but(tensor=kind, schedule="1f1b"), cluster).step for kind in ("3d", "sliced"))
        ratios.append(grid / line)
    return f"{min(ratios):.2f} to {max(ratios):.2f}"
