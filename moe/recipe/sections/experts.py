"""Sections of a recipe that describe the experts, their router, and how tokens are sent to the experts."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from moe.recipe.plugin import Plugin
from moe.recipe.presets import PRESETS
from moe.recipe.router_spec import RouterSpec
from moe.recipe.section import Section, key


class Experts(Section, alters="shape", off_without="model.moe_every or model.moe_layers"):
    """The feed-forward networks of the MoE layers."""

    num_experts: int | tuple[int, ...] = key(
        8, "experts in each MoE layer; a list (pyramid): one number for each of these layers, in order"
    )
    d_ff: int | None = key(None, "hidden width of an expert; null: model.d_ff", gt=0)
    ffn: Literal["relu", "gelu", "geglu", "swiglu"] | None = key(
        None, "activation of the experts, as model.ffn; null: model.ffn", alters="function"
    )
    skip: int = key(
        0, "number of zero-computation experts that return the token unchanged (LongCat-Flash)", ge=0, le=100_000, alters="function"
    )
    zero: int = key(0, "number of zero-computation experts that add nothing to the token (MoE++)", ge=0, le=100_000, alters="function")
    biases: bool = key(False, "a bias after each matrix product of an expert (GPT-OSS)")
    shared: int = key(0, "number of shared experts, which process every token; stored as one wider network", ge=0)
    shared_d_ff: int | None = key(None, "hidden width of one shared expert; null: as experts.d_ff", gt=0, of="experts.shared")
    shared_gate: bool = key(False, "shared experts' output is multiplied by sigmoid(w x), w learned (Qwen2-MoE)", of="experts.shared")
    residual: bool = key(False, "a dense network in each MoE layer, mixed with its experts by a learned softmax (PR-MoE)")
    dropout: float = key(0.0, "dropout rate of the experts' hidden units; Switch: 0.4 in fine-tuning", ge=0, lt=1, alters="training")
    rebalance_every: int = key(0, "steps after which experts may change ranks, to even out ranks' loads; 0: never", ge=0, alters="cost")
    kernels: Literal["auto", "reference", "cpu", "triton", "triton_persistent", "grouped_mm"] = key(
        "auto",
        "implementation of routing and experts; auto: triton on a GPU, else cpu (torch operations); reference: slow loops; "
        "triton_persistent: triton with TMA; grouped_mm: torch's grouped product",
        alters="cost",
    )
    products: ClassVar[str] = "plain"  # kind of matrix products (moe/kernels/products.py); no key, because only one kind exists

    @field_validator("num_experts")
    @classmethod
    def _some(cls, value: int | tuple[int, ...]) -> int | tuple[int, ...]:
        if min((value,) if isinstance(value, int) else value, default=0) < 1:
            raise ValueError("a number above 0, or a list of such numbers")
        return value

    def of_layer(self, nth: int) -> int:
        """Return the number of experts in the `nth` MoE layer, counted from 0."""
        return self.num_experts if isinstance(self.num_experts, int) else self.num_experts[nth]

    @property
    def free(self) -> int:
        """Number of zero-computation experts, from which a router chooses as well: `skip` + `zero`."""
        return self.skip + self.zero

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of experts in each MoE layer; a tuple of one number if it is the same in all of them."""
        return (self.num_experts,) if isinstance(self.num_experts, int) else self.num_experts


class _Published(Section, alters="function", off_without="model.moe_every or model.moe_layers"):
    """Declares `router.preset`. It is a base class of Router, so that `preset` is the section's first key."""

    preset: Literal[
        "switch", "switch_mtf", "gshard", "glam", "mixtral", "qwen2_moe", "olmoe", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3",
        "llama4", "nllb", "deepspeed", "megatron", "expert_choice",
    ] = key("switch", "published router, which gives the section's other keys their values", alters="name")  # fmt: skip


class Router(RouterSpec, _Published):
    """A published router with changes: Router(preset="glam", jitter=0.1) has GLaM's values except for jitter. A key with the value "preset"
    gets the published router's value."""

    allow_noncausal: bool = key(False, "permit a router whose choice for a token depends on later tokens", alters="training")

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, values: Any) -> Any:
        """Return `values`, with the preset's value for each key that is missing or has the value "preset"."""
        if not isinstance(values, dict):
            return values
        own = {key: value for key, value in values.items() if value != "preset"}
        preset = PRESETS.get(str(own.get("preset", cls.model_fields["preset"].default)), PRESETS["switch"])
        return dict(preset) | own

    @model_serializer(mode="wrap")
    def _as_written(self, inner: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return the section's values, with "preset" for a value that equals the preset's: if the recipe's preset is changed later, these
        values change with it."""
        return {key: "preset" if key in RouterSpec.model_fields and key not in self.own else value for key, value in inner(self).items()}

    @property
    def own(self) -> dict[str, Any]:
        """Key -> value, for the keys with a value that differs from the preset's."""
        return {key: getattr(self, key) for key, value in PRESETS[self.preset] if getattr(self, key) != value}


class Dispatch(Section, alters="cost", off_without="model.moe_every or model.moe_layers"):
    """How tokens are sent to the ranks that hold their experts, and how results are sent back. All kinds compute the same outputs and
    gradients."""

    kind: Literal["auto", "all_to_all", "padded", "all_gather", "hierarchical"] | Plugin = key(
        "auto",
        "auto: all_to_all; padded: blocks of equal size; all_gather: all tokens to all ranks; hierarchical: once to a node, then to "
        "its ranks. No kind sends anything with degrees.ep 1",
    )
    overlap_chunks: int = key(1, "for all_to_all: chunks of a rank's experts; one computes while the next one's tokens are exchanged", gt=0)
    node_size: int | None = key(None, "hierarchical needs it: number of ep ranks on a node", gt=0)
    busiest: float | None = key(
        None,
        "for predicted memory and time: load of the busiest ep rank / mean, before drops; null: estimated from router and degrees.ep",
        ge=1,
    )
