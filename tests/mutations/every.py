"""MUTATIONS: all mutations by subject, and `listed()`, their table."""

from __future__ import annotations

import re

from tests.mutations import coefficients, gradients, optimizer, options, pipeline, precision, routing, sequence, tensor
from tests.mutations.mutation import Mutation

SUBJECTS: dict[str, tuple[Mutation, ...]] = {
    "Gradients and their sums": gradients.MUTATIONS,
    "Routing": routing.MUTATIONS + options.MUTATIONS + coefficients.OF_ROUTING,
    "16 bits and the loss scale": precision.MUTATIONS,
    "The update": optimizer.MUTATIONS + coefficients.OF_UPDATES,
    "Pipelines": pipeline.MUTATIONS,
    "Tensor parallelism": tensor.MUTATIONS,
    "Sequence parallelism": sequence.MUTATIONS + coefficients.OF_SEQUENCES,
}
MUTATIONS = tuple(mutation for mutations in SUBJECTS.values() for mutation in mutations)
UNREPORTED = "no public report known to us; reasoned from "


def listed() -> str:
    """Return a Markdown table a subject: each fault, the report of it or "none" and what it was reasoned from, and what finds it."""
    lines = list[str]()
    for subject, mutations in SUBJECTS.items():
        lines += [f"## {subject}", "", "| fault | reported | found by |", "|---|---|---|"]
        lines += [f"| `{m.name}`: {m.fault} | {_linked(m.source)} | {m.kind} |" for m in mutations] + [""]
    return "\n".join(lines)


def _linked(source: str) -> str:
    """Return the source with its issue and arXiv numbers as links."""
    source = source.replace(UNREPORTED, "none; ")
    source = re.sub(r"([\w-]+/[\w.-]+)#(\d+)", r"[\1#\2](https://github.com/\1/issues/\2)", source)
    return re.sub(r"arXiv[ :](\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", source)
