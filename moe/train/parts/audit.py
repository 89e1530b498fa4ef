"""`train.audit_every: n` checks every n-th step for silent data corruption, with the comparisons of parallel/watch/audit.py.

    before the step     ranks' copies of a weight or optimizer state must have equal hashes; a differing copy is replaced
    first pass          forward and backward; gradients and the step's numbers are hashed, then dropped
    second pass         forward and backward again: hashes must equal the first pass's on every rank, and those of weights and optimizer
                        states must be as before the step; a changed tensor is replaced by another rank's copy
    after the update    copies are compared again. Every save compares them too, so that no checkpoint holds a corrupt copy

Random numbers depend only on seed, step, layer and token, so both passes should compute the same bits. If their hashes differ, passes are
repeated until two agree, and the step uses these gradients. If no two of ATTEMPTS passes agree, or a tensor has no intact copy, all ranks
end with a line that names the checkpoint to resume from.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from moe.experts.experts import in_blocks
from moe.model.transformer import Block, Transformer, extra_state
from moe.train.parts.numbers import Numbers
from parallel.data.engine import Engine
from parallel.errors import Ended
from parallel.mesh.collectives import largest
from parallel.mesh.layout import Layout
from parallel.mesh.mesh import Mesh
from parallel.store.checkpoint import numbered
from parallel.watch import watchdog
from parallel.watch.audit import Finding, Held, by_change, by_majority, copies_of, fingerprint, fingerprints, lines_of_all, mend

ATTEMPTS = 6  # largest number of passes (forward and backward) of one step
MOST_NAMED = 3  # largest number of differing tensors or layers that a message names
Pass = tuple[Tensor, dict[str, int]]  # (hashes of gradients and of the step's numbers, hashes of layers' outputs)


class Auditor:
    """Audits of one rank. every: steps between audits; 0: no audits. record: writes a line of metrics.jsonl. note: prints a line. folder:
    the run's folder of checkpoints."""

    def __init__(
        self, engine: Engine, mesh: Mesh, *, every: int, record: Callable[[dict[str, Any]], None], note: Callable[[str], None], folder: Path
    ) -> None:
        self.engine, self.mesh, self.every, self.world = engine, mesh, every, mesh.axis("world", label="the audit")
        self.record, self.note, self.folder = record, note, folder
        self.step = 0  # last step after which copies were compared

    def due(self, step: int) -> bool:
        """Return whether step number `step`, counted from 1, is audited."""
        return self.every > 0 and step % self.every == 0

    def passes(self, compute: Callable[[], Numbers], *, step: int) -> Numbers:
        """Call `compute`, which runs forward and backward passes of the step, until two calls give the same bits. Return the last call's
        numbers; the engine has its gradients. Collective. Raises Ended on all ranks if weights cannot be repaired or no two calls agree."""
        held, before = self.compare_copies(step, "before the step")
        seen: list[Pass] = []
        reasons: list[str] = []
        for attempt in range(ATTEMPTS):
            with layer_hashes(self.engine.module) as hashes:
                numbers = compute()
            watchdog.enter("the audit of the step", step=step)
            grads = list(self.engine.summed_gradients())
            mine = torch.cat((fingerprints(grads), torch.tensor([crc32(repr(numbers).encode())])))
            if attempt:
                changed = by_change(held, before, fingerprints(held), self.mesh)
                if self._settle(changed, step, "during the step"):
                    seen.clear()  # earlier passes read corrupt tensors, so later passes are not compared with them
                elif reasons := self._differences(grads, mine, hashes, seen):
                    self._report(step, f"another result in pass {attempt + 1}", reasons, "the passes are repeated")
                else:
                    return numbers
            seen.append((mine, hashes))
            self.engine.drop_gradients()
        named = _few(reasons) or "weights"
        line = f"step {step}: no two of {ATTEMPTS} passes give the same result ({named}); {self._how_to_resume()}"
        raise Ended(line, prints=self.world.index == 0)

    def compare_copies(self, step: int, when: str) -> tuple[list[Held], Tensor]:
        """Make all ranks' copies of each tensor equal. Return this rank's tensors and their hashes. when: words for messages, such as
        "before the step". Collective. Raises Ended on all ranks if a copy cannot be repaired."""
        held = self._held()
        prints = fingerprints(held)
        if self._settle(by_majority(held, prints, self.mesh), step, when, looks_again=True):
            held = self._held()
            prints = fingerprints(held)
            # copies still differ if two pipeline stages hold the tensor and took different values as intact, or if the fault recurs
            if left := self._on_all(by_majority(held, prints, self.mesh)):
                self._end(step, when, left)
        self.step = step
        return held, prints

    def before_save(self, step: int) -> None:
        """Compare copies before a save, unless they were already compared after this step. Collective."""
        if self.every and self.step != step:
            self.compare_copies(step, "before saving")

    def _on_all(self, found: Sequence[object]) -> list[str]:
        """Return the texts of `found` on all ranks, as one list that is the same on every rank. Collective."""
        return lines_of_all([str(one) for one in found], self.world)

    def _held(self) -> list[Held]:
        """Return this rank's weights, also frozen ones, optimizer states, and routers' biases."""
        extra = extra_state(self.engine.module)
        holders = {f"layers.{n}": self.engine.layouts[f"layers.{n}.ffn_norm.weight"].holders for n in _layers(self.engine.module)}
        blocks = [(name, kind, t, layout) for name, held, layout in in_blocks(self.engine.module) for kind, t in held.tensors.items()]
        return [
            *self.engine.tensors(),
            *(copies_of(*one) for one in blocks),
            *(copies_of(name, "value", t, Layout((), holders=holders[".".join(name.split(".")[:2])])) for name, t in extra.items()),
        ]

    def _settle(self, found: Sequence[Finding], step: int, when: str, *, looks_again: bool = False) -> bool:
        """Replace the corrupt tensors `found` on this rank by intact copies. Return whether any rank found a corrupt tensor. Raises Ended
        on all ranks for a tensor without an intact copy. when: text for the report. looks_again: True if the caller compares
        copies again afterwards; then a tensor that another pipeline stage repairs in this call does not end the run. Collective."""
        said = self._on_all(found)
        if not said:
            return False
        again = self.engine.copy_again()  # True if the engine has master weights: it has copied them into the model's weights again
        mended = self._on_all([one.held for one in found if one.source is not None]) if looks_again else []
        lost = [one for one in found if one.source is None and not (again and one.held.kind == "weight" and one.held.axes)]
        if beyond := self._on_all([one for one in lost if str(one.held) not in mended]):
            self._end(step, when, beyond)
        for one in found:
            if one.source is not None:
                mend(one)
        self.engine.copy_again()
        self._report(step, when, said, "replaced by an intact copy")
        return True

    def _differences(self, grads: list[Held], mine: Tensor, hashes: dict[str, int], seen: Sequence[Pass]) -> list[str]:
        """Return [] if this pass equals an earlier pass in `seen`, and the ranks' copies of gradients are equal. Otherwise return texts for
        a message: the first layer that differs from the previous pass; if none, the gradients that differ from it; if none, the copies that
        differ, or "the step's numbers". Collective. grads: this rank's summed gradients. mine: hashes of `grads`, then a hash of the
        step's numbers. hashes: of this pass's layer outputs and their gradients (`layer_hashes`)."""
        differs = [largest(float(not torch.equal(mine, earlier)), self.world) for earlier, _ in seen]
        copies = self._on_all(by_majority(grads, mine[:-1], self.mesh))
        if not copies and not all(differs):
            return []
        earlier, hashes_before = seen[-1]
        places = [name for name in hashes if hashes[name] != hashes_before.get(name)]
        first = _order(places[0]) if places else _NOWHERE
        first_of_all = -largest(-float(first), self.world)
        if first_of_all < _NOWHERE:
            local = places[:1] if first == first_of_all else []
        else:
            local = [str(one) for one, now, before in zip(grads, mine, earlier, strict=False) if now != before]
        return self._on_all([f"{place} on rank {self.mesh.rank}" for place in local]) or copies or ["the step's numbers"]

    def _report(self, step: int, when: str, found: Sequence[str], done: str) -> None:
        self.record({"kind": "event", "event": "corruption", "step": step, "found": f"{when}: {_few(found)}", "done": done})
        self.note(f"step {step}: silent corruption, {when}: {_few(found)}; {done}")

    def _end(self, step: int, when: str, found: Sequence[str]) -> None:
        self.record({"kind": "event", "event": "corruption", "step": step, "found": f"{when}: {_few(found)}", "done": "the run ends"})
        line = f"step {step}: silent corruption, {when}: {_few(found)}; no copy is known to be intact; {self._how_to_resume()}"
        raise Ended(line, prints=self.world.index == 0)

    def _how_to_resume(self) -> str:
        steps = [number for number, _ in numbered(self.folder)]
        return f"without --fresh the run continues from {self.folder / f'step-{max(steps)}'}" if steps else "start over with --fresh"


def _few(found: Sequence[str]) -> str:
    more = len(found) - MOST_NAMED
    return ", ".join(found[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


@contextmanager
def layer_hashes(model: torch.nn.Module) -> Iterator[dict[str, int]]:
    """Yield a dict that is filled when the context exits. "the forward pass of layers.3" -> hash of the layer's outputs; "the backward pass
    behind layers.3" -> hash of the gradients of these outputs. Hashes are summed over micro-batches; keys are in order of computation."""
    noted: defaultdict[str, list[Tensor]] = defaultdict(list)

    def after(layer: int, module: Any, args: Any, output: Any) -> None:
        x_BLD = output[0]
        noted[f"the forward pass of layers.{layer}"].append(fingerprint(x_BLD))
        if x_BLD.requires_grad:
            x_BLD.register_hook(lambda grad: noted[f"the backward pass behind layers.{layer}"].append(fingerprint(grad)))

    hashes: dict[str, int] = {}
    with ExitStack() as hooks:
        for layer, block in _layers(model).items():
            hooks.enter_context(block.register_forward_hook(partial(after, layer)))
        yield hashes
    hashes |= {name: int(torch.stack(noted[name]).sum()) for name in sorted(noted, key=_order)}


def _layers(model: torch.nn.Module) -> dict[int, Block]:
    assert isinstance(model, Transformer)
    return {number: block for number, block in enumerate(model.layers) if isinstance(block, Block)}


_NOWHERE = 10**6  # larger than every result of `_order`; means that no layer differs


def _order(name: str) -> int:
    """Return the key that sorts names of `layer_hashes` in order of computation: forward through the layers, then backward."""
    layer = int(name.rpartition(".")[2])
    return layer if "forward" in name else _NOWHERE - 1 - layer
