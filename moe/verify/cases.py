"""Defines the tiny models of `moe verify`, and a Case: one of these models in one layout. Needs no torch.

Sizes differ from each other, so that swapped dims fail. If a router preset counts capacity or balance over a rank's tokens or a
micro-batch, results depend on the layout by definition. The models here therefore count over a sequence or the global batch.
moe/verify/kinds.py lists the cases.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

from moe.checks.together import check_run
from moe.experts.dispatch import PLAIN, examples
from moe.recipe.load import build_run
from moe.recipe.sections import Run
from moe.router.methods import METHODS
from moe.verify.small import LINEAR, small
from moe.verify.telling import TELLING, squared
from parallel.data.kinds import ENGINES
from parallel.data.kinds.kind import EngineKind
from parallel.mesh.grids import Grid, grid_of
from parallel.pipeline.schedules import SCHEDULES
from parallel.sequence.kinds import SEQUENCES

BATCH, LENGTH, EXPERTS = 12, 10, 8
SLICED = 24  # sequence length of sequence-parallel cases; divisible by 2 * sp for sp 2, 3 and 4
OVERFLOWS = 1  # index of the step in which a gradient is infinite in cases with `overflow`

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

_OWN_BALANCE = f"{squared.__module__}:{squared.__name__}"
# capacity and balance counted within each sequence, so that results do not depend on the layout
_BY_SEQUENCE = {"group": "sequence", "balance_scope": "sequence", "min_capacity": 1}
ROUTERS: dict[str, dict[str, Any]] = {
    "switch_mtf": {"router": {"preset": "switch_mtf", "min_capacity": 1}},
    "glam": {"router": {"preset": "glam", "min_capacity": 1, "z_weight": 0.01}, "experts": {"ffn": "gelu", "dropout": 0.3}},
    "mixtral": {"router": {"preset": "mixtral", "group": "sequence", "balance_scope": "sequence"}, "experts": {"residual": True}},
    "qwen3_moe": {"router": {"preset": "qwen3_moe", "num_choices": 3}, "experts": {"shared": 1, "shared_gate": True}},
    "deepspeed": {"router": {"preset": "deepspeed"} | _BY_SEQUENCE, "experts": {"ffn": "relu"}},
    "megatron": {"router": {"preset": "megatron", "capacity_factor": 1.0, "allow_noncausal": True} | _BY_SEQUENCE},
    **{name: {"router": dict(method.example)} for name, method in METHODS.items() if method.example},
    "noisy_top_k": {  # as in V-MoE (arXiv 2106.05974): tokens with larger gates get slots first
        "router": {
            "preset": "glam", "noise": "noisy_top_k", "importance_weight": 0.01, "z_weight": 0.01, "drop": "lowest_gate",
            "capacity_factor": 1.0, "min_capacity": 1, "allow_noncausal": True,
        },
    },
    "gumbel": {"router": {"preset": "switch", "noise": "gumbel", "drop": "random", "min_capacity": 1, "allow_noncausal": True}},
}  # fmt: skip
# attention stays within a document. Every token with id 0 (1/16 of all tokens), or with id 1 in packed_t5 (1/39), begins a document
PACKED: dict[str, dict[str, Any]] = {
    "packed": {"model": {"document_mask": True}, "router": {"preset": "glam", "min_capacity": 1}},
    "packed_t5": {"model": {"document_mask": True, "document_separator": 1, "positions": "t5", "moe_every": 0}},
}
# encoder-decoders. t5 has four layers: encoder and decoder each have one MoE layer and one dense layer
HALVES: dict[str, dict[str, Any]] = {
    "t5": {
        "model": {"kind": "encoder_decoder", "num_layers": 4, "positions": "t5", "tied_embeddings": True, "dropout": 0.1, "ffn": "geglu"},
        "router": {"preset": "switch", "capacity_factor": 1.0, "min_capacity": 1, "jitter": 0.1, "z_weight": 0.001},
        "data": {"objective": "span_corruption"},
    },
    "t5_untied": {
        "model": {
            "kind": "encoder_decoder",
            "num_layers": 3,
            "encoder_layers": 1,
            "positions": "t5",
            "ffn": "relu",
            "moe_every": 1,
            "qk_norm": "whole",
        },
        "router": {"preset": "gshard", "group": 1, "capacity_factor": 1.25, "min_capacity": 1, "balance_scope": "global_batch"},
        "experts": {"shared": 1, "dropout": 0.2, "ffn": "gelu"},
        "data": {"objective": "span_corruption"},
        # normed queries and keys give large logits, so gradients of q are tiny: with a small eps, rounding could flip the sign of updates
        "optimizer": LINEAR,
    },
}
# models that combine options of published models
OPTIONS: dict[str, dict[str, Any]] = {
    "gpt_oss": {
        "optimizer": LINEAR,
        "model": {
            "sliding_window": 5, "sliding_layers": [0], "attention_sinks": True, "out_bias": True, "qkv_bias": True, "clip_qkv": 0.9,
            "rope": {"fraction": 2 / 3, "base": 300.0}, "swiglu": {"alpha": 1.702, "limit": 0.4, "offset": 1.0},
        },
        "router": {"preset": "gpt_oss", "num_choices": 3, "balance_scope": "sequence", "bias_rate": 0.02},
        "experts": {"biases": True},
    },
    "latent": {
        "model": {
            "num_kv_heads": None, "latent": {"key_rank": 10, "query_rank": 14, "rotary_size": 4, "value_size": 5}, "sliding_window": 5,
            "rope": {
                "pairs": "neighbours", "base": 1000.0, "scaling": "yarn", "factor": 3.0, "trained_length": 400,
                "mscale": 0.8, "mscale_all": 1.2,
            },
        },
        "router": {
            "preset": "deepseek_v2", "num_choices": 2, "expert_groups": 4, "top_groups": 2, "capacity_factor": 1.25, "min_capacity": 1,
        },
        "experts": {"shared": 1},
    },
    "free": {
        "optimizer": LINEAR,
        "router": {
            "preset": "llama4", "num_choices": 3, "noise": "noisy_top_k", "load_weight": 0.2, "logit_cap": 0.5, "score": "softmax",
            "balance_scope": "sequence", "capacity_factor": 1.0, "min_capacity": 1,
        },
        "experts": {"skip": 2, "zero": 1, "dropout": 0.2, "biases": True},
        "model": {"scales": {"embedding": 1.3, "residual": 0.7, "attention": 0.3, "head": 1.6}, "qk_norm": "heads"},
    },
    "mixer": {
        "optimizer": {"clip_norm": 50.0},  # above every gradient norm, so that gradients are never clipped
        "router": {
            "preset": "switch", "select": "sparsemixer", "num_choices": 2, "mixer_margin": 0.45, "input_norm": "rmsnorm",
            "expert_scale": "learned", "capacity_factor": 1.0, "capacity_multiple": 2, "min_capacity": 1, "balance_counts": "unbiased",
        },
        "model": {"rope": {"fraction": 1 / 3, "pairs": "neighbours"}, "clip_qkv": 0.7},
    },
}  # fmt: skip
AHEAD: dict[str, dict[str, Any]] = {  # multi-token prediction of two more tokens; latent attention that does not compress queries
    "ahead": {
        "model": {
            "ahead": 2, "num_kv_heads": None, "latent": {"key_rank": 10, "rotary_size": 4, "value_size": 5},
            "dropout": 0.1, "logit_cap": 2.0,
        },
        "router": {"preset": "switch", "capacity_factor": 1.0, "min_capacity": 1},
    },
}  # fmt: skip
OTHER: dict[str, dict[str, Any]] = {  # models for one feature each, such as an optimizer other than AdamW, frozen weights or LoRA
    "olmoe": {
        "optimizer": LINEAR,
        "model": {"qk_norm": "whole", "qkv_bias": True, "out_bias": True, "attention_sinks": True},
        "router": {"preset": "glam", "min_capacity": 1},
    },
    "muon": {
        "optimizer": LINEAR | {"kind": "muon", "muon": {"lr_factor": 0.7}},  # biases take AdamW's step
        "router": {"preset": "qwen3_moe", "num_choices": 2, "group": "sequence", "balance_scope": "sequence"},
        "experts": {"shared": 1, "shared_gate": True, "biases": True},
    },
    "adafactor": {
        "optimizer": {"kind": "adafactor"},
        "router": {"preset": "glam", "min_capacity": 1},
        "experts": {"biases": True},
        "model": {"num_heads": 8, "d_model": 32, "d_ff": 24},
    },
    "kfac": {  # factors are computed in steps 0, 3 and 6; their inverses are used from steps 1, 4 and 7 on
        "optimizer": {"kind": "kfac", "kfac": {"refresh_every": 3, "delay": 1}},
        "router": {"preset": "qwen3_moe", "num_choices": 2, "group": "sequence", "balance_scope": "sequence"},
        "experts": {"shared": 1, "shared_gate": True},
    },
    "kfac_at_once": {  # step 0 already uses the inverses of its own factors
        "optimizer": {"kind": "kfac"},
        "model": {"ahead": 1, "num_kv_heads": None, "latent": {"key_rank": 10, "query_rank": 14, "rotary_size": 4, "value_size": 5}},
        "router": {"preset": "switch", "capacity_factor": 1.0, "min_capacity": 1},
    },
    "kfac_t5": {
        "optimizer": {"kind": "kfac", "kfac": {"refresh_every": 2, "experts": False, "ema": 0.8, "damping": 0.7}},
        "model": {"kind": "encoder_decoder", "num_layers": 4, "positions": "t5", "ffn": "geglu"},
        "router": {"preset": "switch", "capacity_factor": 1.0, "min_capacity": 1},
        "data": {"objective": "span_corruption"},
    },
    # in padded batches the gradient is above the norm in steps 0, 2, 3 and 9, which are clipped, and below it in the others
    "clipped": MODELS["gshard"] | {"optimizer": {"clip_norm": 2.125}},
    # a user's balance loss of whole groups, which are on several ranks with sp or tp, and of the whole step
    "own_balance": {
        "router": {
            "preset": "glam",
            "group": 2,
            "min_capacity": 1,
            "balance_loss": _OWN_BALANCE,
            "balance_weight": 0.3,
        },
    },
    "own_balance_whole": {
        "router": {
            "preset": "qwen3_moe",
            "num_choices": 2,
            "balance_loss": _OWN_BALANCE,
            "balance_weight": 0.3,
        },
    },
    "frozen": {
        "train": {"freeze": ["experts", "embedding", "router"]},
        "router": {"preset": "glam", "min_capacity": 1},
        "model": {"tied_embeddings": False},
    },
    "frozen_stage": {"train": {"freeze": ["embedding", "layers.0"]}, "router": {"preset": "glam", "min_capacity": 1}},
    "lora": {  # LoRA adds the product B A to a weight. B does not begin at 0 here, so that A has a gradient in step 0
        "lora": {"rank": 3, "alpha": 6.0, "targets": ["attention", "experts", "dense"]},
        "router": {"preset": "glam", "min_capacity": 1},
        "experts": {"shared": 1},
    },
    "lora_t5": {
        "lora": {"rank": 3, "alpha": 6.0, "targets": ["attention", "dense"]},
        "model": {"kind": "encoder_decoder", "num_layers": 4, "positions": "t5", "ffn": "geglu"},
        "router": {"preset": "switch", "capacity_factor": 1.0, "min_capacity": 1},
        "experts": {"shared": 1},
        "data": {"objective": "span_corruption"},
    },
    "ahead_windows": {  # sliding windows in layer 1 and in layer 2, the first for multi-token prediction; activations are scaled
        "model": {
            "ahead": 2,
            "sliding_window": 4,
            "sliding_layers": [1, 2],
            "scales": {"embedding": 1.3, "residual": 0.7, "head": 1.6},
        },
        "router": {"preset": "glam", "min_capacity": 1},
    },
    "t5_packed": {
        "model": {"kind": "encoder_decoder", "num_layers": 4, "positions": "t5", "document_mask": True, "qk_norm": "heads"},
        "router": {"preset": "switch", "capacity_factor": 1.0, "min_capacity": 1},
        "data": {"objective": "span_corruption"},
    },
}
# models with fewer key-value heads than tp ranks: one head, or the usual two, with eight query heads so that tp=8 can split the queries
FEW: dict[str, dict[str, Any]] = {
    "one_head": {"model": {"num_kv_heads": 1}, "router": {"preset": "glam", "min_capacity": 1}},
    "eight_heads": {"model": {"num_heads": 8, "d_model": 32, "d_ff": 24}, "router": {"preset": "glam", "min_capacity": 1}},
}


def attentions() -> dict[str, dict[str, Any]]:
    """Return a dict: method of sequence parallelism (a value of Case.attention) -> the recipe's section `sequence`. `heads2`: Ulysses
    within each pair of ranks, and a ring over the pairs."""
    found = {form: {"kind": name, **keys} for name, kind in SEQUENCES.items() for form, keys in (kind.tried or {name: {}}).items()}
    return found | {"heads2": {"kind": "ring", "heads": 2}}


FORMS: dict[str, dict[str, Any]] = {  # values of Case.tensor that are not values of tensor.kind -> the recipe's section `tensor`
    "sliced": {"kind": "1d", "sequence_parallel": True},
    "overlapped": {"kind": "1d", "overlap_chunks": 3},
    "overlapped_sliced": {"kind": "1d", "sequence_parallel": True, "overlap_chunks": 3},
    "dtensor_sliced": {"kind": "dtensor", "sequence_parallel": True},
}
LINES = ("1d", "dtensor", *FORMS)  # values of Case.tensor that split each weight along one dim over all tp ranks


@dataclass(frozen=True)
class Case:
    """One model in one layout. kind: data-parallel engine and its offload (see `sharding_of`). rows: name of the token dispatcher. Fields
    marked "reference:" are only for the reference run on one process, which then sums partial results in the order of the layout's ranks.
    """

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
    tiles: int = 1  # number of tiles of each feed-forward network and expert (tiling.ffn)
    head_tiles: int = 1  # number of tiles of the head's vocabulary (tiling.head)
    chunks: int = 1  # number of chunks of tokens in the loss (recompute.loss_chunks)
    replicas: int = 2  # engine dp only: number of threads, each with a replica
    pp: int = 1
    schedule: str = "1f1b"
    layers: int = 2
    stages: tuple[int, ...] | None = None  # number of layers of each stage; None: stages of about equal FLOPs
    padded: bool = False  # some sequences end early (moe/verify/plain/batches.py)
    packed: bool = False  # as `padded`, and each sequence has several chats
    overflow: bool = False  # one rank's gradient is infinite in step OVERFLOWS
    tp: int = 1
    tensor: str = "copied"  # how tp ranks split weights: a value of tensor.kind or a key of FORMS
    parts: int = 1  # reference: number of tp ranks whose partial results are summed to a layer's output (moe/verify/in_parts.py)
    first_part: int = 0  # reference: tp rank with whose partial result these sums begin
    blocks: int = 1  # reference: matrices are multiplied in `blocks` x `blocks` pieces, as on a grid of tp ranks (moe/verify/in_parts.py)
    sp: int = 1
    attention: str = "zigzag"  # method of sequence parallelism, a key of `attentions`
    slices: int = 0  # reference: attention is merged from this number of sequence slices (moe/verify/in_parts.py); 0: torch's attention
    length: int = LENGTH  # tokens of a sequence
    batch: int = BATCH  # sequences of a step
    kernels: str = "cpu"  # value of the recipe's key experts.kernels
    casts: str = "use"  # value of the recipe's key precision.casts
    recipe: str | None = None  # path of a user's recipe; the case trains a small version of its model (moe/verify/small.py)
    values: str | None = None  # JSON of a recipe that runs unchanged, with its own sizes and layout (`as_written`)
    steps: int = 0  # number of steps; 0 means ten

    @property
    def layout(self) -> str:
        """Text for tables: model, degrees, and settings that are not the default. Different cases may have the same text."""
        parts = [f"{self.schedule} pp{self.pp}" if self.pp > 1 else ""]
        parts += ["layers" + "-".join(map(str, self.stages)) if self.stages else ""]
        parts += [f"{self.model} dp{self.dp}", f"tp{self.tp}-{self.tensor}" if self.tp > 1 else "", f"ep{self.ep}"]
        parts += [f"sp{self.sp} {self.attention}" if self.sp > 1 else ""]
        parts += [f"etp{self.etp}" if self.etp > 1 else "", f"m{self.microbatches}"]
        parts += [self.rows if self.rows != PLAIN else "", self.recompute if self.recompute != "none" else ""]
        parts += [f"tiles{self.tiles}/{self.head_tiles}" if self.tiles * self.head_tiles > 1 else ""]
        parts += [f"chunks{self.chunks}" if self.chunks > 1 else ""]
        parts += [f"casts {self.casts}"] if self.casts != "use" else []
        parts += [f"replicas{self.replicas}" if self.engine.threads else ""]
        parts += [f"{self.kernels}-kernels" if self.kernels != "cpu" else ""]
        parts += ["padded" if self.padded else "", "packed" if self.packed else "", "overflow" if self.overflow else ""]
        return " ".join(part for part in parts if part)

    @property
    def in_full(self) -> str:
        """All fields that differ from their defaults, as text "name=value name=value". Unlike `layout`, the text differs for different
        cases."""
        values = ((field.name, getattr(self, field.name), field.default) for field in fields(self))
        return " ".join(f"{name}={value}" for name, value, default in values if value != default)

    @property
    def engine(self) -> EngineKind:
        return ENGINES[self.kind.partition("+")[0]]

    @property
    def grid(self) -> Grid:
        return grid_of(self.tensor, self.tp, sides=())

    @property
    def dp(self) -> int:
        return self.world // (self.pp * self.tp * self.sp)

    def run(self) -> Run:
        """Return the case's recipe. By default, the model has one MoE layer and one dense layer."""
        if self.values is not None:
            return build_run(json.loads(self.values))
        keep = self.attention == "lightseq" and self.recompute == "full"
        scale = 1024.0 if self.precision == "fp16" else "none"
        values: dict[str, dict[str, Any]] = {
            "model": {
                "num_layers": self.layers, "d_model": 24, "num_heads": 4, "num_kv_heads": 2, "d_ff": 20, "ffn": "swiglu",
                "max_length": self.length, "moe_every": 2, "init_scale": 0.5, "tied_embeddings": False,
            },
            "experts": {"num_experts": self.experts, "kernels": "cpu"},
            "degrees": {"dp": self.dp, "pp": self.pp, "tp": self.tp, "sp": self.sp, "ep": self.ep, "etp": self.etp},
            "sequence": attentions()[self.attention] | {"keep_attention": keep} if self.sp > 1 else {},
            "tensor": FORMS.get(self.tensor, {"kind": self.tensor}),
            "dispatch": examples()[self.rows] if self.ep > 1 else {},
            "sharding": sharding_of(self.kind) | ({"replicas": self.replicas} if self.engine.threads else {}) | {"allow_slow": self.pp > 1},
            "pipeline": {"microbatches": self.microbatches, "schedule": self.schedule, "layers": self.stages},
            "tiling": {"ffn": self.tiles, "head": self.head_tiles},
            "recompute": {"kind": self.recompute, "loss_chunks": self.chunks},
            "precision": {"compute": self.precision, "loss_scale": scale, "casts": self.casts},
            "optimizer": {"lr": 0.003, "eps": 1e-5, "clip_norm": 0.5, "warmup_steps": 0, "schedule": "constant"},
            "train": {"global_batch": self.batch, "eval_sequences": self.batch, "seed": 7},
        }  # fmt: skip
        known = MODELS | ROUTERS | PACKED | FEW | HALVES | OPTIONS | AHEAD | OTHER | TELLING
        changes = known[self.model] if self.recipe is None else small(self.recipe, ep=self.ep)
        for section, changed in changes.items():
            values[section] = values.get(section, {}) | changed
        if self.delayed:
            values["optimizer"]["clip_norm"], values["model"]["tied_embeddings"] = None, False
            values["router"] = values.get("router", {}) | {"balance_scope": "sequence"}
        return build_run(values)

    @property
    def delayed(self) -> bool:
        """Whether the pipeline schedule computes gradients with older weights than the weights that they update (PipeDream, 2BW)."""
        return SCHEDULES[self.schedule].continuous


def as_written(values: dict[str, Any], world: int, *, name: str) -> Case:
    """Return a case that runs a recipe unchanged, with its own sizes and layout, on `world` processes. values: the recipe's nested values.
    The case has three steps, so that later steps read the optimizer states of earlier ones. Raises BadInput if the recipe is refused."""
    run = check_run(build_run(values), world)
    d, p, kind = run.degrees, run.pipeline, run.carrier
    kernels = Case.kernels if run.experts.kernels == "auto" else run.experts.kernels
    assert isinstance(d.dp, int) and isinstance(d.ep, int)
    resolved = values | {"degrees": {**values.get("degrees", {}), "dp": d.dp, "ep": d.ep}}
    return Case(
        name, kind.name, world, d.ep, p.microbatches, run.precision.compute, run.recompute.kind, d.etp, replicas=run.sharding.replicas,
        pp=d.pp, schedule=p.schedule if d.pp > 1 else "1f1b", tp=d.tp, tensor=run.tensor.kind, sp=d.sp, attention=run.sequence.kind,
        length=run.model.max_length, batch=run.train.global_batch, kernels=kernels, layers=run.model.num_layers,
        values=json.dumps(resolved), steps=3,
    )  # fmt: skip


def sharding_of(kind: str) -> dict[str, Any]:
    """Return the recipe's section `sharding` for a value of Case.kind. Suffixes: +cpu offloads optimizer states to the host, +cpu-all
    parameters too; +kept keeps gathered weights (reshard false)."""
    name, _, place = kind.partition("+")
    if place == "kept":
        return {**ENGINES[name].sharding, "reshard": False}
    where, _, everything = place.partition("-")
    offload = {"optimizer": where, "parameters": where if everything else "none"}
    return {**ENGINES[name].sharding, **({"offload": offload} if place else {})}
