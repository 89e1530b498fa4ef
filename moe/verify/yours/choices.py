"""Replays the single process's routing choices on ranks, so that a tie between two experts neither hides nor fakes an error
(`record(pin=)`).

    one process     the indices that each topk or argmax over a token's scores returns are stored, with module and number of the call
    several ranks   topk and argmax return these indices for the rank's tokens; topk's values are the rank's own scores at these indices

The scores of the experts that the rank itself would have chosen are recorded as outputs of the router. At a tie they equal the single
process's; they differ if a choice is wrong. A router is refused if its choices cannot be replayed: it gets another number of tokens,
chooses by another function than topk or argmax, or runs again in recomputation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from moe.verify.yours.align import samples
from moe.verify.yours.values import Piece
from parallel.errors import BadInput

FILE = "choices.pt"
_DIM = {"topk": (2, -1), "argmax": (1, None)}  # function -> (position, default) of its argument `dim`
# "tokens": the single process's token ids [B, L]; "MODULE NUMBER": choices for them in call NUMBER of topk or argmax in MODULE [B L, ...]
Given = dict[str, Tensor]


class Choices(TorchFunctionMode):
    """Stores the choices of a step, or replays the choices `given`. keep: called with (module, number of its call of topk or argmax, scores
    of the rank's own choices)."""

    def __init__(self, given: Given | None, keep: Callable[[str, int, Tensor], None]) -> None:
        super().__init__()
        self.given, self.keep = given, keep
        self.kept: dict[str, list[Tensor]] = {}
        self.inside: list[str] = []
        self.entered: set[str] = set()
        self.replayed = {"tokens"}
        self.calls: Counter[str] = Counter()
        self.tokens: Tensor | None = None  # token ids [b, l] of the current call of the model
        self.at: Tensor | None = None  # [b * l]: index of each of these tokens among the single process's tokens

    def enter(self, module: str, tensors: list[Tensor]) -> None:
        """Note that `module` is entered with these tensors. The model's own first 2-D integer input is taken as the ids of this rank's
        tokens. Raises BadInput for tokens that the single process did not read, and if `check_replayed` does."""
        self.inside.append(module)
        self.entered.add(module)
        tokens = next((t for t in tensors if not t.is_floating_point() and t.dim() == 2), None)
        if len(self.inside) > 1 or tokens is None:
            return
        self.check_replayed()  # the choices of the micro-batch before this one
        self.entered, self.replayed = {module}, {"tokens"}
        self.calls.clear()
        self.tokens = tokens.detach().cpu()
        if self.given is None:
            self.kept.setdefault("tokens", []).append(self.tokens)
            return
        one, here = (Piece.of(t, "", t.numel()) for t in (self.given["tokens"], self.tokens))
        found = samples(one, here, 0)
        if not found.found:
            got = "tokens that the run on one process did not read"
            raise BadInput("pin", got=got, needed="tokens of that run's batch", fix="record without pin")
        self.at = (found.rows[:, None] * found.length + found.cols).flatten()

    def leave(self) -> None:
        self.inside.pop()

    def check_recomputed(self, module: str) -> None:
        """Raise BadInput if `module`, which runs again in the backward pass (activation checkpointing), is a router: recorded choices are
        replayed only in the forward pass."""
        if any(_module_of(key) == module for key in self.given or self.kept):
            got, fix = f"{module} inside activation checkpointing", "record without activation checkpointing, or without pin"
            raise BadInput("pin", got=got, needed="routers that run once", fix=fix)

    def check_replayed(self) -> None:
        """Raise BadInput for a micro-batch in which a router on this rank made its own choices."""
        for key in self.given or ():
            if key not in self.replayed and (module := _module_of(key)) in self.entered:
                got = f"{module or 'the model'}, which chose for other tokens than the run on one process, or not by topk or argmax"
                needed = "routers that choose for this rank's tokens by topk or argmax"
                raise BadInput("pin", got=got, needed=needed, fix="record without pin")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, name = kwargs or {}, getattr(func, "__name__", "")
        out = func(*args, **given)
        if name not in _DIM or not self.inside or torch._C._current_graph_task_id() != -1:
            return out
        scores = args[0] if args else given["input"]
        place, default = _DIM[name]
        dim = given.get("dim", args[place] if len(args) > place else default)
        if dim not in (-1, scores.dim() - 1) or scores.dim() < 2 or hasattr(scores, "placements"):
            return out
        chosen = self._replayed(scores, out.indices if name == "topk" else out, out.values if name == "topk" else scores.amax(-1))
        return torch.return_types.topk((scores.gather(-1, chosen), chosen)) if name == "topk" else chosen

    def _replayed(self, scores: Tensor, own: Tensor, best: Tensor) -> Tensor:
        """Return the choices that the single process recorded for the rank's tokens, to use in place of `own`. On the single process,
        record `own` and return it. A call whose scores do not have one row for each of the rank's tokens is not a router's, and gets `own`.
        own: the choices that topk or argmax made here. best: the scores of these choices."""
        if self.tokens is None:
            fix = "record without pin"
            raise BadInput(
                "pin", got="a call of the model without token ids", needed="token ids [B, L], by which choices are matched", fix=fix
            )
        lead = 2 if scores.shape[:2] == self.tokens.shape else 1
        if lead == 1 and scores.shape[0] != self.tokens.numel():
            return own
        module = self.inside[-1]
        key = f"{module} {self.calls[module]}"
        self.keep(module, self.calls[module], best.detach())
        self.calls[module] += 1
        if self.given is None:
            self.kept.setdefault(key, []).append(own.detach().flatten(0, lead - 1).cpu())
            return own
        theirs = self.given.get(key)
        if theirs is None or self.at is None or theirs.shape[1:] != own.shape[lead:]:
            got = f"a choice in {module} that the run on one process did not make"
            raise BadInput("pin", got=got, needed="the model that one process ran", fix="record without pin")
        self.replayed.add(key)
        return theirs[self.at].reshape(own.shape).to(own.device)

    def write(self, folder: str | Path) -> Given:
        """Write the stored choices into the folder, and return them. Raises BadInput if no choices are stored, or if micro-batches have
        sequences of different lengths."""
        if len(self.kept) < 2:
            got, needed = "a step in which no topk or argmax chooses for tokens", "a router that chooses by topk or argmax"
            raise BadInput("pin", got=got, needed=needed, fix="record without pin")
        if len(lengths := {part.shape[1] for part in self.kept["tokens"]}) > 1:
            got = f"micro-batches with sequences of {' and '.join(map(str, sorted(lengths)))} tokens"
            raise BadInput("pin", got=got, needed="sequences of equal length in the run on one process", fix="pad them to one length")
        given = {key: torch.cat(parts) for key, parts in self.kept.items()}
        Path(folder).mkdir(parents=True, exist_ok=True)
        torch.save(given, Path(folder) / FILE)
        return given


def _module_of(key: str) -> str:
    return key.rpartition(" ")[0]


def read(folder: str | Path) -> Given:
    """Return the choices that the single process wrote into the folder. Raises BadInput if there are none."""
    try:
        given: Given = torch.load(Path(folder) / FILE, weights_only=True)
    except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
        needed, fix = "the folder of a step that one process recorded with pin", f"in one process: record(..., pin={str(folder)!r})"
        raise BadInput("pin", got=f"{folder} without {FILE}", needed=needed, fix=fix) from error
    return given
