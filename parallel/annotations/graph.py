"""Graph of the operators of one forward pass, which the planner's searches shard over devices. Needs no torch.

    bld --norm--> bld --ffn.w1 "bld,df->blf"--> blf --activation--> blf --ffn.w2 "blf,fd->bld"--> bld

Each operator has a rule in einsum notation, as in GShard (arXiv 2006.16668, section 3.2) and GSPMD (arXiv 2105.04663, section 3.5). A
letter is a factor: it has one role and one size in the whole graph (`dims`). Sharding a factor shards every tensor of the operator that has
its letter: sharding `b` is data parallelism, and sharding `f` Megatron's column-parallel and row-parallel layer. If the output lacks the
factor, ranks have partial sums.

    b batch  l length  s length (of keys)  d width  v vocab  k heads (of keys)  g queries (query heads for each key head)
    c channels (of a head)  f hidden  e experts  u slots (an expert's capacity for one sequence)  m expert_hidden  n shared_hidden

An operator may read a tensor under other letters: a product gives keys as `blkc`, and attention reads them as `bskc`, because positions of
queries (l) and keys (s) may be sharded differently. Capital letters are used if a role has several sizes, for example different numbers of
experts in different layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal, NamedTuple

Kind = Literal["product", "pointwise", "norm", "lookup", "attention", "dispatch", "combine", "loss"]


@dataclass(frozen=True)
class Dim:
    """A factor, which is a letter of the operators' einsum rules: its role, such as `hidden`, and its size in the unsharded model."""

    name: str
    size: int


@dataclass(frozen=True)
class Operator:
    """An operator of the graph. Its output tensor has the operator's name.

    rule: einsum rule: letters of each input, in the order of `inputs`, and of the output. flops: of the unsharded product in a forward
    pass; 0 if the operator is not a product. whole: factors (letters) that cannot be sharded. statistics: factors over which a norm or the
    loss computes one or two numbers for each position; if these factors are sharded, ranks all-reduce only the numbers. layer: index, from
    0, of the operator's Transformer layer; -1: before the first layer; the number of layers: after the last layer."""

    name: str
    kind: Kind
    rule: str
    inputs: tuple[str, ...]
    flops: float = 0.0
    layer: int = 0
    whole: str = ""
    statistics: str = ""

    @cached_property
    def terms(self) -> tuple[str, ...]:
        """Return the letters of each input, as in the rule: ("bld", "df") for "bld,df->blf"."""
        return tuple(self.rule.partition("->")[0].split(","))

    @cached_property
    def output(self) -> str:
        """Return the letters of the output, as in the rule."""
        return self.rule.partition("->")[2]

    @cached_property
    def factors(self) -> str:
        """Return all letters of the rule, each once: the letters of the output, then the others."""
        return "".join(dict.fromkeys(self.output + "".join(self.terms)))

    @cached_property
    def summed(self) -> str:
        """Return the letters that the output lacks: the factors over which the operator sums."""
        return "".join(letter for letter in self.factors if letter not in self.output)


class Edge(NamedTuple):
    """An edge between operators: `reader` reads the output of `writer` as its input number `place` (from 0)."""

    writer: str
    reader: str
    place: int


@dataclass(frozen=True)
class Graph:
    """The operators of a forward pass, in the order in which they run.
    dims: letter -> its role and size. inputs (tokens, targets), parameters: name of the tensor -> its letters. Several operators may read
    the same parameter (tied embeddings). itemsize: bytes of an element of activations. whole: None if this graph has all layers of the
    model; else, for each parameter, its number of readers in the graph with all layers."""

    dims: Mapping[str, Dim]
    inputs: Mapping[str, str]
    parameters: Mapping[str, str]
    operators: tuple[Operator, ...]
    itemsize: int = 2
    whole: Mapping[str, int] | None = None

    def __post_init__(self) -> None:
        known = set(self.inputs) | set(self.parameters)
        for op in self.operators:
            assert len(op.terms) == len(op.inputs), f"{op.name}: {op.rule} for {op.inputs}"
            assert set(op.inputs) <= known, f"{op.name} reads tensors that do not exist: {set(op.inputs) - known}"
            assert set(op.factors) <= set(self.dims), f"{op.name}: letters without a size in {op.rule}"
            for name, term in zip(op.inputs, op.terms, strict=True):
                there = self.letters(name)
                assert [self.dims[a].size for a in term] == [self.dims[a].size for a in there], f"{op.name} reads {name} {there} as {term}"
            assert op.name not in known, f"{op.name} exists twice"
            known.add(op.name)

    @cached_property
    def named(self) -> dict[str, Operator]:
        return {op.name: op for op in self.operators}

    def letters(self, value: str) -> str:
        """Return the letters of the tensor `value`: an input, a parameter or an operator's output."""
        return self.inputs.get(value) or self.parameters.get(value) or self.named[value].output

    def size(self, letters: str) -> int:
        """Return the number of elements of a tensor with these letters."""
        return prod(self.dims[letter].size for letter in letters)

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        """Return all edges between operators, sorted by the reader's position in `operators`."""
        return tuple(Edge(name, op.name, i) for op in self.operators for i, name in enumerate(op.inputs) if name in self.named)

    @cached_property
    def readers(self) -> dict[str, tuple[Edge, ...]]:
        """Return name of an operator -> the edges to the operators that read its output."""
        return {op.name: tuple(edge for edge in self.edges if edge.writer == op.name) for op in self.operators}

    @cached_property
    def readers_of(self) -> Mapping[str, int]:
        """Return name of a parameter -> the number of operators that read it: several if embeddings are tied."""
        return self.whole or Counter(name for op in self.operators for name in op.inputs if name in self.parameters)

    @cached_property
    def flops(self) -> float:
        """Return the floating-point operations of one forward pass."""
        return sum(op.flops for op in self.operators)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Return the different values of Operator.layer, ascending."""
        return tuple(sorted({op.layer for op in self.operators}))
