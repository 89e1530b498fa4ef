"""Written rules for values that a row of a measured table does not state, and for the meaning of its free text.

    network    heads of 128 channels; hidden size 4 widths (a gated network must state it); GPT-2's vocabulary; missing layers, or a missing
               vocabulary, from the number of parameters; properties of published models by name (gate, latent attention, tied embedding)
    plan       cp 1; dp from the number of GPUs; micro-batches of one sequence with pipeline stages, else of a replica's whole batch, at
               most 8
    software   by words in source, model and notes: its memory model and its bytes per parameter

A rule that fills a gap adds the gap's name to `inferred`. A row with a gap without a rule is not usable, with the reason.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from typing import Any

from moe.plan.job.network import Experts, Latent, Network, Plan
from moe.plan.job.states import FP32, MIXED, MIXED_FP32_GRADIENTS, Storage
from moe.plan.memory.stack import Stack
from tests.planner import software as stacks

GATED_NAMES = ("llama", "mixtral", "mistral", "qwen", "deepseek", "gemma", "yi-", "glm", "kimi", "nemotron-h")
GPT2_VOCAB = 51200  # 50,257 padded to a multiple of 1,024, as Megatron-LM's scripts do
HEAD_SIZE = 128
DEEPSEEK_LATENT = {  # from the published configurations: ranks of queries and keys, rotary channels, channels of values
    "lite": Latent(0, 512, 64, 128),
    "v2": Latent(1536, 512, 64, 128),
    "v3": Latent(1536, 512, 64, 128),
    "kimi": Latent(1536, 512, 64, 128),
}
SHARED_EXPERTS = {"lite": 2, "v2": 2, "v3": 1, "kimi": 1}
PEAK_TFLOPS = {  # dense 16-bit TFLOP/s from the data sheets
    **{"b300": 2500, "gb300": 2500, "gb200": 2500, "b200": 2250, "h200": 989.4, "h800": 989.4, "h100": 989.4, "gh200": 989.4},
    **{"a800": 312, "a100": 312, "v100": 125, "p100": 21.2, "rtx3090": 71},
}


class NotUsable(Exception):
    """Raised with the reason why a row cannot be used, in words."""


@dataclass
class Cells:
    """One line of a table: column -> text. inferred: columns that rules filled."""

    values: dict[str, str]
    inferred: list[str] = field(default_factory=list)

    def text(self, name: str) -> str:
        return (self.values.get(name) or "").strip()

    def number(self, name: str) -> float | None:
        """Return the cell's number; `250k` is 250,000. None for an empty cell or words. Raises NotUsable below 0 and for infinity."""
        found = re.fullmatch(r"(-?\d*\.?\d+(?:e[+-]?\d+)?|\d+\.)\s*([kK]?)", self.text(name).replace(",", ""))
        value = float(found[1]) * (1000 if found[2] else 1) if found else None
        if value is not None and not 0 <= value < math.inf:
            raise NotUsable(f"{name} is {self.text(name)}")
        return value

    def count(self, name: str) -> int | None:
        value = self.number(name)
        return None if value is None else round(value)

    def infer(self, name: str, value: int) -> int:
        """Return the cell's number; without one, `value`, and add the column to `inferred`."""
        stated = self.count(name)
        if stated is None:
            self.inferred.append(name)
        return value if stated is None else stated


def network_of(cells: Cells) -> Network:
    """Return the model's sizes in a row. Raises NotUsable if a size is neither stated nor given by a rule."""
    name, sparse = cells.text("model").lower(), bool(cells.count("experts"))
    if cells.text("family") not in ("dense", "moe", ""):
        raise NotUsable(f"family {cells.text('family')}: no Transformer")
    if not cells.count("hidden") or not cells.count("seq"):
        raise NotUsable("width or length not stated")
    if cells.text("family") == "moe" and not (sparse and cells.count("topk") and cells.count("moe_ffn")):
        raise NotUsable("experts, topk or moe_ffn not stated")
    width, gated = cells.count("hidden") or 0, any(word in name for word in GATED_NAMES)
    if gated and not cells.count("ffn") and not sparse:
        raise NotUsable("the gated network's hidden size is not stated")
    hidden = cells.count("ffn") or (cells.count("moe_ffn") if gated else cells.infer("ffn", 4 * width)) or 4 * width
    heads = cells.infer("heads", max(1, width // HEAD_SIZE))
    if not heads:
        raise NotUsable("heads is 0")
    family = next((key for key in ("lite", "v2", "v3", "kimi") if key in name), None) if "deepseek" in name or "kimi" in name else None
    network = Network(
        layers=1,
        width=width,
        heads=heads,
        hidden=hidden,
        vocab=0,
        length=cells.count("seq") or 0,
        kv_heads=1 if "falcon" in name and not cells.count("kv_heads") else cells.count("kv_heads"),
        head_size=_head_size(name, family),
        gated=gated,
        tied=not gated and "untied" not in cells.text("notes"),
        biases=not gated and "mpt" not in name and "falcon" not in name,
        norm="rmsnorm" if gated else "layernorm",
        learned_positions=not gated and not any(word in name for word in ("mpt", "bloom", "falcon")),
        dropout=not gated and "dropout 0" not in cells.text("notes") and not any(word in name for word in ("mpt", "falcon")),
        experts=_experts(cells, gated=gated, shared=SHARED_EXPERTS.get(family or "", 0)) if sparse else None,
        latent=DEEPSEEK_LATENT.get(family or ""),
    )
    return _sized(cells, network)


def _head_size(name: str, family: str | None) -> int | None:
    return 128 if family or "qwen3" in name else None


def _experts(cells: Cells, *, gated: bool, shared: int) -> Experts:
    hidden = cells.count("moe_ffn") or 0
    capacity = re.search(r"capacity (?:factor )?([\d.]+)", cells.text("notes"))
    factor = float(capacity[1]) if capacity else None
    return Experts(cells.count("experts") or 0, cells.count("topk") or 1, hidden, gated, shared * hidden, factor)


def _sized(cells: Cells, network: Network) -> Network:
    """Return the network with its number of layers and its vocabulary, as stated or from the number of parameters."""
    stated, layers, vocab = cells.number("params_b"), cells.count("layers"), cells.count("vocab")
    if layers is None and (stated is None or network.experts):
        raise NotUsable("layers not stated")
    if vocab is None:
        cells.inferred.append("vocab")
        rest = stated * 1e9 - layers * layer_parameters(network) if stated and layers and not network.experts else 0
        near = rest / network.width  # vocabulary if all remaining parameters are the embedding; taken if plausible
        vocab = round(near) if 30000 <= near <= 300000 else GPT2_VOCAB
    if layers is None:
        cells.inferred.append("layers")
        every = max(1, (cells.count("pp") or 1) * (cells.count("vpp") or 1))
        layers = every * max(1, round(((stated or 0) * 1e9 - vocab * network.width) / layer_parameters(network) / every))
    sparse = tuple(range(_dense_first(cells, layers), layers, _sparse_every(cells))) if network.experts else ()
    network = replace(network, layers=layers, vocab=vocab, sparse_layers=sparse)
    if stated and not network.experts:
        least = (
            layers * layer_parameters(network) / 1e9
        )  # at least this many parameters in 10^9: a source counts none, one or two vocabulary tables in addition
        if not 0.85 * least <= stated <= 1.15 * (least + 2 * vocab * network.width / 1e9):
            raise NotUsable(f"layers and width make {least:.3g}B parameters, {stated:g}B are stated")
    return network


def layer_parameters(network: Network) -> float:
    """Return the number of elements in a dense layer's matrices."""
    inner, keys = network.heads * network.channels, network.groups * network.channels
    return network.width * (2 * inner + 2 * keys + (3 if network.gated else 2) * network.hidden)


def _dense_first(cells: Cells, layers: int) -> int:
    found = re.search(r"(\d+)\s*dense|dense[_ ]layers?\s*[=:]?\s*(\d+)", f"{cells.text('model')} {cells.text('notes')}".lower())
    if found:
        return min(layers, int(found[1] or found[2]))
    name = cells.text("model").lower()
    return min(layers, 3 if "deepseek" in name and "v3" in name else 1 if "deepseek" in name or "kimi" in name else 0)


def _sparse_every(cells: Cells) -> int:
    return 2 if "every other" in cells.text("notes").lower() else 1


def software_of(cells: Cells) -> Stack:
    """Return the memory model of the software that the row's text names. With selective recomputation it keeps no part that the text
    names."""
    said = " ".join(cells.text(name) for name in ("source", "source_ref", "seen", "model", "notes")).lower()
    by_word = {
        "torchtitan": stacks.TORCHTITAN,
        "nanotron": stacks.NANOTRON,
        "llm-foundry": stacks.FSDP,
        "llm_foundry": stacks.FSDP,
        "megatron-deepspeed": stacks.MEGATRON_DEEPSPEED,
        "megatron": stacks.MEGATRON,
        "deepspeed": stacks.DEEPSPEED,
    }
    chosen = next((stack for word, stack in by_word.items() if word in said), stacks.MEGATRON)
    if chosen is stacks.MEGATRON and cells.text("zero") == "3":
        return stacks.DEEPSPEED  # Megatron-LM had no ZeRO-3, so such a row of its papers is DeepSpeed's
    if "flash attention" in said or "flashattention" in said:
        return replace(chosen, core="fused", lse=4, selective=_selective(cells.text("recompute").lower(), chosen))
    before_flash = ("sc21", "korthikanti", "vtrain", "bigscience", "mt-nlg", "readme 2020", "readme jan 2021", "alpa", "aceso", "no flash")
    if chosen is stacks.MEGATRON and any(word in said for word in before_flash):
        chosen = stacks.MEGATRON_2022
    return replace(chosen, selective=_selective(cells.text("recompute").lower(), chosen))


def _selective(said: str, stack: Stack) -> Any:
    """Return the recomputed parts that the text names by Megatron-Core's modules: norm, act, mlp, moe, shared_expert, core attention."""
    words = {"norm": "norm_outputs", "layernorm": "norm_outputs", "act": "activation", "moe": "experts", "mlp": "network", "core": "core"}
    said = re.sub(r"mlp[-_ ]act|moe[-_ ]act", "act", said)
    parts = [part for word in re.findall(r"[a-z]+", said) for key, part in words.items() if word.startswith(key)]
    named = dict.fromkeys(parts + (["activation"] if "network" in parts else []), 0.0)
    return tuple(named.items()) if named and stack.name.startswith("megatron") else stack.selective


def storage_of(cells: Cells, stack: Stack) -> Storage:
    """Return the bytes of a parameter's states. FSDP: fp32 shards. Otherwise gradients are in fp32 with bf16, in 16 bits with fp16."""
    precision, said = cells.text("precision").lower(), cells.text("notes").lower()
    if stack.name in ("torchtitan", "fsdp") or cells.text("zero").lower() == "fsdp" and stack.name != "megatron" or "fp32" in precision:
        return FP32
    if stack.name == "deepspeed":
        return MIXED
    if stack.name == "megatron-deepspeed" and "bf16" in precision:
        # at first BLOOM's software summed gradients in 16 bits: one layout took 44 GB on 02-27 and 67 GB on 02-28
        return MIXED if re.search(r"note 02-2[0-7]", said) else stacks.MIXED_BOTH_GRADIENTS
    return MIXED if "fp16 grads" in said or precision.startswith("fp16") else MIXED_FP32_GRADIENTS


SCHEDULES = {"1f1b": "1f1b", "interleaved": "interleaved", "gpipe": "gpipe", "zb": "zb_h1", "zbv": "zb_v", "dualpipe": "dualpipe_v"}
WITH_SEQUENCE_PARALLEL = ("megatron", "torchtitan", "nanotron")  # software with sequence parallelism whenever it uses tp


def plan_of(cells: Cells, network: Network, stack: Stack) -> Plan:
    """Return the plan of a row. Raises NotUsable if the row does not state its layout."""
    dp, tp, pp, cp = _degrees(cells)
    moe = network.experts is not None
    microbatch, microbatches = _batch(cells, dp=dp, pp=pp)
    chunks, schedule = _schedule(cells, pp)
    return Plan(
        dp=dp,
        tp=tp,
        sp=cp,
        pp=pp,
        ep=_experts_over(cells, dp * tp * cp) if moe else 1,
        engine=_engine(cells, stack),
        tensor="sliced" if tp > 1 and _sliced(cells, stack) else "1d",
        sequence="ulysses" if "ulysses" in cells.text("notes").lower() else "ring",
        schedule=schedule,
        chunks=chunks,
        microbatch=microbatch,
        microbatches=microbatches,
        recompute=_recompute(cells),
        compute_bytes=4 if "fp32" in cells.text("precision") else 2,
        storage=storage_of(cells, stack),
        **_offload(cells.text("offload").lower()),
    )


def _degrees(cells: Cells) -> tuple[int, int, int, int]:
    gpus, cp = cells.count("gpus"), cells.count("cp") or 1
    if gpus is None:
        raise NotUsable("number of GPUs not stated")
    stated = [name for name in ("tp", "pp", "dp") if cells.count(name) is not None]
    alone = cells.text("zero") or "data_parallel" in cells.text("schedule")
    if not stated and gpus > 1 and not alone:
        raise NotUsable("layout not stated")
    if "dp" in stated and len(stated) < 3 and gpus != cells.count("dp"):
        missing = [name for name in ("tp", "pp") if name not in stated]
        if len(missing) == 2 or gpus % (cells.count("dp") or 1):
            raise NotUsable("layout not stated")
    tp, pp = cells.count("tp") or 1, cells.count("pp") or 1
    if gpus % (tp * pp * cp):
        raise NotUsable(f"tp {tp} x pp {pp} x cp {cp} do not divide {gpus} GPUs")
    dp = cells.infer("dp", gpus // (tp * pp * cp))
    if dp * tp * pp * cp != gpus:
        raise NotUsable(f"dp {dp} x tp {tp} x pp {pp} x cp {cp} are not {gpus} GPUs")
    return dp, tp, pp, cp


def _experts_over(cells: Cells, within: int) -> int:
    ep = cells.count("ep") or 1
    if within % ep:
        raise NotUsable(f"ep {ep} does not divide dp x tp x cp, {within}")
    return ep


def _batch(cells: Cells, *, dp: int, pp: int) -> tuple[int, int]:
    stated, whole = cells.count("microbatch"), cells.count("global_batch")
    if stated is None:
        cells.inferred.append("microbatch")
    if whole is None:
        cells.inferred.append("global_batch")
        return stated or 1, 2 * pp if pp > 1 else 1  # without a stated number, twice as many micro-batches as stages
    share = max(1, -(-whole // dp))
    if stated is None and pp > 1 and "torchtitan" in cells.text("source"):
        stated = max(1, share // pp)  # the default: as many micro-batches as stages
    own = stated or (1 if pp > 1 else next(size for size in (8, 4, 2, 1) if share % size == 0))
    return own, max(1, -(-share // own))


def _schedule(cells: Cells, pp: int) -> tuple[int, str]:
    """Return (chunks of a rank, name of the schedule). Raises NotUsable for a schedule that this project does not have."""
    said, chunks = cells.text("schedule").lower(), cells.count("vpp") or 1
    unknown = re.search(r"\((?!baseline)([\w-]+)\)|heterogen|searched|parax\.(?:auto|heuristic|inter|intra|equal|ppdp)|grid", said)
    if unknown and pp > 1 or "heterogen" in said:
        raise NotUsable(f"stages of {cells.text('schedule')} are not stated")
    if pp == 1:
        return 1, "1f1b"
    if chunks > 1 or "interleaved" in said:
        return cells.infer("vpp", 2) if chunks == 1 and "interleaved" in said and not cells.count("vpp") else max(2, chunks), "interleaved"
    return 1, next((name for word, name in SCHEDULES.items() if said.startswith(word)), "1f1b")


def _engine(cells: Cells, stack: Stack) -> Any:
    zero = cells.text("zero").lower()
    if zero == "fsdp" or stack.name in ("torchtitan", "fsdp") and zero in ("3", ""):
        return "fsdp"
    if not zero and stack.name == "megatron":  # Megatron-Core's recipes have the distributed optimizer
        cells.inferred.append("zero")
        return "zero1"
    return {"1": "zero1", "2": "zero2", "3": "zero3"}.get(zero, "ddp")


def _sliced(cells: Cells, stack: Stack) -> bool:
    said = f"{cells.text('recompute')} {cells.text('notes')} {cells.text('schedule')}".lower()
    if "no sp" in said:
        return False
    return bool(re.search(r"\bsp\b|sequence parallel", said)) or stack.name in WITH_SEQUENCE_PARALLEL


def _recompute(cells: Cells) -> Any:
    said = cells.text("recompute").lower()
    if said.startswith("full"):
        return "full"
    return "none" if not said or said.startswith("none") else "selective"


def _offload(said: str) -> dict[str, Any]:
    return {
        "offload_optimizer": "cpu" if "optim" in said else "none",
        "offload_parameters": "cpu" if "param" in said else "none",
        "offload_activations": _share(said),
    }


def _share(said: str) -> float:
    """Return the fraction of activations that is offloaded: a number in the text; `50 %` is 0.5."""
    found = re.search(r"([\d.]+)\s*(%?)", said)
    value = float(found[1]) / (100 if found[2] else 1) if found and found[1].strip(".") else 0.0
    return value if 0 <= value <= 1 else 0.0


def peak_tflops(gpu: str) -> float | None:
    """Return the dense 16-bit TFLOP/s of the GPU that the text names, from the data sheet; longer names are tried first."""
    return next((PEAK_TFLOPS[key] for key in sorted(PEAK_TFLOPS, key=len, reverse=True) if key in gpu.lower()), None)
