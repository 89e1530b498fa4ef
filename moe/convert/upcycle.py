"""Pure functions that convert the weights of feed-forward networks: dense to experts, and experts to fewer or to dense.

    copy      every expert is the dense network                                   Sparse Upcycling (arXiv 2212.05055)
    granular  the hidden units are cut into G shards; each becomes E / G experts  virtual groups (arXiv 2410.07524)
    noise     copies with Gaussian noise on a share of their weights
    drop      copies with a share of their hidden units drawn anew                Drop-Upcycling (arXiv 2502.19261)
    merge     groups of experts are replaced by their mean
    prune     only the most used experts are kept

Let f be the dense network, and let the gates of every token sum to s. Copies give sum_i g_i f(x) = s f(x), so w2 / s in place of w2 gives
f(x). The outputs of shards add up to f: f = sum_j f_j. The G shards of a copy share one router row. So a token that chooses a copy chooses
all its shards, each with 1 / G of the copy's gate. Then w2 * G / s gives f(x).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from parallel.numerics.random import key_of

# D model, F hidden, E experts

Network = dict[str, Tensor]  # w1 [D, F], w2 [F, D], and for gated activations w3 [D, F], as in experts


def scaled(network: Network, factor: float) -> Network:
    """Return a network with `factor` times the output: w2 is multiplied."""
    return network if factor == 1.0 else network | {"w2": network["w2"] * factor}


def joined(networks: Sequence[Network]) -> Network:
    """Return one network with the hidden units of all `networks`. Its output is the sum of their outputs."""
    return {name: torch.cat([network[name] for network in networks], 0 if name == "w2" else 1) for name in networks[0]}


def shards(network: Network, count: int, *, parts: int) -> list[Network]:
    """Return `count` experts. Expert e has the hidden units of shard e % parts of `network`, so every `parts` consecutive experts together
    are a copy of it. A token chooses all experts of a copy or none, each with 1 / parts of the copy's gate. To make up for that, w2 of each
    expert is multiplied by `parts`."""
    size = network["w1"].shape[1] // parts

    def shard(number: int) -> Network:
        units = slice(number * size, (number + 1) * size)
        return {name: w[units] if name == "w2" else w[:, units] for name, w in network.items()}

    return [scaled(shard(e % parts), parts) for e in range(count)]


def noisy(network: Network, count: int, *, share: float, scale: float, key: str, seed: int) -> list[Network]:
    """Return `count` copies of the network, each with its own Gaussian noise on about `share` of its weights. The noise has `scale` times
    the standard deviation of the matrix. `key`: name of the layer's experts; with `seed`, it determines the noise."""

    def change(expert: int, name: str, w: Tensor) -> Tensor:
        draw = torch.Generator().manual_seed(key_of(seed, f"{key}.{expert}.{name}.noise"))
        noise = torch.randn(w.shape, generator=draw) * (scale * w.float().std())
        return (w.float() + noise * (torch.rand(w.shape, generator=draw) < share)).to(w.dtype)

    return [{name: change(e, name, w) for name, w in network.items()} for e in range(count)]


def redrawn(network: Network, count: int, *, share: float, key: str, seed: int) -> list[Network]:
    """Return `count` copies of the network. In each, round(share * F) random hidden units are drawn anew, with the mean and standard
    deviation of the old weights. `key`: name of the layer's experts; with `seed`, it determines the units and their weights."""

    def change(expert: int) -> Network:
        draw = torch.Generator().manual_seed(key_of(seed, f"{key}.{expert}.drop"))
        units = network["w1"].shape[1]
        chosen = torch.randperm(units, generator=draw)[: round(share * units)]

        def one(name: str, w: Tensor) -> Tensor:
            if not len(chosen):
                return w
            dim, new = 0 if name == "w2" else 1, w.clone()
            old = w.index_select(dim, chosen).float()
            drawn = torch.randn(old.shape, generator=draw) * old.std() + old.mean()
            return new.index_copy_(dim, chosen, drawn.to(w.dtype))

        return {name: one(name, w) for name, w in network.items()}

    return [change(e) for e in range(count)]


def shared_rows(rows_ED: Tensor, *, parts: int) -> Tensor:
    """Return router rows [E, D] in which the `parts` shards of each copy of the dense network have the row of its first shard, so that a
    token chooses all of them or none."""
    expert_E = torch.arange(len(rows_ED))
    return rows_ED[expert_E - expert_E % parts]


def neighbors(count: int, into: int) -> list[list[int]]:
    """Cut `count` experts into `into` groups of neighbors, of equal size: [[0, 1], [2, 3]] for 4 experts and 2 groups."""
    size = count // into
    return [list(range(i * size, (i + 1) * size)) for i in range(into)]


def most_used(load: Sequence[float], into: int) -> list[list[int]]:
    """Return the `into` experts with the highest load, each as a separate group, in order of their indices. Of equal loads,
    the lower index wins."""
    best = sorted(range(len(load)), key=lambda e: (-load[e], e))[:into]
    return [[e] for e in sorted(best)]


def mean(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the weighted mean, summed in float64 and rounded to the tensors' dtype. The mean of bitwise equal tensors is bitwise equal to
    them. If all weights are 0, they count as equal."""
    total = math.fsum(weights)
    shares = [w / total for w in weights] if total > 0 else [1 / len(tensors)] * len(tensors)
    out = tensors[0].double() * shares[0]
    for tensor, share in zip(tensors[1:], shares[1:], strict=True):
        out += tensor.double() * share
    return out.to(tensors[0].dtype)


def merged(networks: Sequence[Network], weights: Sequence[float]) -> Network:
    """Return the weighted mean of networks, matrix by matrix."""
    return {name: mean([network[name] for network in networks], weights) for name in networks[0]}


def merged_rows(rows_ED: Tensor, groups: Sequence[Sequence[int]], weights: Sequence[float]) -> Tensor:
    """Return the router rows of merged experts, [groups, D]: the weighted mean of each group's rows."""
    return torch.stack([mean([rows_ED[e] for e in group], [weights[e] for e in group]) for group in groups])
