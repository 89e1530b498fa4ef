"""LightSeq (DistFlashAttn): a causal ring in which ranks that would wait compute attention blocks of ranks with more work.

    rank        0         1         2         3            q2k1: queries of rank 2 with keys of rank 1
    step 0      q0k0      q1k1      q2k2      q3k3
    step 1      q3k0 *    q1k0      q2k1      q3k2         * helps: receives rank 3's queries, sends the partial result back
    step 2      -         -         q2k0      q3k1

At step t, rank r computes with the keys of rank r - t. If r < t, there is no such rank, and r helps the rank t places before it on the
ring: it computes that rank's queries with its own keys. Each causal block is computed once. p ranks need p // 2 + 1 steps. A rank's
positions are contiguous.
Messages of the next step are sent while a step computes. Results are sent back during the step after it.
Costs: docs/parallel/sequence_lightseq.md. Source: Li et al., arXiv 2310.03294, whose code needs an even p; this form does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parallel.mesh.collectives import Messages
from parallel.sequence.method import Known, Method, SavedTensors
from parallel.sequence.order import ALL
from parallel.sequence.softmax import Gradients, Partial, attend, attend_backward, merge, nothing


@dataclass(frozen=True)
class Task:
    """An attention block: the queries of the rank `queries` with the keys of the rank `keys`. own: the computing rank holds the queries."""

    queries: int
    keys: int
    own: bool


def steps(size: int) -> int:
    """Return the number of ring steps in which `size` ranks compute all causal attention blocks."""
    return size // 2 + 1


def task(rank: int, step: int, size: int) -> Task | None:
    """Return the block that a rank computes at a step on a ring of `size` ranks; None if the rank is idle."""
    if rank >= step:
        return Task(rank, rank - step, True)
    return None if 2 * step == size else Task(rank - step + size, rank, False)


class Balanced(Method):
    """Causal ring attention for contiguous positions, in which ranks with little work compute blocks of other ranks."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, known: Known) -> tuple[Tensor, ...]:
        merged, here, results = nothing(q, known.sink_H), [k, v], Messages.none(self.axis)
        like = [torch.empty_like(q), torch.empty_like(merged.lse_BHL)]
        for step in range(steps(self.axis.size)):
            coming, answer = self._ask(step + 1, keys=[k, v], queries=[q]), []
            if (job := self._task(step)) is not None:
                block = (q, *here) if job.own else (*here, k, v)
                partial = attend(*block, triangle=step == 0, **self._known(job, known, q))
                if job.own:
                    merge(merged, partial)
                else:
                    answer = [x.contiguous() for x in partial]
            for partial in _pairs(results.wait()):
                merge(merged, partial)
            results = self._answer(step, answer, of_keys=[], of_queries=like)
            here = coming.wait()
        for partial in _pairs(results.wait()):
            merge(merged, partial)
        return merged.out_BHLC.to(q.dtype), merged.lse_BHL

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, kept: SavedTensors, known: Known) -> Gradients:
        out, lse = kept
        total, here, results = Gradients.zeros(q, k, v, known.bias), [k, v], Messages.none(self.axis)
        dq, dk, dv, _ = total
        for step in range(steps(self.axis.size)):
            coming, answer = self._ask(step + 1, keys=[k, v], queries=[grad, q, out, lse]), []
            if (job := self._task(step)) is not None:
                grad_there, q_there, out_there, lse_there = [grad, q, out, lse] if job.own else here
                k_there, v_there = here if job.own else [k, v]
                block = grad_there, q_there, k_there, v_there, Partial(out_there, lse_there)
                found = attend_backward(*block, triangle=step == 0, **self._known(job, known, q))
                own_queries, own_keys = job.queries == self.axis.index, job.keys == self.axis.index
                total.add(found, queries=ALL if own_queries else None, keys=ALL if own_keys else None)
                theirs = ([] if own_queries else [found.q_BHLC]) + ([] if own_keys else [found.k_BKSC, found.v_BKSC])
                answer = [x.to(dq.dtype).contiguous() for x in theirs]
            _add(results.wait(), dq, dk, dv)
            results = self._answer(step, answer, of_keys=[dk, dv], of_queries=[dq])
            here = coming.wait()
        _add(results.wait(), dq, dk, dv)
        return total

    def _task(self, step: int, ahead: int = 0) -> Task | None:
        """Return the task, at `step`, of the rank `ahead` places after this one on the ring; None if that rank is idle."""
        return task((self.axis.index + ahead) % self.axis.size, step, self.axis.size)

    def _known(self, job: Task, known: Known, like: Tensor) -> dict[str, Any]:
        return {"queries": known.tokens(job.queries, like), "keys": known.tokens(job.keys, like), "bias": known.bias}

    def _ask(self, step: int, *, keys: list[Tensor], queries: list[Tensor]) -> Messages:
        """Start the messages of ring step `step`. The rank `step` places ahead gets the inputs of its task from this rank; this rank
        gets the inputs of its own task from the rank `step` places behind. keys: tensors that are sent if the rank ahead computes its own
        queries. queries: tensors that are sent if it computes this rank's queries with its own keys."""
        if step >= steps(self.axis.size):
            return Messages.none(self.axis)
        theirs, mine = self._task(step, ahead=step), self._task(step)
        send = [] if theirs is None else keys if theirs.own else queries
        like = [] if mine is None else keys if mine.own else queries
        return self._messages(step, send, like)

    def _answer(self, step: int, results: list[Tensor], *, of_keys: list[Tensor], of_queries: list[Tensor]) -> Messages:
        """Start the messages that return the results of ring step `step`: send `results` to the rank `step` places behind, and receive from
        the rank `step` places ahead. The received tensors have the shapes of `of_keys` if that rank computed with this rank's keys, of
        `of_queries` if with its queries."""
        theirs = self._task(step, ahead=step) if step else None
        return self._messages(-step, results if step else [], [] if theirs is None else of_keys if theirs.own else of_queries)

    def _messages(self, ahead: int, send: list[Tensor], like: list[Tensor]) -> Messages:
        there, back = self.axis.index + ahead, self.axis.index - ahead
        return Messages(self.axis, send=[(x, there) for x in send], receive=[(torch.empty_like(x), back) for x in like])


def _pairs(received: list[Tensor]) -> list[Partial]:
    return [Partial(*received)] if received else []


def _add(received: list[Tensor], dq: Tensor, dk: Tensor, dv: Tensor) -> None:
    """Add received gradients, [], [dq] or [dk, dv], to this rank's gradients in place."""
    totals = (dk, dv) if len(received) == 2 else (dq,)
    for total, more in zip(totals, received, strict=False):
        total += more
