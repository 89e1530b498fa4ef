"""Graph of the operators of one forward pass, which the planner's searches cut over devices. Needs no torch.

    bld --norm--> bld --ffn.w1 "bld,df->blf"--> blf --activation--> blf --ffn.w2 "blf,fd->bld"--> bld

Each operator has a rule in einsum notation. A letter is a factor: it has one role and one size in the whole graph (`dims`). A cut of a
factor cuts every tensor of the operator that has its letter: a cut of `b` is data parallelism, a cut of `f` is Megatron's column-parallel,
then row-parallel layer. The sum runs over factors that the output does not have: ranks with parts of such a factor hold partial sums.
Tensors are matched by position: attention reads as `bskc` the tensor that the keys' product gives as `blkc`, because the positions of
queries (l) and of keys (s) may be cut differently.

    b batch  l length  s length (of keys)  d width  v vocab  k heads (of keys)  g queries (heads of queries for each of keys)
    c channels (of a head)  f hidden  e experts  u slots (an expert's places for tokens of one sequence)  m expert_hidden
    n shared_hidden

Capital letters are used for roles with several sizes, as in a model with layers of different numbers of experts.
The notation is GShard's (arXiv 2006.16668, section 3.2) and GSPMD's (arXiv 2105.04663, section 3.5).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal, NamedTuple

Kind = Literal["product", "pointwise", "norm", "lookup", "attention", "dispatch", "combine", "loss"]


@dataclass(frozen=True)
class Dim:
    """A factor: its role, such as `hidden`, and its size in the whole model."""

    name: str
    size: int


@dataclass(frozen=True)
class Operator:
    """An operator. Its output has the operator's name.

    rule: letters of each input, in the order of `inputs`, and of the output. flops: operations of the whole product in a forward pass; 0
    if it is no product. whole: factors that cannot be cut. statistics: factors over which norms and the loss compute one or two numbers
    for each position; if these are cut, ranks exchange only these numbers. layer: number of its block; -1: before the first block; the
    number of layers: after the last.
    """

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
        """Return the letters of the output."""
        return self.rule.partition("->")[2]

    @cached_property
    def factors(self) -> str:
        """Return all letters, each once, first the output's."""
        return "".join(dict.fromkeys(self.output + "".join(self.terms)))

    @cached_property
    def summed(self) -> str:
        """Return the letters that the output does not have."""
        return "".join(letter for letter in self.factors if letter not in self.output)


class Edge(NamedTuple):
    """Operator `reader` reads the output of operator `writer` as its input number `place`."""

    writer: str
    reader: str
    place: int


@dataclass(frozen=True)
class Graph:
    """The operators of a forward pass, in the order in which they run.

    dims: letter -> role and size. inputs (tokens, targets), parameters: name -> letters. Several operators may read a parameter (tied
    embeddings). itemsize: bytes of an element of activations.
    """

    dims: Mapping[str, Dim]
    inputs: Mapping[str, str]
    parameters: Mapping[str, str]
    operators: tuple[Operator, ...]
    itemsize: int = 2

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
        """Return name -> operator."""
        return {op.name: op for op in self.operators}

    def letters(self, value: str) -> str:
        """Return the letters of an input, a parameter or an operator's output."""
        made = self.__dict__.get("named") or {op.name: op for op in self.operators}
        return self.inputs.get(value) or self.parameters.get(value) or made[value].output

    def size(self, letters: str) -> int:
        """Return the number of elements of a tensor with these letters."""
        return prod(self.dims[letter].size for letter in letters)

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        """Return the edges between operators, in the readers' order."""
        return tuple(Edge(name, op.name, i) for op in self.operators for i, name in enumerate(op.inputs) if name in self.named)

    @cached_property
    def readers(self) -> dict[str, tuple[Edge, ...]]:
        """Return (name of an operator) -> edges to the operators that read its output."""
        return {op.name: tuple(edge for edge in self.edges if edge.writer == op.name) for op in self.operators}

    @cached_property
    def num_parameters(self) -> int:
        return sum(map(self.size, self.parameters.values()))

    @cached_property
    def flops(self) -> float:
        """Return the floating-point operations of one forward pass."""
        return sum(op.flops for op in self.operators)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Return the operators' layer numbers, in order: usually -1, each block's, and one more than the last block's."""
        return tuple(sorted({op.layer for op in self.operators}))

    def part(self, layers: range) -> Graph:
        """Return the graph of the operators of some layers. Outputs of other layers that they read become inputs."""
        kept = tuple(op for op in self.operators if op.layer in layers)
        there, read = {op.name for op in kept}, {name for op in kept for name in op.inputs}
        given = {name: self.letters(name) for name in sorted(read - there) if name not in self.parameters}
        parameters = {name: letters for name, letters in self.parameters.items() if name in read}
        return Graph(self.dims, given, parameters, kept, self.itemsize)
