"""Formats a run's summary with units, for the table at its end and its report."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeGuard

from moe.records.redone import NOTHING
from parallel.errors import plain

MISSING = "–"


def summary_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (label, value) for each row of the table; a value that the summary does not have, or that is null, gets no row."""
    share = ("share of measured matmul speed", "matmul_share")
    if summary.get("mfu") is not None:
        share = ("model FLOPs utilization (MFU)", "mfu")
    unit = " nats per token" if "bits_per_byte" in summary else ""  # a run with train.loss has no bits per byte
    rows = [
        ("validation loss", fixed(summary.get("validation_loss"), ".4f", unit)),
        ("bits per byte", fixed(summary.get("bits_per_byte"), ".4f")),
        ("tokens per second", fixed(summary.get("tokens_per_second"), ",.0f")),
        (share[0], percent(summary.get(share[1]))),
        ("dropped choices", _dropped(summary)),
        ("model states, one process", _states(summary)),
        ("peak memory, one process", size(summary.get("peak_memory_bytes"))),
        ("memory against its prediction", _against(summary, "memory_bytes", size)),
        ("step against its prediction", _against(summary, "step_seconds", lambda value: f"{value:.3g} s")),
        ("parameters", _parameters(summary)),
        ("FLOPs per token", count(summary.get("flops_per_token"))),
        ("steps", fixed(summary.get("steps"), ",.0f")),
        ("skipped steps", _skipped(summary)),
        ("training time", duration(summary.get("train_seconds"))),
        ("made again", _redone(summary)),
        ("processes", fixed(summary.get("world"), ".0f")),
        ("hardware", _text(summary.get("hardware"))),
        ("commit", _text(summary.get("commit"))),
    ]
    return [(label, value) for label, value in rows if value != MISSING]


LAST = 0.1  # share of the steps, the last ones, whose dropped choices are reported separately: routing is learned by then


def dropped_shares(lines: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return how many of the tokens' choices of experts were dropped, as fractions: `dropped_share` in all steps, `dropped_share_last` in
    the last tenth."""
    training = [line for line in lines if line.get("kind", "train") == "train"]
    counts = [[sum(layer.get(what) or 0 for layer in line.get("moe") or ()) for what in ("kept", "dropped")] for line in training]
    last = counts[-max(1, round(LAST * len(counts))) :]
    return {"dropped_share": _share(counts), "dropped_share_last": _share(last)}


def _share(counts: Sequence[Sequence[float]]) -> float:
    kept, dropped = (sum(count[i] for count in counts) for i in (0, 1))
    return dropped / max(1.0, kept + dropped)


def _dropped(summary: Mapping[str, Any]) -> str:
    if summary.get("parameters_total", 0) == summary.get("parameters_active") and not summary.get("dropped_share"):
        return MISSING  # a dense model
    whole, last = percent(summary.get("dropped_share")), percent(summary.get("dropped_share_last"))
    return whole if last == MISSING else f"{last}, in the last tenth of the steps ({whole} in all)"


def why_skipped(loss_scale: Any) -> str:
    """Return the reason for a skipped step: an overflow if there is a loss scale (other than 1), else gradients that are not finite."""
    scaled = known(loss_scale) and loss_scale != 1
    return "gradients overflowed at a higher loss scale" if scaled else "gradients that were not finite"


def _skipped(summary: Mapping[str, Any]) -> str:
    skipped, last = summary.get("skipped") or 0, summary.get("skipped_last") or 0
    if not skipped:
        return MISSING
    scale = (summary.get("recipe_values") or {}).get("precision", {}).get("loss_scale", "none")
    ended = f"; these include the run's last {last:,}" if last else ""
    return f"{skipped:,}: {why_skipped(None if scale == 'none' else 2.0)}{ended}"


def _redone(summary: Mapping[str, Any]) -> str:
    found = NOTHING | (summary.get("redone") or {})
    if not found["resumes"]:
        return MISSING
    starts = f"{found['resumes']} time{'s' if found['resumes'] > 1 else ''}, {found['restarts']} of them by itself"
    steps = f"{found['steps']:,} step{'' if found['steps'] == 1 else 's'}"
    return f"{steps}, {duration(found['seconds'])}; resumed {starts}"


def _parameters(summary: Mapping[str, Any]) -> str:
    total, active = summary.get("parameters_total"), summary.get("parameters_active")
    if not known(total):
        return MISSING
    return count(total) if not known(active) or active == total else f"{count(total)}, {count(active)} active for a token"


def _states(summary: Mapping[str, Any]) -> str:
    parts = summary.get("state_bytes") or {}
    there = {name: bytes_ for name, bytes_ in parts.items() if known(bytes_) and bytes_}
    return f"{size(sum(there.values()))}: {', '.join(f'{name} {size(of)}' for name, of in there.items())}" if there else MISSING


def _against(summary: Mapping[str, Any], what: str, words: Callable[[Any], str]) -> str:
    found = summary.get("predicted") or {}
    predicted, measured = found.get(what), found.get(f"measured_{what}")
    if not known(predicted) or not known(measured) or not predicted:
        return MISSING
    beside = found.get("beside_bytes") if what == "memory_bytes" else None
    whole = predicted + beside if known(beside) and beside else predicted
    of = f" ({words(predicted)} of it tensors)" if whole > predicted else ""
    return f"{words(measured)}, predicted {words(whole)}{of}: {measured / whole:.2f} times"


def known(value: Any) -> TypeGuard[int | float]:
    """Return whether the value is a finite number (True and False are not numbers)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def fixed(value: Any, form: str, unit: str = "") -> str:
    """Format a finite number by the format `form`, with the unit; return a dash for any other value."""
    return f"{value:{form}}{unit}" if known(value) else MISSING


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return plain(", ".join(f"{key} {inner}" for key, inner in value.items() if inner is not None)) or MISSING
    return MISSING if value is None or value == "" else plain(str(value))


def percent(value: Any) -> str:
    """Format a share in per cent."""
    return f"{100 * value:.1f} %" if known(value) else MISSING


def size(value: Any) -> str:
    """Format a number of bytes in a binary unit."""
    if not known(value):
        return MISSING
    power = min(4, int(math.log2(value) // 10)) if value >= 1 else 0
    return f"{value / 1024**power:.{0 if power < 3 else 2}f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def count(value: Any) -> str:
    """Format a large count with three digits: 12.3 M."""
    if not known(value):
        return MISSING
    for unit, name in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            scaled = value / unit
            return f"{scaled:.{2 if scaled < 10 else 1 if scaled < 100 else 0}f} {name}"
    return f"{value:g}"


def duration(seconds: Any) -> str:
    """Format seconds as 42 s, 4 min 12 s or 3 h 05 min."""
    if not known(seconds):
        return MISSING
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def clock(seconds: Any) -> str:
    """Format seconds as a clock: 1:09, 2:05:07."""
    if not known(seconds):
        return MISSING
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def printable(text: str) -> str:
    """Replace control characters in generated text by U+FFFD, because a model of bytes may generate escape sequences."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
