"""Sums gradients over ranks during the backward pass, in buckets, of which several are summed at the same time.

    backward pass     ... w3 complete | w2 complete | w1 complete ...      bucket 0: w3, w2      bucket 1: w1
    sums                                bucket 0 --------------->
                                                      bucket 1 ------------>   the step waits for the rest

The sums of buckets start in a fixed order. Gradients are expected in the reverse order of the parameters, and buckets are sorted by their
last expected gradient. A bucket's sum starts when its gradients are complete and the sums of all buckets before it have started. So all
ranks call the same collectives in the same order, even if gradients become complete in different orders. Source: PyTorch Distributed
(arXiv 2006.15704), section 3.2.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from torch import Tensor, nn

from parallel.data.engine import OfStages
from parallel.mesh.gradients import Bucket, StartedSum, buckets_of, data_axis, start_sum
from parallel.mesh.layout import Layouts
from parallel.mesh.mesh import Mesh

# largest number of buckets with unfinished sums. Their copies of gradients take at most 256 MiB: an fp32 gradient larger than a bucket is
# summed without a copy
_MOST_STARTED = 8


class Buckets:
    """Sums the gradient of each of `parameters` (name -> parameter) over the ranks that hold a copy of the
    parameter but see different tokens (Layout.summed_over)."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], layouts: Layouts, mesh: Mesh) -> None:
        self.parameters, self.layouts, self.mesh = parameters, layouts, mesh
        self.expected: set[str] = set()  # parameters whose gradients are in this step's buckets
        self.coming: deque[Bucket] = deque()  # buckets whose sums have not started
        self.complete: set[str] = set()  # parameters with a complete gradient
        self.started: deque[Sequence[StartedSum]] = deque()  # sums of started buckets whose results are not stored yet, the oldest first
        for name, parameter in parameters.items():
            if parameter.requires_grad and data_axis(layouts[name], mesh).size > 1:
                parameter.register_post_accumulate_grad_hook(partial(self._completed, name))

    def expect(self, names: Iterable[str]) -> None:
        """Declare that the next backward pass completes the gradients of these parameters, so that their sums start during that pass."""
        trained = [name for name in names if self.parameters[name].requires_grad]
        self.expected.update(trained)
        elements = {name: self.parameters[name].numel() for name in reversed(trained)}
        place = {name: number for number, name in enumerate(elements)}  # position in the expected order of gradients
        found = buckets_of(elements, lambda name: data_axis(self.layouts[name], self.mesh))
        self.coming.extend(sorted(found, key=lambda bucket: place[bucket.names[-1]]))

    def start(self, names: Iterable[str]) -> None:
        """Start all sums that have not started, for these parameters and for parameters of earlier calls of `expect`. Collective."""
        self.expect([name for name in names if name not in self.expected])
        while self.coming:
            self._start(self.coming.popleft())
        self.complete.clear()
        self._store(most=_MOST_STARTED)

    def finish(self) -> None:
        """Wait for all started sums. Call it once a step."""
        self._store(most=0)
        self.expected.clear()

    def _completed(self, name: str, _: Tensor) -> None:
        if name not in self.expected or not self.coming:
            return  # not the last micro-batch, or a parameter that several pipeline stages hold (summed over the pipeline first)
        assert name not in self.complete, f"the gradient of {name} changed after it was complete"
        self.complete.add(name)
        while self.coming and self.complete.issuperset(self.coming[0].names):
            self._start(self.coming.popleft())

    def begin(self, bucket: Bucket, grads: Mapping[str, Tensor]) -> Sequence[StartedSum]:
        """Start to sum these gradients of a bucket (name -> gradient) on all ranks of its axis."""
        return [start_sum([*grads.values()], bucket.axis, first=bucket.names[0])]

    def _start(self, bucket: Bucket) -> None:
        self._store(most=_MOST_STARTED - 1)
        grads = {name: grad for name in bucket.names if (grad := self.parameters[name].grad) is not None}
        if grads:
            self.started.append(self.begin(bucket, grads))

    def _store(self, *, most: int) -> None:
        """Store the results of finished sums, and wait until the sums of at most `most` buckets are unfinished."""
        while self.started and (len(self.started) > most or all(one.work.is_completed() for one in self.started[0])):
            for one in self.started.popleft():
                one.finish()


class SummedEarly(OfStages):
    """Base class of engines that sum gradients over ranks during the backward pass, in the buckets `sums`. apart: names of the parameters
    whose gradients these buckets sum; torch's or DeepSpeed's engine sums the others."""

    sums: Buckets
    apart: Sequence[str]
    layouts: Layouts

    def expect_sums(self, names: Sequence[str]) -> None:
        self.sums.expect(self._summed_here(names))

    def start_sums(self, names: Sequence[str]) -> None:
        self.sums.start(self._summed_here(names))

    def _summed_here(self, names: Sequence[str]) -> list[str]:
        """Return `names` without the parameters that several pipeline ranks hold, because their gradients are first summed over the
        pipeline."""
        return [name for name in names if name in self.sums.parameters and not self.layouts[name].holders]

    def reduce(self) -> None:
        self.sums.start(self.apart)
        self.sums.finish()
