"""Tokens to the experts that were chosen for them, and their results back: one file a dispatcher, all with the same numbers.

    y_TD = dispatcher.run(x_TD, routing, experts)

A dispatcher knows where experts live; routing and the experts' network do not. Nothing is kept in it between calls.
Memory goes with routed rows (tokens x choices x width). Source: GShard (arXiv 2006.16668, section 3.2).
"""

from __future__ import annotations

from moe.dispatch.all_to_all import AllToAll
from moe.dispatch.base import Dispatcher, Dropout
from moe.dispatch.local import Local

__all__ = ["AllToAll", "Dispatcher", "Dropout", "Local"]
