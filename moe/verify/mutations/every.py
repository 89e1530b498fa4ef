"""All mutations, in the order of the table."""

from __future__ import annotations

from moe.verify.mutations import gradients, optimizer, pipeline, precision, routing, sequence, tensor
from moe.verify.mutations.mutation import Mutation

MUTATIONS: tuple[Mutation, ...] = (
    *gradients.MUTATIONS,
    *routing.MUTATIONS,
    *precision.MUTATIONS,
    *optimizer.MUTATIONS,
    *pipeline.MUTATIONS,
    *tensor.MUTATIONS,
    *sequence.MUTATIONS,
)
