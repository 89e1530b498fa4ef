"""Faults of MoE layers with options that few recipes combine: a selection bias on logits, and adapters of experts that run in chunks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moe.verify.cases import EXPERTS, Case
from tests.mutations.mutation import Edit, Mutation


def _bias_on_scores(real: Any) -> Any:
    return lambda self, scores_TE, logits_TE, context: real(self, scores_TE, scores_TE, context)


def _first_adapters(real: Any) -> Any:
    def wrong(self: Any, each: int) -> Any:
        chunks = real(self, each)
        return [replace(chunk, adapters=chunks[0].adapters) for chunk in chunks]

    return wrong


MUTATIONS = (
    Mutation(
        "bias_added_to_scores_instead_of_logits",
        "With softmax over the chosen experts, the selection bias is added to the softmax of all logits instead of the logits",
        "no public report known to us; reasoned from arXiv 2408.15664, whose bias is added to what selects experts",
        "data",
        Case("gpt_oss", "ddp", 1, 1, 1, "fp32", packed=True),
        (Edit("moe.router.router:Router._preferred", _bias_on_scores),),
    ),
    Mutation(
        "adapters_of_the_first_chunk",
        "If experts run in chunks, every chunk uses the adapters of the first chunk's experts",
        "no public report known to us; reasoned from arXiv 2106.09685, with experts that run in chunks",
        "expert",
        Case("lora", "ddp", 2, 2, 1, "fp32", rows="overlapped", experts=EXPERTS),
        (Edit("moe.kernels.network:Network.split", _first_adapters),),
    ),
)
