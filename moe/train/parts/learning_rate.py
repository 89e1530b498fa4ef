"""The learning rate of an update (a step that was not skipped): it rises linearly over warmup_steps, then is optimizer.lr times a share.
The schedule (optimizer.schedule) gives the share:

constant       1
cosine         falls to min_lr_share along half a cosine                            (arXiv 1608.03983)
linear         falls linearly to min_lr_share
wsd            1, then falls linearly to min_lr_share over the last decay_share of all updates  (warm-up, stable, decay: arXiv 2404.06395)
inverse_sqrt   sqrt(warmup_steps / update), independent of the length of the run  (arXiv 1706.03762, section 5.3; T5, Switch)
module:name    a user's function (index of the update after the warm-up, number of such updates) -> share, 0 or more
"""

from __future__ import annotations

import math
from typing import Any

from moe.recipe.plugin import is_plugin, loaded
from moe.recipe.sections import Optimizer
from parallel.errors import BadInput, where


def own_share(name: str, update: int, total: int) -> float:
    """Return the share of lr that the user's function `name` (module:name) returns. update: index of the update after the warm-up. total:
    number of such updates. Raises BadInput if the function raises an error, or if the share is negative or not a finite number."""
    function = loaded("optimizer.schedule", name, arguments=2)
    try:
        share: Any = function(update, total)
    except Exception as error:
        got, needed = f"{name}, which raised {where(error)}", f"the share of optimizer.lr at update {update} of {total}"
        raise BadInput("optimizer.schedule", got=got, needed=needed, fix="correct the function") from error
    if not isinstance(share, int | float) or not 0 <= share < math.inf:
        needed = f"the share of optimizer.lr at update {update} of {total}, a number of at least 0"
        raise BadInput("optimizer.schedule", got=f"{share!r} from {name}", needed=needed, fix="return such a number")
    return float(share)


def learning_rate(update: int, settings: Optimizer, *, total: int) -> float:
    """Return the learning rate of update number `update`, counted from 0, out of `total` updates."""
    warm, low = settings.warmup_steps, settings.min_lr_share
    if update < warm:
        return settings.lr * (update + 1) / warm
    if is_plugin(settings.schedule):
        return settings.lr * own_share(settings.schedule, update - warm, max(1, total - warm))
    done = min(1.0, (update - warm) / max(1, total - warm))
    decay = max(warm, total * (1 - settings.decay_share))  # wsd: update at which the rate begins to fall
    shares = {
        "constant": 1.0,
        "cosine": low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done)),
        "linear": 1 - (1 - low) * done,
        "wsd": 1 - (1 - low) * min(1.0, max(0.0, (update - decay) / max(1.0, total - decay))),
        "inverse_sqrt": math.sqrt(max(1, warm) / (update + 1)),
    }
    return settings.lr * shares[settings.schedule]
