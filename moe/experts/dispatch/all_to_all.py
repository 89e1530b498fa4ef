"""Uneven all-to-all: each ep rank holds num_experts / ep experts. One all-to-all sends a row (copy of a token) for each kept
choice to the rank of the chosen expert, another brings the results back.

With `overlap_chunks` above 1, the experts of a rank are cut into chunks, and one chunk's rows are sent while another computes:

    link     | rows 0  | rows 1  | back 0, rows 2 | back 1, rows 3 | back 2  | back 3 |
    compute            | chunk 0 | chunk 1        | chunk 2        | chunk 3 |          backward pass: likewise, last chunk first

The numbers of rows of all chunks are exchanged in one message. Autograd runs the calls in reverse order, so the backward pass overlaps too.
Sources: FasterMoE (PPoPP 2022), Tutel (arXiv 2206.03382, section 4.2).
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
    reads = {"overlap_chunks": "only all_to_all sends chunks"}
    examples = {"all_to_all": {}, "overlapped": {"overlap_chunks": 2}}

    @property
    def chunks(self) -> int:
        return self.settings.overlap_chunks

    def check(self, *, ranks: int, held: int) -> None:
        if held % self.chunks:
            needed = f"a divisor of {held}, the experts that a rank holds (num_experts / ep)"
            fix = Set("it", *divisors(held)) | "lower degrees.ep"
            raise BadInput("dispatch.overlap_chunks", got=self.chunks, needed=needed, fix=fix)

    def traffic(self, load: Load) -> Traffic:
        rows = Message("ep", "all_to_all", load.rows * load.row_bytes, load.ranks, calls=self.chunks, busiest=load.busiest)
        first = min(1.0, 2 / self.chunks)  # share of rows sent while shared experts compute: rows of the first two chunks
        return Traffic.there_and_back(Message("ep", "counts", 8 * load.bins, load.ranks), rows=rows, meanwhile=first)

    def open(self, mesh: Mesh, sizes: Sizes) -> Exchange:
        from moe.experts.dispatch.steps import Steps

        return Steps.over(("ep",), mesh, sizes, chunks=self.chunks if mesh.axis("ep").size > 1 else 1)
