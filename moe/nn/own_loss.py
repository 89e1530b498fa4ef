"""A loss function from the user, `train.loss: module:name`. Its input is the log-probabilities that the model gives to the next tokens.

    name(predictions)  ->  a loss for each sequence [B]          the step's loss is their mean over the sequences of the global batch

A sequence's loss may depend on that sequence alone, so no layout and no micro-batch changes it. A sequence can hold several chats, such as
a preferred and a rejected answer (docs/use/dpo.py). The function gets no logits, so ranks may hold shards of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from moe.nn.context import Context
from moe.nn.vocabulary import as_targets
from moe.recipe.plugin import loaded
from parallel.errors import BadInput, counted, where

# B sequences, L tokens of each

_KEY = "train.loss"
Arranged = Callable[[Tensor], Tensor]  # exchanges or gathers tokens of a tensor [B, L] between ranks


class Predictions(NamedTuple):
    """Whole sequences of a micro-batch, each tensor [B, L]. logp_BL: log-probability of the next token, in nats, fp32 or wider, with
    gradient; 0 if that token does not count in the loss. next_BL: id of the next token; -100 if it does not count. read_BL: id of the input
    token; 0 for padding. chat_BL: number of the packed chat to which the input token belongs, from 0."""

    logp_BL: Tensor
    next_BL: Tensor
    read_BL: Tensor
    chat_BL: Tensor


class OwnLoss:
    """The user's function `name` (module:name). The first micro-batch also checks that each sequence's loss depends on that sequence
    alone."""

    def __init__(self, name: str) -> None:
        self.name, self.tried = name, False

    def __call__(self, logp_BL: Tensor, arranged: Arranged, *, targets_BL: Tensor, context: Context, whole: Arranged) -> Tensor:
        """Return this rank's share of the sum of the sequences' losses. `arranged` takes a tensor of this rank's own tokens, and returns
        that of the tokens for which this rank has logits. `whole` gathers whole sequences from the ranks that share them; each of these
        ranks computes the same losses. Raises BadInput if the function raises an error, or if its result is not one loss for each sequence,
        independent of other sequences."""
        begins_T = torch.zeros_like(context.tokens_T) if context.begins_T is None else context.begins_T.long()
        known = (arranged(x) for x in (as_targets(targets_BL), context.tokens_T.view_as(targets_BL), begins_T.view_as(targets_BL)))
        whole_BL, next_BL, read_BL, begins_BL = (whole(x) for x in (logp_BL, *known))
        given = Predictions(whole_BL, next_BL, read_BL, (begins_BL.cumsum(1) - 1).clamp(min=0))
        loss_B = self._called(given)
        if not self.tried:
            self.tried = True
            self._check_alone(given, loss_B)
        return loss_B.sum() * (logp_BL.shape[1] / whole_BL.shape[1])

    def _called(self, given: Predictions) -> Tensor:
        try:
            loss_B = loaded(_KEY, self.name, arguments=1)(given)
        except BadInput:
            raise
        except Exception as error:
            got = f"{self.name}, which raised {where(error)}"
            raise BadInput(_KEY, got=got, needed="a loss for each sequence", fix="correct the function") from error
        count = len(given.logp_BL)
        if not isinstance(loss_B, Tensor) or loss_B.shape != (count,) or not loss_B.is_floating_point():
            shown = f"{loss_B.dtype} of shape {list(loss_B.shape)}" if isinstance(loss_B, Tensor) else f"a {type(loss_B).__name__}"
            needed = f"a loss for each of {counted(count, 'sequence')}: numbers of shape [{count}]"
            raise BadInput(_KEY, got=f"{shown} from {self.name}", needed=needed, fix="sum over dim 1 only")
        if torch.is_grad_enabled() and given.logp_BL.requires_grad and not loss_B.requires_grad:
            got, needed = f"{self.name}, whose losses have no gradient", "losses computed from logp_BL"
            raise BadInput(_KEY, got=got, needed=needed, fix="leave out detach() and no_grad()")
        return loss_B

    @torch.no_grad()
    def _check_alone(self, given: Predictions, loss_B: Tensor) -> None:
        alone = [self._called(Predictions(*(x[number : number + 1] for x in given))) for number in range(len(loss_B))]
        if not torch.allclose(torch.cat(alone), loss_B, rtol=1e-4, atol=1e-6, equal_nan=True):
            needed = "a loss that depends only on its own sequence and is equal at each call, so that no layout changes it"
            raise BadInput(
                _KEY,
                got=f"{self.name}, whose loss of a sequence depends on other sequences or changes from call to call",
                needed=needed,
                fix="compute each sequence by itself, without random numbers",
            )
