"""Sections of a recipe that describe the experts, their router, and how rows are sent to them."""

from __future__ import annotations

from dataclasses import fields, replace
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import Field, create_model, field_validator

from moe.recipe.plugin import Plugin
from moe.recipe.presets import PRESETS
from moe.recipe.router_spec import RouterSpec
from moe.recipe.section import Section


class Experts(Section):
    """The feed-forward networks of one MoE layer."""

    num_experts: int | tuple[int, ...] = Field(8, description="a list (pyramid): one number for each layer with experts, in order")
    d_ff: int | None = Field(None, gt=0, description="null: model.d_ff")
    ffn: Literal["relu", "gelu", "geglu", "swiglu"] | None = Field(None, description="null: model.ffn")
    skip: int = Field(0, ge=0, le=100_000, description="choices in addition to the experts that return the token unchanged (LongCat-Flash)")
    zero: int = Field(0, ge=0, le=100_000, description="choices in addition to the experts that add nothing (MoE++)")
    biases: bool = Field(False, description="biases after the products of each expert (GPT-OSS)")
    shared: int = Field(0, ge=0, description="experts that every token passes, as one wider network")
    shared_d_ff: int | None = Field(None, gt=0, description="hidden width of one shared expert; null: of an expert")
    shared_gate: bool = Field(False, description="the shared network times sigmoid(w x), as in Qwen2-MoE")
    residual: bool = Field(False, description="a dense network in each MoE layer, mixed with its experts by a learned softmax (PR-MoE)")
    dropout: float = Field(0.0, ge=0, lt=1, description="inside the experts; Switch fine-tunes with 0.4")
    rebalance_every: int = Field(0, ge=0, description="steps between moves of experts that even out the ranks' load; 0: never")
    kernels: Literal["auto", "reference", "cpu", "triton"] = "auto"

    @field_validator("num_experts")
    @classmethod
    def _some(cls, value: int | tuple[int, ...]) -> int | tuple[int, ...]:
        if min((value,) if isinstance(value, int) else value, default=0) < 1:
            raise ValueError("a number above 0, or a list of such numbers")
        return value

    def of_layer(self, nth: int) -> int:
        """Number of experts in the nth layer with experts, counted from 0."""
        return self.num_experts if isinstance(self.num_experts, int) else self.num_experts[nth]

    @property
    def free(self) -> int:
        """Number of choices without an expert's work."""
        return self.skip + self.zero

    @property
    def counts(self) -> tuple[int, ...]:
        """Numbers of experts of the layers; a single one if all layers have the same."""
        return (self.num_experts,) if isinstance(self.num_experts, int) else self.num_experts


class _RouterSection(Section):
    """The router: a published one by name, and this recipe's changes to it."""

    preset: Literal[
        "switch", "switch_mtf", "gshard", "glam", "mixtral", "qwen2_moe", "olmoe", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3",
        "llama4", "nllb", "deepspeed", "megatron", "expert_choice",
    ] = "switch"  # fmt: skip

    @property
    def own(self) -> dict[str, Any]:
        """The values that this recipe sets itself."""
        return {f.name: value for f in fields(RouterSpec) if (value := getattr(self, f.name)) != "preset"}

    @property
    def unlike_preset(self) -> dict[str, Any]:
        """The recipe's own values that differ from the preset's."""
        return {key: value for key, value in self.own.items() if value != getattr(PRESETS[self.preset], key)}

    @property
    def spec(self) -> RouterSpec:
        """The complete router: the preset with this recipe's own values."""
        return replace(PRESETS[self.preset], **self.own)


def _router_keys() -> dict[str, Any]:
    """The fields of RouterSpec as keys of a recipe. Each may also be "preset", which takes the preset's value."""
    keys: dict[str, Any] = {}
    for name, hint in get_type_hints(RouterSpec, include_extras=True).items():
        kind, key = get_args(hint)
        limits = {"gt": key.above, "ge": key.least, "lt": key.below, "le": key.most}
        parts = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
        names = [choice for part in parts if get_origin(part) is Literal for choice in get_args(part)]
        numbers = [Annotated[part, Field(**limits)] if part in (int, float) else part for part in parts if get_origin(part) is not Literal]
        named: Any = Literal.__getitem__(tuple([*names, "preset"] if numbers else ["preset", *names]))
        kinds = (named, *numbers) if names else (*numbers, named)
        keys[name] = (Union.__getitem__(kinds), Field("preset", description=key.description))
    return keys


if TYPE_CHECKING:

    class Router(_RouterSection):
        allow_noncausal: bool = False

        def __getattr__(self, name: str) -> Any: ...

else:
    _NONCAUSAL = Field(False, description="train a router that looks at later tokens when it chooses")
    Router = create_model(
        "Router", __base__=_RouterSection, __doc__=_RouterSection.__doc__, **_router_keys(), allow_noncausal=(bool, _NONCAUSAL)
    )


class Dispatch(Section):
    """How rows are sent to the ranks that hold their experts, and back. All kinds give the same numbers."""

    kind: Literal["auto", "all_to_all", "padded", "all_gather", "hierarchical"] | Plugin = Field(
        "auto", description="auto: all_to_all; if one rank holds every expert, no rows are sent whatever is set"
    )
    overlap_chunks: int = Field(
        1, gt=0, description="of all_to_all: chunks of the held experts; one is computed while the next is exchanged"
    )
    node_size: int | None = Field(None, gt=0, description="of hierarchical: ranks of the ep axis that share a node")
