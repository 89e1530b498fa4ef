"""Conversions of feed-forward networks, dense to experts and experts to fewer or to dense, as pure functions of weights.

    copy      every expert is the dense network                                   Sparse Upcycling (arXiv 2212.05055)
    granular  cut by hidden units into G shards, with E / G copies of each        virtual groups (arXiv 2410.07524)
    noise     copies with Gaussian noise on a share of their weights
    drop      copies with a share of their hidden units drawn anew                Drop-Upcycling (arXiv 2502.19261)
    merge     groups of experts are replaced by their mean
    prune     the most used experts stay

Let f be the dense network, and let the gates of every token sum to s. Copies then give sum_i g_i f(x) = s f(x), and dividing w2 by s
makes it f(x). Shards sum up: f = sum_j f_j. The G shards of a copy share one router row, so a token that chooses a copy chooses all
its shards with equal gates, and w2 * G / s makes the sum f(x) again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from parallel.numerics.random import key_of

# D model, F hidden, E experts


@dataclass(frozen=True)
class Network:
    """One feed-forward network in the experts' form: `w1` [D, F], `w2` [F, D], and for gated activations `w3` [D, F]."""

    w1: Tensor
    w2: Tensor
    w3: Tensor | None = None

    @property
    def units(self) -> int:
        return self.w1.shape[1]

    def each(self, change: Callable[[str, Tensor], Tensor]) -> Network:
        """Return the network with `change` applied to every matrix, by name."""
        return Network(change("w1", self.w1), change("w2", self.w2), None if self.w3 is None else change("w3", self.w3))

    def scaled(self, factor: float) -> Network:
        """Return the network times `factor`, by scaling w2."""
        return self if factor == 1.0 else replace(self, w2=self.w2 * factor)

    def cut(self, units: slice) -> Network:
        """Return the network of some hidden units: their terms of the sum."""
        return self.each(lambda name, w: w[units] if name == "w2" else w[:, units])


def joined(networks: Sequence[Network]) -> Network:
    """Return one wider network: the sum of these."""
    w3 = [n.w3 for n in networks if n.w3 is not None]
    return Network(torch.cat([n.w1 for n in networks], 1), torch.cat([n.w2 for n in networks]), torch.cat(w3, 1) if w3 else None)


# --- dense to experts -----------------------------------------------------------------------------------------------------


def copies(network: Network, count: int) -> list[Network]:
    """`count` references to the same network."""
    return [network] * count


def shards(network: Network, count: int, *, parts: int) -> list[Network]:
    """Return shards: expert e is shard e % parts of copy e // parts, scaled by `parts`, since its gate is one of `parts` equal ones."""
    size = network.units // parts
    return [network.cut(slice(e % parts * size, (e % parts + 1) * size)).scaled(parts) for e in range(count)]


def noisy(network: Network, count: int, *, share: float, scale: float, key: str, seed: int) -> list[Network]:
    """Copies, each with its own noise on about `share` of its weights: `scale` times the matrix's standard deviation."""

    def change(expert: int, name: str, w: Tensor) -> Tensor:
        draw = torch.Generator().manual_seed(key_of(seed, f"{key}.{expert}.{name}.noise"))
        noise = torch.randn(w.shape, generator=draw) * (scale * w.float().std())
        return (w.float() + noise * (torch.rand(w.shape, generator=draw) < share)).to(w.dtype)

    return [network.each(lambda name, w, e=e: change(e, name, w)) for e in range(count)]  # type: ignore[misc]


def redrawn(network: Network, count: int, *, share: float, key: str, seed: int) -> list[Network]:
    """Copies, each with round(share * F) random hidden units drawn anew, with the mean and standard deviation of the weights replaced."""

    def change(expert: int) -> Network:
        draw = torch.Generator().manual_seed(key_of(seed, f"{key}.{expert}.drop"))
        chosen = torch.randperm(network.units, generator=draw)[: round(share * network.units)]

        def one(name: str, w: Tensor) -> Tensor:
            if not len(chosen):
                return w
            dim, new = 0 if name == "w2" else 1, w.clone()
            old = w.index_select(dim, chosen).float()
            drawn = torch.randn(old.shape, generator=draw) * old.std() + old.mean()
            return new.index_copy_(dim, chosen, drawn.to(w.dtype))

        return network.each(one)

    return [change(e) for e in range(count)]


def shared_rows(rows_ED: Tensor, *, parts: int) -> Tensor:
    """Router rows [E, D] for virtual groups: all shards of one copy get the row of its first shard."""
    expert_E = torch.arange(len(rows_ED))
    return rows_ED[expert_E - expert_E % parts]


# --- experts to fewer, or to one dense network ------------------------------------------------------------------------------


def neighbours(count: int, into: int) -> list[list[int]]:
    """Return the groups when `count` experts are merged in order into `into` groups of equal size."""
    size = count // into
    return [list(range(i * size, (i + 1) * size)) for i in range(into)]


def most_used(load: Sequence[float], into: int) -> list[list[int]]:
    """Return the `into` experts of highest load, each a group of its own, in ascending order; ties go to the first."""
    best = sorted(range(len(load)), key=lambda e: (-load[e], e))[:into]
    return [[e] for e in sorted(best)]


def mean(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Weighted mean in float64; the mean of equal tensors is bitwise that tensor. Weights that are all 0 count as equal."""
    total = math.fsum(weights)
    shares = [w / total for w in weights] if total > 0 else [1 / len(tensors)] * len(tensors)
    out = tensors[0].double() * shares[0]
    for tensor, share in zip(tensors[1:], shares[1:], strict=True):
        out += tensor.double() * share
    return out.to(tensors[0].dtype)


def merged(networks: Sequence[Network], weights: Sequence[float]) -> Network:
    """The weighted mean of networks, matrix by matrix; the mean of equal networks is bitwise that network."""
    w3 = [n.w3 for n in networks if n.w3 is not None]
    return Network(mean([n.w1 for n in networks], weights), mean([n.w2 for n in networks], weights), mean(w3, weights) if w3 else None)


def merged_rows(rows_ED: Tensor, groups: Sequence[Sequence[int]], weights: Sequence[float]) -> Tensor:
    """Router rows [groups, D]: the weighted mean over each group."""
    return torch.stack([mean([rows_ED[e] for e in group], [weights[e] for e in group]) for group in groups])
