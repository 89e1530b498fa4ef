"""`train.audit_every: n` checks every n-th step for silent corruption, with the comparisons of parallel/watch/audit.py.

    before the step     copies of weights and optimizer states have equal hashes; a differing copy is replaced
    passes, once        gradients and the step's numbers are hashed, and dropped
    passes, again       hashes must be equal bit by bit on every rank; tensors that no code wrote meanwhile must not have changed
    after the update    copies are equal again; also before every save, so that no checkpoint holds a corrupt copy

Noise, dropout and routing are functions of a token's place in the run, so nothing is restored between the two computations. If they differ,
they are repeated until two agree. The gradients of those two are kept and are the same as without the disturbance. If no copy is known to
be intact, all ranks end with one line that names the checkpoint to resume from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

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

ATTEMPTS = 6  # limit on computations of one step
MOST_NAMED = 3


class Auditor:
    """Audits of one rank. `record` writes an event, `note` prints a line. `checkpoints`: the run's folder of checkpoints."""

    def __init__(
        self,
        engine: Engine,
        mesh: Mesh,
        *,
        every: int,
        record: Callable[[dict[str, Any]], None],
        note: Callable[[str], None],
        checkpoints: Path,
    ) -> None:
        self.engine, self.mesh, self.every, self.world = engine, mesh, every, mesh.axis("world", label="the audit")
        self.record, self.note, self.checkpoints = record, note, checkpoints
        self.step = 0  # the last step whose copies were compared

    def due(self, step: int) -> bool:
        """Return whether step number `step`, counted from 1, is audited."""
        return self.every > 0 and step % self.every == 0

    def passes(self, compute: Callable[[], Numbers], *, step: int) -> Numbers:
        """Return the numbers from `compute`, an accumulate, once two calls agree. The engine then holds the second call's gradients.
        Collective.

        Raises Ended on all ranks if weights cannot be repaired or no two calls agree.
        """
        held, before = self.compare_copies(step, "before the step")
        seen: list[tuple[Tensor, dict[str, int]]] = []
        reasons: list[str] = []
        for attempt in range(ATTEMPTS):
            with listening(self.engine.module) as heard:
                numbers = compute()
            watchdog.enter("the audit of the step", step=step)
            grads = list(self.engine.summed_gradients())
            mine = torch.cat((fingerprints(grads), torch.tensor([crc32(repr(numbers).encode())])))
            if attempt:
                changed = by_change(held, before, fingerprints(held), self.mesh)
                if self._settle(changed, step, "during the step"):
                    seen.clear()  # the earlier passes read corrupt tensors
                elif reasons := self._unlike(grads, mine, heard, seen):
                    self._tell(step, "computed otherwise the second time", reasons, "the passes are made again")
                else:
                    return numbers
            seen.append((mine, heard))
            self.engine.drop_gradients()
        named = _few(reasons) or "weights"
        raise Ended(f"step {step}: no two of {ATTEMPTS} equal passes agree ({named}); {self._otherwise()}", prints=self.world.index == 0)

    def compare_copies(self, step: int, when: str) -> tuple[list[Held], Tensor]:
        """Return this rank's tensors and their hashes once all copies are equal. Collective. Raises Ended on all ranks if repair fails."""
        held = self._held()
        prints = fingerprints(held)
        if self._settle(by_majority(held, prints, self.mesh), step, when, looks_again=True):
            held = self._held()
            prints = fingerprints(held)
            left = by_majority(held, prints, self.mesh)
            if said := lines_of_all([str(one) for one in left], self.world):  # copies on other stages, or a fault that recurs
                self._end(step, when, said)
        self.step = step
        return held, prints

    def before_save(self, step: int) -> None:
        """Compare copies before a save, unless this step has compared them already. Collective."""
        if self.every and self.step != step:
            self.compare_copies(step, "before saving")

    # --- findings ------------------------------------------------------------------------------------------------------------

    def _held(self) -> list[Held]:
        """Return weights, optimizer states, and the routers' biases."""
        extra = extra_state(self.engine.module)
        holders = {f"layers.{n}": self.engine.layouts[f"layers.{n}.ffn_norm.weight"].holders for n in _layers(self.engine.module)}
        return [
            *self.engine.tensors(),
            *(copies_of(name, "value", t, Layout((), holders=holders[".".join(name.split(".")[:2])])) for name, t in extra.items()),
        ]

    def _settle(self, found: Sequence[Finding], step: int, when: str, *, looks_again: bool = False) -> bool:
        """Replace every corrupt tensor that has an intact copy; return whether any rank found one. Raises Ended if one has no copy.
        Collective.

        `looks_again`: the caller compares again, so a tensor without an intact copy here may still be repaired from another stage.
        """
        said = lines_of_all([str(one) for one in found], self.world)
        if not said:
            return False
        again = self.engine.copy_again()  # then the optimizer's own weights are the intact copy for the model's weights
        mended = lines_of_all([str(one.held) for one in found if one.source is not None], self.world) if looks_again else []
        lost = [one for one in found if one.source is None and not (again and one.held.kind == "weight" and one.held.axes)]
        lost = [one for one in lost if str(one.held) not in mended]
        if beyond := lines_of_all([str(one) for one in lost], self.world):
            self._end(step, when, beyond)
        for one in found:
            if one.source is not None:
                mend(one)
        self.engine.copy_again()
        self._tell(step, when, said, "replaced by an intact copy")
        return True

    def _unlike(self, grads: list[Held], mine: Tensor, heard: dict[str, int], seen: Sequence[tuple[Tensor, dict[str, int]]]) -> list[str]:
        """Return the places at which these passes differ from every earlier one on some rank. The list is the same on every rank. It is
        empty if they agree with an earlier one and copies of gradients are equal. Collective."""
        apart = [largest(float(not torch.equal(mine, earlier)), self.world) for earlier, _ in seen]
        copies = lines_of_all([str(one) for one in by_majority(grads, mine[:-1], self.mesh)], self.world)
        if copies or all(apart):
            earlier, heard_before = seen[-1]
            places = [name for name in heard if heard[name] != heard_before.get(name)]
            first = _order(places[0]) if places else _NOWHERE
            first_of_all = -largest(-float(first), self.world)
            if first_of_all < _NOWHERE:
                local = places[:1] if first == first_of_all else []
            else:
                local = [str(one) for one, now, before in zip(grads, mine, earlier, strict=False) if now != before]
            return lines_of_all([f"{place} on rank {self.mesh.rank}" for place in local], self.world) or copies or ["the step's numbers"]
        return []

    def _tell(self, step: int, when: str, found: Sequence[str], done: str) -> None:
        self.record({"kind": "event", "event": "corruption", "step": step, "found": f"{when}: {_few(found)}", "done": done})
        self.note(f"step {step}: silent corruption, {when}: {_few(found)}; {done}")

    def _end(self, step: int, when: str, found: Sequence[str]) -> None:
        self.record({"kind": "event", "event": "corruption", "step": step, "found": f"{when}: {_few(found)}", "done": "the run ends"})
        line = f"step {step}: silent corruption, {when}: {_few(found)}; no copy is known to be intact; {self._otherwise()}"
        raise Ended(line, prints=self.world.index == 0)

    def _otherwise(self) -> str:
        steps = [number for number, _ in numbered(self.checkpoints)]
        return f"without --fresh the run continues from {self.checkpoints / f'step-{max(steps)}'}" if steps else "start over with --fresh"


def _few(found: Sequence[str]) -> str:
    more = len(found) - MOST_NAMED
    return ", ".join(found[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


# --- where passes differ -----------------------------------------------------------------------------------------------------


@contextmanager
def listening(model: torch.nn.Module) -> Iterator[dict[str, int]]:
    """Collect, until the context exits, hashes of each layer's output and of the gradient that reaches it, summed over micro-batches."""
    noted: dict[str, list[Tensor]] = {}
    handles = []

    def hook(layer: int) -> Callable[..., None]:
        def after(module: Any, args: Any, output: Any) -> None:
            x_BLD = output[0]
            noted.setdefault(f"the forward pass of layers.{layer}", []).append(fingerprint(x_BLD))
            if x_BLD.requires_grad:
                backward = f"the backward pass behind layers.{layer}"
                x_BLD.register_hook(lambda grad: noted.setdefault(backward, []).append(fingerprint(grad)))

        return after

    heard: dict[str, int] = {}
    try:
        for layer, block in _layers(model).items():
            handles.append(block.register_forward_hook(hook(layer)))
        yield heard
    finally:
        for handle in handles:
            handle.remove()
    heard |= {name: int(torch.stack(noted[name]).sum()) for name in sorted(noted, key=_order)}


def _layers(model: torch.nn.Module) -> dict[int, Block]:
    """Return this rank's blocks by layer number."""
    assert isinstance(model, Transformer)
    return {number: block for number, block in enumerate(model.layers) if isinstance(block, Block)}


_NOWHERE = 10**6


def _order(name: str) -> int:
    """Sort key in order of computation: forward through the layers, then backward."""
    layer = int(name.rpartition(".")[2])
    return layer if "forward" in name else _NOWHERE - 1 - layer
