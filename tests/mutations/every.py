"""MUTATIONS: all mutations, in the order of the printed table."""

from __future__ import annotations

from tests.mutations import gradients, optimizer, pipeline, precision, routing, sequence, tensor
from tests.mutations.mutation import Mutation

MUTATIONS: tuple[Mutation, ...] = (
    *gradients.MUTATIONS,
    *routing.MUTATIONS,
    *precision.MUTATIONS,
    *optimizer.MUTATIONS,
    *pipeline.MUTATIONS,
    *tensor.MUTATIONS,
    *sequence.MUTATIONS,
)
