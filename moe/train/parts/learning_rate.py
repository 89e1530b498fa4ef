"""The learning rate as a function of the number of updates made; a skipped step makes none.

warm-up    linear from 0 over warmup_steps
cosine     half a cosine down to min_lr_share                    (arXiv 1608.03983)
linear     straight down to min_lr_share
wsd        constant, then linear down over the last decay_share  (warm-up, stable, decay: arXiv 2404.06395)
module:name    a user's own function (update after the warm-up, number of such updates) -> share of the rate, 0 or more
inverse_sqrt   sqrt(warmup_steps / update), independent of the length of the run  (arXiv 1706.03762, section 5.3; T5, Switch)
"""

from __future__ import annotations

import math
from typing import Any

from moe.recipe.plugin import is_plugin, loaded
from moe.recipe.sections import Optimizer
from parallel.errors import BadInput, where


def own_share(name: str, update: int, total: int) -> float:
    """Return the share that a user's own function gives. Raises BadInput if it raises or returns anything but a number of at least 0."""
    function = loaded("optimizer.schedule", name, arguments=2)
    try:
        share: Any = function(update, total)
    except Exception as error:
        got, needed = f"{name}, which raised {where(error)}", f"the share of optimizer.lr at update {update} of {total}"
        raise BadInput("optimizer.schedule", got=got, needed=needed, fix="mend it") from error
    if not isinstance(share, int | float) or not 0 <= share < math.inf:
        needed = f"the share of optimizer.lr at update {update} of {total}, a number from 0"
        raise BadInput("optimizer.schedule", got=f"{share!r} from {name}", needed=needed, fix="return one")
    return float(share)


def learning_rate(update: int, settings: Optimizer, *, total: int) -> float:
    """Return the rate of update number `update` (0 for the first) of `total`."""
    warm = settings.warmup_steps
    if update < warm:
        return settings.lr * (update + 1) / warm
    if is_plugin(settings.schedule):
        return settings.lr * own_share(settings.schedule, update - warm, max(1, total - warm))
    low = settings.min_lr_share
    if settings.schedule == "cosine":
        share = min(1.0, (update - warm) / max(1, total - warm))
        return settings.lr * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * share)))
    if settings.schedule == "linear":
        share = min(1.0, (update - warm) / max(1, total - warm))
        return settings.lr * (1 - (1 - low) * share)
    if settings.schedule == "inverse_sqrt":
        return settings.lr * math.sqrt(max(1, warm) / (update + 1))
    if settings.schedule == "wsd":
        start = max(warm, total * (1 - settings.decay_share))
        share = min(1.0, max(0.0, (update - start) / max(1.0, total - start)))
        return settings.lr * (1 - (1 - low) * share)
    return settings.lr
