"""The cases of `moe verify`: tiny models, and the layouts in which each must give the same numbers. Needs no torch.

    --kinds data     dense and sparse models  x  {ddp, fsdp, zero1..3, offload}  x  ep  x  micro-batches  x  precision  (+ recompute)
    --kinds expert   every router  x  every dispatcher  x  (ep, edp, etp)  x  micro-batches  x  recompute, in fp32
    --kinds tensor   tensor parallelism  x  models  x  engines  x  (tp, dp, pp, ep, etp)  x  precision, recompute, tiles
    --kinds sequence every method of sequence parallelism  x  models and routers  x  engines  x  precision  x  recompute
    --kinds pipeline every schedule  x  (pp, dp, ep)  x  dense and sparse models  x  precision  x  recompute  (+ zero1, fsdp)

moe/verify/kinds.py lists these kinds, and `--kinds hybrid`, which moe/verify/hybrid.py combines from the values of this file.

All sizes differ, so that swapped dims fail. Some presets count over the tokens of a rank (capacity group `rank`, balance over a
micro-batch), which depends on the layout by definition. The models here count over a sequence instead.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import cycle
from typing import Any

from moe.experts.dispatch.catalog import PLAIN, examples, rows_for
from moe.recipe.load import build_run
from moe.recipe.sections import Run
from moe.router.methods.catalog import METHODS
from moe.verify.small import LINEAR, small
from parallel.data.kinds.catalog import ENGINES, planned
from parallel.data.kinds.kind import EngineKind
from parallel.mesh.mesh import divisors
from parallel.pipeline.schedules.catalog import SCHEDULES
from parallel.pipeline.schedules.kind import DEFAULT_CHUNKS, Size
from parallel.sequence.kinds.catalog import SEQUENCES

BATCH, LENGTH, EXPERTS = 12, 10, 8
SLICED = 24  # sequence length of sequence-parallel cases; divisible by 2 * sp for sp 2, 3 and 4
OVERFLOWS = 1  # step at which a gradient is made infinite in cases with `overflow`

MODELS: dict[str, dict[str, Any]] = {
    "dense": {"model": {"moe_every": 0}},
    "switch": {"router": {"preset": "switch", "capacity_factor": 1.0, "min_capacity": 2, "jitter": 0.1, "z_weight": 0.001}},
    "gshard": {
        "router": {"preset": "gshard", "group": 1, "capacity_factor": 1.25, "min_capacity": 2},
        "experts": {"shared": 1, "dropout": 0.2, "ffn": "gelu"},
        "model": {"positions": "t5", "norm": "layernorm", "tied_embeddings": True, "dropout": 0.1},
    },
    "deepseek": {
        "router": {
            "preset": "deepseek_v3", "num_choices": 2, "expert_groups": 4, "top_groups": 3, "bias_rate": 0.02, "capacity_factor": 1.25,
            "balance_weight": 0.05, "balance_scope": "global_batch", "importance_weight": 0.02,
        },
        "experts": {"shared": 1},
    },
}  # fmt: skip

_BY_SEQUENCE = {"group": "sequence", "balance_scope": "sequence", "min_capacity": 1}
ROUTERS: dict[str, dict[str, Any]] = {
    "switch_mtf": {"router": {"preset": "switch_mtf", "min_capacity": 1}},
    "glam": {"router": {"preset": "glam", "min_capacity": 1, "z_weight": 0.01}, "experts": {"ffn": "gelu", "dropout": 0.3}},
    "mixtral": {"router": {"preset": "mixtral", "group": "sequence", "balance_scope": "sequence"}, "experts": {"residual": True}},
    "qwen3_moe": {"router": {"preset": "qwen3_moe", "num_choices": 3}, "experts": {"shared": 1, "shared_gate": True}},
    "deepspeed": {"router": {"preset": "deepspeed"} | _BY_SEQUENCE, "experts": {"ffn": "relu"}},
    "megatron": {"router": {"preset": "megatron", "capacity_factor": 1.0, "allow_noncausal": True} | _BY_SEQUENCE},
    **{name: {"router": dict(method.example)} for name, method in METHODS.items() if method.example},
    "noisy_top_k": {"router": {"preset": "glam", "noise": "noisy_top_k", "importance_weight": 0.01, "capacity_factor": None}},
    "gumbel": {"router": {"preset": "switch", "noise": "gumbel", "drop": "random", "min_capacity": 1, "allow_noncausal": True}},
}
PACKED: dict[str, dict[str, Any]] = {  # attention within documents; one in 16 tokens is id 0, one in 39 is id 1
    "packed": {"model": {"document_mask": True}, "router": {"preset": "glam", "min_capacity": 1}},
    "packed_t5": {"model": {"document_mask": True, "document_separator": 1, "positions": "t5", "moe_every": 0}},
}
# encoder-decoders; four layers give each half one layer with experts and one without
HALVES: dict[str, dict[str, Any]] = {
    "t5": {
        "model": {"kind": "encoder_decoder", "num_layers": 4, "positions": "t5", "tied_embeddings": True, "dropout": 0.1, "ffn": "geglu"},
        "router": {"preset": "switch", "capacity_factor": 1.0, "min_capacity": 1, "jitter": 0.1, "z_weight": 0.001},
        "data": {"objective": "span_corruption"},
    },
    "t5_untied": {
        "model": {"kind": "encoder_decoder", "num_layers": 3, "encoder_layers": 1, "positions": "t5", "ffn": "relu", "moe_every": 1},
        "router": {"preset": "gshard", "group": 1, "capacity_factor": 1.25, "min_capacity": 1, "balance_scope": "global_batch"},
        "experts": {"shared": 1, "dropout": 0.2, "ffn": "gelu"},
        "data": {"objective": "span_corruption"},
    },
}
# models that each combine several options of published models
_LINEAR = {"optimizer": LINEAR}
OPTIONS: dict[str, dict[str, Any]] = {
    "gpt_oss": _LINEAR
    | {
        "model": {
            "sliding_window": 4, "sliding_layers": [0], "attention_sinks": True, "out_bias": True, "qkv_bias": True, "clip_qkv": 0.9,
            "rope": {"fraction": 2 / 3, "base": 300.0}, "swiglu": {"alpha": 1.702, "limit": 0.4, "offset": 1.0},
        },
        "router": {"preset": "gpt_oss", "num_choices": 3, "balance_scope": "sequence"},
        "experts": {"biases": True},
    },
    "latent": {
        "model": {
            "num_kv_heads": None, "latent": {"key_rank": 10, "query_rank": 14, "rotary_size": 4, "value_size": 5}, "sliding_window": 5,
            "rope": {"pairs": "neighbours", "scaling": "yarn", "factor": 3.0, "trained_length": 40, "mscale": 0.8, "mscale_all": 1.2},
        },
        "router": {
            "preset": "deepseek_v2", "num_choices": 2, "expert_groups": 4, "top_groups": 2, "capacity_factor": 1.25, "min_capacity": 1,
        },
        "experts": {"shared": 1},
    },
    "free": {
        "router": {
            "preset": "llama4", "num_choices": 3, "noise": "noisy_top_k", "load_weight": 0.2, "logit_cap": 0.5, "score": "softmax",
            "balance_scope": "sequence",
        },
        "experts": {"skip": 2, "zero": 1},
        "model": {"scales": {"embedding": 1.3, "residual": 0.7, "attention": 0.3, "head": 1.6}, "qk_norm": "heads"},
    },
    "mixer": {
        "router": {
            "preset": "switch", "select": "sparsemixer", "num_choices": 2, "mixer_margin": 0.45, "input_norm": "rmsnorm",
            "expert_scale": "learned", "capacity_factor": 1.0, "min_capacity": 1, "balance_counts": "unbiased",
        },
        "model": {"rope": {"fraction": 1 / 3, "pairs": "neighbours"}, "clip_qkv": 0.7},
    },
}  # fmt: skip
AHEAD: dict[str, dict[str, Any]] = {  # multi-token prediction of two further tokens, with latent attention without a query latent
    "ahead": {
        "model": {"ahead": 2, "num_kv_heads": None, "latent": {"key_rank": 10, "rotary_size": 4, "value_size": 5}, "dropout": 0.1},
        "router": {"preset": "switch", "capacity_factor": 1.0, "min_capacity": 1},
    },
}
FEW: dict[str, dict[str, Any]] = {"one_head": {"model": {"num_kv_heads": 1}, "router": {"preset": "glam", "min_capacity": 1}}}
FORMS: dict[str, dict[str, Any]] = {  # further values of Case.tensor, in addition to the kinds of tensor.kind
    "sliced": {"kind": "1d", "sequence_parallel": True},
    "overlapped": {"kind": "1d", "overlap_chunks": 3},
    "overlapped_sliced": {"kind": "1d", "sequence_parallel": True, "overlap_chunks": 3},
    "dtensor_sliced": {"kind": "dtensor", "sequence_parallel": True},
}
LINES = ("1d", "dtensor", *FORMS)


def attentions() -> dict[str, dict[str, Any]]:
    """Return the ways to attend over ranks, by the name in a case, as values of section `sequence`."""
    found = {form: {"kind": name, **keys} for name, kind in SEQUENCES.items() for form, keys in (kind.tried or {name: {}}).items()}
    return found | {"heads2": {"kind": "ring", "heads": 2}}


@dataclass(frozen=True)
class Case:
    """One layout of one model. `kind`: data parallelism, see `sharding_of`; `rows`: the dispatcher, a key of `examples`."""

    model: str
    kind: str
    world: int
    ep: int
    microbatches: int
    precision: str
    recompute: str = "none"
    etp: int = 1
    rows: str = PLAIN
    experts: int = 4
    tiles: int = 1  # tiles of feed-forward networks and experts
    head_tiles: int = 1  # tiles of the vocabulary
    chunks: int = 1  # chunks of the loss
    replicas: int = 2  # replicas of kind dp
    pp: int = 1
    schedule: str = "1f1b"
    layers: int = 2
    stages: tuple[int, ...] | None = None  # number of layers of each stage; None: cut by FLOPs
    padded: bool = False  # sequences end early (moe/verify/plain/batches.py)
    overflow: bool = False  # one rank's gradient is infinite at step OVERFLOWS
    tp: int = 1  # tensor-parallel ranks, which have the same tokens
    tensor: str = "copied"  # how these ranks share weights: tensor.kind, or a key of FORMS
    parts: int = 1  # on one process: sum within layers as this number of tp ranks does (moe/verify/in_parts.py)
    first_part: int = 0  # rank of tp whose partial result comes first in these sums; a ring all-reduce starts each piece at another rank
    blocks: int = 1  # on one process: products in blocks x blocks blocks, as a grid of tp has them (moe/verify/in_blocks.py)
    sp: int = 1  # sequence-parallel ranks, which hold slices of the same sequences
    attention: str = "zigzag"  # method of sequence parallelism, a key of `attentions`
    slices: int = 0  # on one process: attention slice by slice, then merged (moe/verify/in_slices.py); 0: torch's own attention
    length: int = LENGTH  # tokens of a sequence
    batch: int = BATCH  # sequences of a step
    recipe: str | None = None  # path of a user's recipe, whose choices are used at a small size (moe/verify/small.py)

    @property
    def layout(self) -> str:
        parts = [f"{self.schedule} pp{self.pp}" if self.pp > 1 else ""]
        parts += ["layers" + "-".join(map(str, self.stages)) if self.stages else ""]
        parts += [f"{self.model} dp{self.dp}", f"tp{self.tp}-{self.tensor}" if self.tp > 1 else "", f"ep{self.ep}"]
        parts += [f"sp{self.sp} {self.attention}" if self.sp > 1 else ""]
        parts += [f"etp{self.etp}" if self.etp > 1 else "", f"m{self.microbatches}"]
        parts += [self.rows if self.rows != PLAIN else "", self.recompute if self.recompute != "none" else ""]
        parts += [f"tiles{self.tiles}/{self.head_tiles}" if self.tiles * self.head_tiles > 1 else ""]
        parts += [f"chunks{self.chunks}" if self.chunks > 1 else ""]
        parts += [f"replicas{self.replicas}" if self.engine.threads else ""]
        parts += ["padded" if self.padded else "", "overflow" if self.overflow else ""]
        return " ".join(part for part in parts if part)

    @property
    def in_full(self) -> str:
        """Every field that differs from its default, as text. Unique for each case, unlike `layout`, which leaves fields out."""
        values = ((field.name, getattr(self, field.name), field.default) for field in fields(self))
        return " ".join(f"{name}={value}" for name, value, default in values if value != default)

    @property
    def engine(self) -> EngineKind:
        """The facts about its engine."""
        return ENGINES[self.kind.partition("+")[0]]

    @property
    def dp(self) -> int:
        return self.world // (self.pp * self.tp * self.sp)

    def run(self) -> Run:
        """The recipe of the case: one layer with experts and one without, unless the model says otherwise."""
        values: dict[str, dict[str, Any]] = {
            "model": {
                "num_layers": self.layers, "d_model": 24, "num_heads": 4, "num_kv_heads": 2, "d_ff": 20, "ffn": "swiglu",
                "max_length": self.length, "moe_every": 2, "init_scale": 0.5, "tied_embeddings": False,
            },
            "experts": {"num_experts": self.experts, "kernels": "cpu"},
            "degrees": {"dp": self.dp, "pp": self.pp, "tp": self.tp, "sp": self.sp, "ep": self.ep, "etp": self.etp},
            "sequence": self._sequence() if self.sp > 1 else {},
            "tensor": FORMS.get(self.tensor, {"kind": self.tensor}),
            "dispatch": examples()[self.rows] if self.ep > 1 else {},
            "sharding": sharding_of(self.kind) | {"replicas": self.replicas, "allow_slow": self.pp > 1},
            "pipeline": {"microbatches": self.microbatches, "schedule": self.schedule, "layers": self.stages},
            "tiling": {"ffn": self.tiles, "head": self.head_tiles},
            "recompute": {"kind": self.recompute, "loss_chunks": self.chunks},
            "precision": {"compute": self.precision, "loss_scale": 1024.0 if self.precision == "fp16" else "none"},
            "optimizer": {"lr": 0.003, "eps": 1e-5, "clip_norm": 0.5},
            "train": {"global_batch": self.batch, "eval_sequences": self.batch, "seed": 7},
        }  # fmt: skip
        known = MODELS | ROUTERS | PACKED | FEW | HALVES | OPTIONS | AHEAD
        changes = known[self.model] if self.recipe is None else small(self.recipe, ep=self.ep)
        for section, changed in changes.items():
            values[section] = values.get(section, {}) | changed
        if self.delayed:
            values["optimizer"]["clip_norm"], values["model"]["tied_embeddings"] = None, False
            values["router"] = values.get("router", {}) | {"balance_scope": "sequence"}
        return build_run(values)

    def _sequence(self) -> dict[str, Any]:
        """The recipe's section `sequence`. LightSeq keeps attention's output if recompute is full."""
        return attentions()[self.attention] | {"keep_attention": self.attention == "lightseq" and self.recompute == "full"}

    @property
    def delayed(self) -> bool:
        """Whether gradients are taken at older weights than they update (PipeDream, 2BW). The twin then does the same. Such a case cannot
        use options that need the whole batch.
        """
        return SCHEDULES[self.schedule].continuous


def sharding_of(kind: str) -> dict[str, Any]:
    """The recipe's section `sharding` for Case.kind. zero2: ZeRO stage 2; zero2+cpu: also optimizer states on the host; zero3+cpu-all: also
    parameters on the host; other kinds are values of sharding.kind.
    """
    name, _, place = kind.partition("+")
    where, _, everything = place.partition("-")
    offload = {"optimizer": where, "parameters": where if everything else "none"}
    return {**ENGINES[name].sharding, **({"offload": offload} if place else {})}


def all_data_cases(nproc: int) -> list[Case]:
    """All cases of `--kinds data`."""
    found = data_cases(nproc) + sharded_cases(nproc) + tiled_cases(nproc)
    return found + replica_cases() + batch_cases(nproc) + copied_cases(nproc) + halves_cases(nproc) + options_cases(nproc)


def data_cases(nproc: int) -> list[Case]:
    """DDP and ZeRO stage 1. Recompute is tested only with DDP in fp32, because it does not depend on engine and precision."""
    return [
        Case(model, kind, world, ep, microbatches, precision, recompute)
        for world in range(1, nproc + 1)
        if BATCH % world == 0
        for kind in (name for name in planned() if ENGINES[name].stage < 2)
        for precision in ("fp32", "bf16", "fp16")
        for model in MODELS
        for ep in (divisors(world) if model != "dense" else [1])
        if 4 % ep == 0
        for microbatches in (1, 3)
        if BATCH % (world * microbatches) == 0
        for recompute in ("none", "full" if microbatches == 1 else "selective")
        if recompute == "none" or (kind, precision) == ("ddp", "fp32")
    ]


def sharded_cases(nproc: int) -> list[Case]:
    """Engines that shard gradients, and offload, on at least two ranks. Recompute is tested too, because its second forward pass gathers
    parameters again.
    """
    sharding = [name for name in planned() if ENGINES[name].stage >= 2]
    return [
        Case(model, kind, world, ep, microbatches, precision, recompute)
        for world in range(2, nproc + 1)
        if BATCH % world == 0
        for kind in (*sharding, *on_host())
        for precision in ("fp32", "bf16", "fp16")
        for model in ("dense", "gshard", "deepseek")
        for ep in (divisors(world) if model != "dense" else [1])
        if 4 % ep == 0
        for microbatches in (1, 3)
        if BATCH % (world * microbatches) == 0
        for recompute in ("none", "full" if microbatches == 1 else "selective")
        if recompute == "none" or (precision == "fp32" and kind in sharding and ENGINES[kind].stage == 3)
    ]


def on_host() -> list[str]:
    """Return engines with all states on the host that they can keep there, in the words of `sharding_of`."""
    return [f"{name}+cpu{'-all' if ('parameters', 'cpu') in kind.offloads else ''}" for name, kind in ENGINES.items() if kind.offloads]


def tiled_cases(nproc: int) -> list[Case]:
    """Tiles and chunks that divide nothing evenly, with each engine and with split experts.

    In 16 bits only the head and the loss are tiled. Tiles of a network round its partial results, and no reordering that `moe verify`
    measures does that (tests/parallel/data/test_tiling.py compares them with the exact result).
    """
    return [
        Case(
            model,
            kind,
            world,
            ep,
            microbatches,
            precision,
            recompute,
            etp,
            tiles=5 if precision == "fp32" else 1,
            head_tiles=3,
            chunks=chunks,
        )
        for world in range(1, nproc + 1)
        if BATCH % world == 0
        for kind, precision in (("ddp", "fp32"), ("ddp", "bf16"), ("fsdp", "fp32"), ("fsdp", "bf16"), ("zero1", "fp32"))
        for model in ("dense", "gshard", "deepseek")
        for ep, etp in [(world, 1), *([(1, 2)] if world % 2 == 0 and (kind, precision) == ("ddp", "fp32") else [])]
        if model != "dense" or (ep, etp) == (world, 1)
        for ep in [ep if model != "dense" else 1]
        if 4 % ep == 0
        for microbatches, recompute, chunks in ((1, "none", 7), (3, "selective", 1))
        if BATCH % (world * microbatches) == 0
        if recompute == "none" or (kind, precision) == ("ddp", "fp32")
    ]


def replica_cases() -> list[Case]:
    """Threaded data parallelism (kind dp), which is one process for every nproc."""
    return [
        Case(model, "dp", 1, 1, microbatches, precision, "full" if model == "deepseek" else "none", replicas=2)
        for model in ("dense", "gshard", "deepseek")
        for microbatches in (1, 3)
        for precision in ("fp32", "bf16", "fp16")
    ]


def batch_cases(nproc: int) -> list[Case]:
    """Batches in which ranks and micro-batches have different numbers of tokens, and a step that is skipped because one rank's gradient
    overflows. Only in fp32, because counting and skipping do not depend on the precision.
    """
    return [
        Case(model, kind, world, ep, microbatches, "fp32", padded=padded, overflow=not padded)
        for world in range(1, nproc + 1)
        if BATCH % world == 0
        for kind in ("ddp", "fsdp", "zero1")
        if world > 1 or kind == "ddp"
        for padded, microbatches in ((True, 3), (False, 1))
        if (padded or kind != "fsdp") and BATCH % (world * microbatches) == 0
        for model in ("dense", "gshard", "deepseek")
        for ep in (dict.fromkeys((1, world)) if model != "dense" else [1])
        if 4 % ep == 0
    ]


def copied_cases(nproc: int) -> list[Case]:
    """Weights that tp ranks hold as copies (tensor.kind copied). Sums, counts or shards over too many or too few ranks fail here.

    Pipelines are tested with DDP, and from 8 processes on also with engines that shard over replicas of stages.
    """
    found = []
    for world, tp in ((2, 2), (4, 2), (4, 4)):
        for kind in planned() if world <= nproc else ():
            found += [Case("dense", kind, world, 1, 3, "fp32", tp=tp)] if tp == 2 else []
            found += [Case("gshard", kind, world, ep, 1, "fp32", tp=tp) for ep in divisors(world)[1:]]
            found += [Case("deepseek", kind, world, 1, 3 if tp == 2 else 1, "fp32", tp=tp)]
    found += [Case("gshard", kind, 2, 2, 1, "bf16", "selective", tp=2) for kind in ("ddp", "fsdp", "zero2", "zero3") if nproc >= 2]
    found += [Case("deepseek", kind, 2, 2, 1, "fp32", tp=2, padded=True) for kind in ("ddp", "fsdp", "zero1") if nproc >= 2]
    staged = [(4, "ddp"), (8, "ddp"), (8, "zero1"), (8, "fsdp")]
    for world, kind in [(world, kind) for world, kind in staged if world <= nproc]:
        for model in ("dense", "gshard"):
            ep = 1 if model == "dense" else 2
            found += [Case(model, kind, world, ep, 3, "fp32", pp=2, schedule="1f1b", layers=LAYERS[2][0], tp=2)]
    return found


def halves_cases(nproc: int) -> list[Case]:
    """Encoder-decoders with every engine, split experts, micro-batches and recompute. bf16 tests the tensors between the two halves."""
    found = [
        Case(model, kind, world, ep, microbatches, "fp32", recompute)
        for world in (1, 2, 4)
        if world <= nproc
        for kind in (planned() if world > 1 else ("ddp",))
        for model in HALVES
        for ep in divisors(world)
        for microbatches, recompute in ((1, "full"), (3, "selective" if model == "t5" else "none"))
        if (world < 4 or (kind, ep) in (("ddp", 2), ("fsdp", 4))) and (ep == world) == (microbatches == 1 or world == 1)
    ]
    found += [Case("t5", "dp", 1, 1, 1, "fp32"), Case("t5", "ddp", 1, 1, 1, "fp32", tiles=5, head_tiles=3, chunks=7)]
    found += [Case("t5_untied", "ddp", 2, 1, 1, "fp32", etp=2), Case("t5", "fsdp", 2, 2, 1, "fp32", tp=2)] if nproc >= 2 else []
    return found + [Case("t5", kind, 2, 2, 1, "bf16", "full") for kind in ("ddp", "fsdp", "zero1", "zero3") if nproc >= 2]


def options_cases(nproc: int) -> list[Case]:
    """Options of published models with two engines, micro-batches and recompute; experts drawn at random in bf16.

    all_expert_cases tests them with other dispatchers, sequence_cases with sequence parallelism, tensor_cases and pipeline_cases with tp,
    pp.
    """
    engines = {"gpt_oss": ("ddp", "zero3"), "latent": ("ddp", "fsdp"), "free": ("fsdp", "zero1"), "mixer": ("ddp", "fsdp")}
    found = [
        Case(model, kind, 2, 1 + number, 3 - 2 * number, "fp32", "full" if number else "none")
        for model, kinds in engines.items()
        for number, kind in enumerate(kinds)
    ]
    return [*found, Case("mixer", "ddp", 2, 2, 1, "bf16")] if nproc >= 2 else []


def tensor_cases(nproc: int) -> list[Case]:
    """Heads, hidden units and vocabulary split over tp. With tp 4, each of the two key-value heads is held by two ranks.

    gshard has T5's bias, tied embeddings, dropout and shared experts. ep folds over tp, and etp in one row of each world. The vocabulary's
    256 rows split evenly; tests/parallel/tensor/test_vocabulary.py splits 250 by 4.
    """
    found = []
    for world, tp in [(world, tp) for world, tp in ((2, 2), (4, 2), (4, 4)) if world <= nproc]:
        one = partial(Case, world=world, tp=tp, tensor="1d", microbatches=1)
        plain = partial(one, kind="ddp", precision="fp32")
        for kind in planned():
            found += [one("dense", kind, ep=1, microbatches=3 if world == 2 else 1, precision="fp32")]
            found += [one(model, kind, ep=ep, precision="fp32") for model, ep in (("gshard", world), ("deepseek", 2))]
        for model, ep in (("dense", 1), ("gshard", 2), ("deepseek", 2)):
            found += [one(model, "ddp", ep=ep, precision=precision) for precision in ("bf16", "fp16")]
            found += [plain(model, ep=ep, recompute=how) for how in ("full", "selective")]
            found += [one(model, kind, ep=ep, precision="fp32", tiles=5, head_tiles=3, chunks=7) for kind in ("ddp", "fsdp")]
        found += [plain("gshard", ep=1, etp=2), plain("deepseek", ep=2, padded=True)]
        found += [one("gshard", kind, ep=2, precision="bf16", recompute="selective") for kind in ("fsdp", "zero2", "zero3")]
    options = partial(Case, world=2, tp=2, ep=2, kind="ddp", microbatches=1)
    mixed = [options("mixer", tensor="sliced", precision=precision) for precision in ("fp32", "bf16")]
    found += [*mixed, options("gpt_oss", tensor="dtensor", precision="fp32")] if nproc >= 2 else []
    found += _halves_tensor_cases(nproc)
    return (
        found + _sliced_cases(nproc) + _overlapped_cases(nproc) + _dtensor_cases(nproc) + _staged_tensor_cases(nproc) + _grid_cases(nproc)
    )


def _halves_tensor_cases(nproc: int) -> list[Case]:
    """Encoder-decoders: cross attention and the bias shared by the layers of a half, split by heads. In bf16 also with FSDP, and in
    fp16.
    """
    one = partial(Case, kind="ddp", microbatches=1, precision="fp32", tensor="1d")
    two, four = partial(one, world=2, tp=2), partial(one, world=4, tp=2)
    found = [two("t5", ep=2), two("t5_untied", ep=1, recompute="full")]
    found += [two("t5", ep=2, precision="bf16"), two("t5_untied", ep=1, precision="fp16")]
    more = [four("t5", kind="fsdp", ep=2, recompute="selective"), four("t5_untied", kind="zero1", ep=2, etp=2)]
    more += [one("t5", world=4, tp=4, ep=2, tiles=5, head_tiles=3, chunks=7), four("t5", ep=4, tensor="overlapped")]
    more += [four("t5", kind="fsdp", ep=2, precision="bf16", recompute="selective")]
    return (found if nproc >= 2 else []) + (more if nproc >= 4 else [])


GRIDS = {"2d": 4, "2.5d": 8, "3d": 8}  # tensor.kind -> the smallest number of ranks
ROWS_OF_GRID = {"2d": 2, "2.5d": 4, "3d": 4}  # number of parts into which the grid splits the tokens


def _grid_cases(nproc: int) -> list[Case]:
    """Tensor parallelism in 2D, 2.5D and 3D: weights and activations in blocks. A batch of 24, so that eight ranks route equal shares.

    The vocabulary's 256 rows split evenly; tests/parallel/tensor/test_grids.py has 11. A single key-value head is copied along each line
    of a grid.
    """
    found = []
    for tensor, tp in GRIDS.items():
        one = partial(Case, world=tp, tp=tp, tensor=tensor, microbatches=1, batch=24)
        plain = partial(one, kind="ddp", precision="fp32")
        for kind in planned() if tp <= nproc else ():
            found += [one(model, kind, ep=ep, precision="fp32") for model, ep in (("dense", 1), ("gshard", 4), ("deepseek", 2))]
        if tp <= nproc:
            found += [plain("dense", ep=1, microbatches=3), plain("gshard", ep=1, etp=2), plain("deepseek", ep=2, padded=True)]
            found += [plain("gshard", ep=2, recompute=how) for how in ("full", "selective")]
            found += [one("gshard", kind, ep=1, precision="fp32", tiles=5, head_tiles=3, chunks=7) for kind in ("ddp", "fsdp")]
            found += [plain(model, ep=1) for model in PACKED]
            found += [one("one_head", kind, ep=2, precision="fp32") for kind in planned()] + [plain("one_head", ep=4, recompute="full")]
            found += [one(model, "ddp", ep=ep, precision="bf16") for model, ep in (("dense", 1), ("deepseek", 2))]
            found += [one("dense", "zero2", ep=1, precision="fp16"), one("gshard", "fsdp", ep=2, precision="bf16", recompute="selective")]
    flat = partial(Case, world=8, tp=4, tensor="2d", precision="fp32", batch=24)
    both = [flat("gshard", "ddp", ep=4, microbatches=1), flat("dense", "zero1", ep=1, microbatches=1)]
    both += [flat("one_head", kind, ep=2, microbatches=1) for kind in ("fsdp", "zero2")]
    both += [
        flat(model, "ddp", ep=2, microbatches=1, recompute="full", sp=2, attention=attention, length=SLICED)
        for model, attention in (("gshard", "zigzag"), ("packed", "ulysses"))
    ]
    both += [
        replace(_staged(model, "ddp", 4, 2, schedule, "fp32"), world=8, microbatches=6, batch=24, ep=ep, tp=4, tensor="2d")
        for model, ep, schedule in (("dense", 1, "1f1b"), ("gshard", 2, "zb_h1"), ("gshard", 2, "chimera"))
    ]
    return found + (both if nproc >= 8 else [])


def _sliced_cases(nproc: int) -> list[Case]:
    """tensor.sequence_parallel: slices of the sequences between layers, whole sequences in MoE layers. tp 4 does not divide the 10 tokens
    of a sequence.
    """
    found = []
    for world in (world for world in (2, 4) if world <= nproc):
        one = partial(Case, world=world, tp=2, tensor="sliced", microbatches=1)
        plain = partial(one, kind="ddp", precision="fp32")
        found += [one("gshard", kind, ep=world, precision="fp32") for kind in planned()]
        found += [one(model, kind, ep=ep, precision="fp32") for model, ep in (("dense", 1), ("deepseek", 2)) for kind in ("ddp", "zero2")]
        if world == 2:
            found += [plain("gshard", ep=2, recompute=how) for how in ("full", "selective")]
            found += [plain("dense", ep=1, tiles=5, head_tiles=3, chunks=7), plain("deepseek", ep=2, padded=True)]
            found += [one(model, "ddp", ep=ep, precision="bf16") for model, ep in (("dense", 1), ("gshard", 2))]
    two = partial(Case, kind="ddp", world=2, microbatches=1, precision="fp32", tp=2)
    if nproc >= 2:  # latent attention exchanges latents; with slices, each rank computes those of its slice only
        found += [two("latent", ep=2, tensor="1d", recompute="full"), two("latent", ep=1, tensor="sliced", kind="zero3")]
        found += [two("latent", ep=2, tensor=tensor, precision="bf16") for tensor in ("1d", "sliced")]
        found += [two("ahead", ep=2, tensor="1d", kind="fsdp"), two("ahead", ep=1, tensor="sliced", recompute="selective", padded=True)]
    staged = [_staged(model, "ddp", 4, 2, "1f1b", "fp32") for model in ("dense", "gshard", "ahead")]
    staged = [replace(case, microbatches=6, ep=1 if case.model == "dense" else 2, tp=2, tensor="sliced") for case in staged]
    both = [  # slices over sp, and of these slices over tp
        Case(model, "ddp", 4, ep, 1, "fp32", tp=2, tensor=tensor, sp=2, length=24, attention="zigzag")
        for model, ep in (("dense", 1), ("gshard", 2), ("deepseek", 2), ("latent", 2), ("ahead", 2))
        for tensor in ("1d", "sliced")
    ]
    return found + (staged + both if nproc >= 4 else [])


def _overlapped_cases(nproc: int) -> list[Case]:
    """Tensor parallelism with overlapped chunks of different lengths, with and without slices: engines, recompute, 16 bits, delayed weight
    gradients. Also with tp 4, where two ranks share each key-value head, and with slices over sp.
    """
    if nproc < 2:
        return []
    one = partial(Case, world=2, tp=2, microbatches=1, precision="fp32")
    found = [one("gshard", "fsdp", ep=2, tensor="overlapped"), one("dense", "zero3", ep=1, tensor="overlapped", recompute="full")]
    found += [one("gshard", kind, ep=2, tensor="overlapped_sliced") for kind in ("ddp", "zero3")]
    found += [replace(one("dense", "ddp", ep=1, tensor=tensor), precision="bf16") for tensor in ("overlapped", "overlapped_sliced")]
    more = [replace(_staged("gshard", "ddp", 4, 2, "zb_h1", "fp32"), microbatches=6, ep=2, tp=2, tensor="overlapped_sliced")]
    more += [replace(one("dense", "fsdp", ep=1, tensor="overlapped"), world=4, tp=4)]
    more += [replace(one("gshard", "zero3", ep=4, tensor="overlapped_sliced"), world=4, tp=4, length=SLICED)]
    more += [replace(one("dense", "ddp", ep=1, tensor="overlapped_sliced"), world=4, sp=2, length=SLICED)]
    return found + (more if nproc >= 4 else [])


def _dtensor_cases(nproc: int) -> list[Case]:
    """tensor.kind dtensor, which shards as 1d does, so fewer rows. They test torch's own collectives within layers, with each engine,
    recompute, tiles, slices, sp, stages and bf16.
    """
    found = []
    for world in (world for world in (2, 4) if world <= nproc):
        one = partial(Case, world=world, tp=2, tensor="dtensor", microbatches=1)
        for kind in planned() if world == 2 else ("ddp", "fsdp", "zero3"):
            found += [one("gshard", kind, ep=world, precision="fp32")]
        if world == 2:
            found += [one("dense", kind, ep=1, precision="fp32", tiles=5, head_tiles=3, chunks=7) for kind in ("ddp", "fsdp")]
            found += [one("deepseek", "ddp", ep=2, precision="fp32", recompute=how) for how in ("full", "selective")]
            found += [one("dense", "ddp", ep=1, precision="bf16"), one("deepseek", "zero3", ep=1, precision="bf16", recompute="full")]
        sliced = replace(one("gshard", "ddp", ep=2, precision="fp32"), tensor="dtensor_sliced")
        found += [sliced, replace(sliced, model="dense", ep=1, kind="zero3"), replace(sliced, precision="bf16")]
    staged = replace(_staged("gshard", "ddp", 4, 2, "1f1b", "fp32"), microbatches=6, ep=2, tp=2, tensor="dtensor")
    both = Case("dense", "ddp", 4, 1, 1, "fp32", tp=2, tensor="dtensor", sp=2, length=SLICED, attention="zigzag")
    return found + ([staged, replace(staged, schedule="zb_h1"), both] if nproc >= 4 else [])


def _staged_tensor_cases(nproc: int) -> list[Case]:
    """Tensor parallelism in pipelines: stages send whole activations, backward passes are split, and a tied embedding is on two stages or
    twice on one rank.
    """
    schedules = {"ddp": ("1f1b", "interleaved", "zb_h1", "chimera"), "zero1": ("1f1b",), "fsdp": ("1f1b",)}
    return [
        replace(_staged(model, kind, 4, 2, schedule, "fp32"), world=world, microbatches=6 if world == 4 else 3, ep=ep, tp=2, tensor="1d")
        for world, kind in ((4, "ddp"), (8, "zero1"), (8, "fsdp"))
        if world <= nproc
        for schedule in schedules[kind]
        for model, ep in (("dense", 1), ("gshard", 2))
    ]


def expert_cases(nproc: int) -> list[Case]:
    """Every router with every dispatcher. With ep 1 no rows are sent, so one dispatcher is tested; hierarchical needs an ep of at least 4.

    Each kind of recompute is combined with one number of micro-batches, and for every second router with the other number. Each dispatcher
    thus meets all four pairs with half the cases.
    """
    sparse = [model for model in MODELS | ROUTERS if model != "dense"]
    return [
        Case(model, "ddp", world, ep, microbatches, "fp32", recompute, etp, rows, EXPERTS)
        for world in range(1, nproc + 1)
        if BATCH % world == 0 and EXPERTS % world == 0
        for etp in (1, 2)
        for ep in divisors(world)
        if world % (ep * etp) == 0
        for rows in rows_for(ep)
        for number, model in enumerate(sparse)
        for microbatches in (1, 3)
        if BATCH % (world * microbatches) == 0
        for recompute in ("none", "full" if (microbatches == 1) == (number % 2 == 0) else "selective")
    ]


def all_expert_cases(nproc: int) -> list[Case]:
    """The cases of `expert_cases`, and options of published models."""
    ways = zip(OPTIONS, cycle(rows_for(2)[1:]), strict=False)
    options = [Case(model, "ddp", 2, 2, 1, "fp32", rows=rows, experts=EXPERTS) for model, rows in ways]
    return expert_cases(nproc) + (options if nproc >= 2 else [])


LAYERS = {2: (3, 5), 4: (5, 9)}  # number of layers with one stage a rank and with two; stages are unequal


def pipeline_cases(nproc: int) -> list[Case]:
    """Every schedule: recompute with each precision for two models, and engines that shard over replicas of the pipeline in addition to
    DDP.

    Tied embeddings are on two stages, or twice on one rank. Some stages have layers with experts, others have none.
    """
    found = []
    for world, pp in ((2, 2), (4, 4), (4, 2)):
        for name, kind in SCHEDULES.items() if world <= nproc else ():
            for precision in ("fp32", "bf16") if kind.continuous else ("fp32", "bf16", "fp16"):
                shards = ["zero1"] if world > pp and not kind.continuous else []
                shards += ["fsdp"] if shards and name in ("1f1b", "chimera", "interleaved") and precision != "fp16" else []
                for model in ("dense", "gshard", "deepseek"):
                    found += [_staged(model, engine, world, pp, name, precision) for engine in ("ddp", *shards)]
                    found += [_staged(model, "ddp", world, pp, name, precision, "full")] if model != "deepseek" else []
    for world, pp, microbatches in ((2, 2, 3), (4, 4, 6), (4, 2, 3)):  # micro-batches that pp does not divide
        for model in ("dense", "gshard", "deepseek") if world <= nproc else ():
            found += [replace(_staged(model, "ddp", world, pp, "interleaved", "fp32"), microbatches=microbatches)]
    for model in ("dense", "gshard", "deepseek"):  # optimizers on the host
        found += [_staged(model, "zero1+cpu", 2, 2, "1f1b", "fp32")] if nproc >= 2 else []
        found += [_staged(model, "zero1+cpu", 4, 2, schedule, "bf16") for schedule in ("1f1b", "zb_v", "chimera")] if nproc >= 4 else []
    if nproc >= 2:  # with multi-token prediction, the last stage needs the embedding too
        found += [_staged("ahead", "ddp", 2, 2, schedule, "fp32") for schedule in ("1f1b", "interleaved", "zb_v", "chimera")]
    if nproc >= 4:
        found += [_staged("ahead", "zero1", 4, 2, "zb_h1", "fp32"), _staged("ahead", "ddp", 4, 4, "1f1b", "bf16", "full")]
    options = (("mixer", "1f1b", "fp32"), ("mixer", "1f1b", "bf16"), ("gpt_oss", "zb_h1", "fp32")) if nproc >= 2 else ()
    found += [_staged(model, "ddp", 2, 2, schedule, precision) for model, schedule, precision in options]
    return found + _empty_stage_cases(nproc)


def _empty_stage_cases(nproc: int) -> list[Case]:
    """Stages without layers: the head or the embedding alone in a stage, both alone, and a stage in the middle that only passes
    activations on.
    """

    def one(
        model: str, engine: str, world: int, schedule: str, stages: tuple[int, ...], precision: str = "fp32", recompute: str = "none"
    ) -> Case:
        pp = len(stages) // (SCHEDULES[schedule].chunks or DEFAULT_CHUNKS)
        return replace(_staged(model, engine, world, pp, schedule, precision, recompute), layers=sum(stages), stages=stages)

    found = (
        []
        if nproc < 2
        else [
            *(one(model, "ddp", 2, "1f1b", stages) for model in ("dense", "gshard", "deepseek") for stages in ((3, 0), (0, 3))),
            one("gshard", "ddp", 2, "zb_h1", (3, 0), "fp16"),
            one("dense", "ddp", 2, "two_bw", (0, 3)),
            one("gshard", "ddp", 2, "pipedream", (3, 0)),
            one("dense", "ddp", 2, "interleaved", (2, 0, 1, 0), "bf16", "full"),
            one("gshard", "ddp", 2, "zb_v", (0, 2, 1, 0), "bf16"),
        ]
    )
    if nproc >= 4:
        found += [
            one("gshard", "ddp", 4, "1f1b", (0, 2, 1, 0)),
            one("dense", "ddp", 4, "chimera", (1, 2, 1, 0)),
            one("gshard", "ddp", 4, "dualpipe", (0, 2, 1, 0), "bf16"),
            *(one("gshard", engine, 4, "1f1b", stages, "bf16") for engine in ("zero1", "fsdp") for stages in ((3, 0), (0, 3))),
            one("gshard", "zero1", 4, "zb_h1", (3, 0)),
        ]
    return found


def _staged(model: str, engine: str, world: int, pp: int, schedule: str, precision: str, recompute: str = "none") -> Case:
    dp = world // pp
    kind = SCHEDULES[schedule]
    layers = LAYERS[pp][int(kind.chunks != 1)]
    least = 2 * pp - 1 if schedule == "zb_h2" else 4  # with fewer micro-batches zb_h2 puts no weight gradient into a bubble
    fit = (m for m in divisors(BATCH // dp) if m >= least and m % pp == 0 and kind.refusal(Size(pp, m)) is None)
    microbatches = kind.update_every or next(fit)
    ep = dp if model != "dense" else 1
    return Case(model, engine, world, ep, microbatches, precision, recompute, pp=pp, schedule=schedule, layers=layers)


def sequence_cases(nproc: int) -> list[Case]:
    """Every method of sequence parallelism on 2, 3 and 4 ranks with rotary and T5 positions. Every router, whose groups are then cut. Some
    methods with engines, data parallelism, experts that fold over sp, recompute (lightseq keeps attention's output) and 16 bits.

    Pipelines have another length. With gshard, five layers and 24 tokens, one token is nearly tied in the ninth step, and sliced
    attention on one process also routes it differently (docs/inside/log.md).
    """
    found = []
    for sp in range(2, nproc + 1):
        for attention, form in attentions().items() if BATCH % sp == 0 else ():
            if (attention == "heads2" and sp % 2) or (SEQUENCES[form["kind"]].trades_heads and 4 % sp):
                continue
            found += [Case(model, "ddp", sp, 1, 3, "fp32", sp=sp, attention=attention) for model in ("dense", "gshard", "deepseek")]
            found += [Case("gshard", "ddp", sp, sp, 1, "fp32", "full", sp=sp, attention=attention)] if 4 % sp == 0 else []
            found += [Case("dense", "ddp", sp, 1, 1, "bf16", "selective", sp=sp, attention=attention)]
            found += [Case(model, "ddp", sp, 1, 1, "fp32", sp=sp, attention=attention) for model in PACKED]
    for number, model in enumerate(model for model in MODELS | ROUTERS if model != "dense"):
        for sp, attention in ((2, "zigzag"), (4, "striped")):
            if sp <= nproc:
                ep = sp if number % 2 else 1
                found += [Case(model, "ddp", sp, ep, 1 if number % 3 else 3, "fp32", sp=sp, attention=attention, experts=EXPERTS)]
    for world, sp, attention in ((2, 2, "zigzag"), (4, 2, "heads2"), (4, 2, "lightseq"), (4, 4, "zigzag")):
        for kind in planned() if world <= nproc else ():
            found += [Case("gshard", kind, world, 2, 1, "fp32", "full", sp=sp, attention=attention)]
            found += [Case("deepseek", kind, world, 1, 3, precision, sp=sp, attention=attention) for precision in ("fp32", "bf16", "fp16")]
        found += [Case("deepseek", "ddp", world, 2, 3, "fp32", sp=sp, attention=attention, padded=True)] if world <= nproc else []
        found += [Case("dense", "zero1", world, 1, 1, "fp32", sp=sp, attention=attention, overflow=True)] if world <= nproc else []
    for schedule in ("1f1b", "interleaved") if nproc >= 4 else ():
        layers = LAYERS[2][int(SCHEDULES[schedule].chunks != 1)]
        found += [
            Case(model, "ddp", 4, ep, 4, "fp32", "full", pp=2, schedule=schedule, layers=layers, sp=2, length=16)
            for model, ep in (("dense", 1), ("gshard", 2), ("deepseek", 1))
        ]
    for attention, model in zip(("zigzag", "ulysses", "colossal", "lightseq"), OPTIONS, strict=True) if nproc >= 2 else ():
        found += [Case(model, "ddp", 2, 2, 1, "fp32", "full", sp=2, attention=attention)]
    for attention, kind in (("zigzag", "ddp"), ("striped", "fsdp"), ("ulysses", "zero3")) if nproc >= 2 else ():
        found += [Case("ahead", kind, 2, 2, 1, "fp32", sp=2, attention=attention, padded=attention == "striped")]
    found += [Case("mixer", "ddp", 2, 1, 3, "fp32", sp=2, attention="ulysses")] if nproc >= 2 else []
    for attention, kind in (("zigzag", "ddp"), ("ulysses", "fsdp"), ("lightseq", "zero1")) if nproc >= 4 else ():
        found += [
            Case(model, kind, 4, ep, microbatches, "fp32", "full", tp=2, tensor="1d", sp=2, attention=attention)
            for model, ep, microbatches in (("dense", 1, 3), ("gshard", 4, 1), ("deepseek", 2, 1))
        ]
    return [replace(case, length=SLICED) if case.length == LENGTH else case for case in dict.fromkeys(found)]
