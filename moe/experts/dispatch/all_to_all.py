"""Uneven all-to-all: rank i of ep holds the i-th chunk of experts; one all-to-all sends the kept rows, another brings results back.

With `overlap_chunks` above 1, the experts of a rank are cut into chunks, and one chunk's rows are sent while another computes.
"""

from __future__ import annotations

from moe.experts.dispatch.dispatcher import Dispatcher, Exchange, Sizes
from parallel.errors import BadInput
from parallel.fixes import Set
from parallel.mesh.mesh import Mesh, divisors
from parallel.mesh.traffic import Load, Message, Traffic


class AllToAll(Dispatcher):
    name = "all_to_all"
    about = "the usual choice"
    reads = {"overlap_chunks": "only all_to_all can be cut"}
    examples = {"all_to_all": {}, "overlapped": {"overlap_chunks": 2}}

    @property
    def chunks(self) -> int:
        return self.settings.overlap_chunks

    def check(self, *, ranks: int, held: int) -> None:
        if held % self.chunks:
            raise BadInput(
                "dispatch.overlap_chunks",
                got=self.chunks,
                needed=f"a divisor of the {held} experts that a rank holds (num_experts / ep)",
                fix=Set("it", *divisors(held)) | "lower degrees.ep",
            )

    def traffic(self, load: Load) -> Traffic:
        rows = Message("ep", "all_to_all", load.rows * load.row_bytes, load.ranks, calls=self.chunks)
        return Traffic.there_and_back(Message("ep", "counts", 8 * load.bins, load.ranks), rows=(rows,))

    def open(self, mesh: Mesh, sizes: Sizes) -> Exchange:
        from moe.experts.dispatch.chunked import Chunked
        from moe.experts.dispatch.steps import Steps

        if self.chunks > 1 and mesh.axis("ep").size > 1:
            return Chunked.over(("ep",), mesh, sizes, chunks=self.chunks)
        return Steps.over(("ep",), mesh, sizes)
