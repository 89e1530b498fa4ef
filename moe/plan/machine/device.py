"""Predicts the time of one kernel on one accelerator: a roofline model with tiles, waves and a shortest time (floor).

    product (m, n, k)     tiles of a x b outputs; `units` processors compute one tile each at a time: waves = ceil(tiles / units)
                          seconds = max(waves * (k + ramp) * 2 a b / (rate of one processor), bytes / memory bandwidth, floor)
    all other kernels     seconds = max(bytes / memory bandwidth, floor)

Rates are sustained rates of large products, not the data sheet's peak. The prediction is the minimum over several tile sizes: small tiles
leave fewer processors idle, but reach a lower rate. A product is slower if the rows of its operands are not multiples of 128 bytes.

Sources: NVIDIA, "Matrix Multiplication Background" (tiles, waves, alignment); Williams et al., Roofline (CACM 2009).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

from moe.plan.job.hashed import hashed_once
from parallel.errors import harmless

RATED = ("bf16", "fp16", "tf32", "fp32")  # dtypes for which `peak_tflops` may have a rate, narrow dtypes first


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a number")
    return value


def _in_range(least: float) -> AfterValidator:
    def checked(number: float) -> float:
        if not least <= number <= MOST:
            raise ValueError(f"a number from {least:.3g} to {MOST:.0e}")
        return number

    return AfterValidator(checked)


def _harmless(text: str) -> str:
    if not harmless(text):
        raise ValueError("text without control characters")
    return text


def _rated(peaks: dict[str, float]) -> dict[str, float]:
    if not set(peaks) & set(RATED):
        raise ValueError(f"a rate for one of {', '.join(RATED)}")
    return peaks


# Types of the values in a cluster file. Formulas divide by a Positive; values below 1 / MOST or above MOST would make them overflow.
MOST = 1e15
Number = BeforeValidator(_no_bool)
Positive = Annotated[float, Number, _in_range(1 / MOST)]
NotNegative = Annotated[float, Number, _in_range(0)]
Count = Annotated[int, Number, Field(ge=1, le=1_000_000)]
Text = Annotated[str, AfterValidator(_harmless)]
NotEmpty = Field(min_length=1)
FILE = ConfigDict(extra="forbid", coerce_numbers_to_str=True)

# Tiles of a product's output: (rows, columns, fraction of a processor's rate). Small tiles need more memory traffic per operation. NVIDIA's
# guide measures tiles of 128 x 128 at about nine tenths of the rate of 256 x 128, the standard size.
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.92), (128, 64, 0.78), (64, 128, 0.78), (64, 64, 0.6))
RAMP = 96  # the start and end of a tile take as long as this number of further steps along k (assumed)
SPLITS = (1, 2, 4, 8)  # split-k: if tiles leave processors idle, k may be cut into this number of parts, which are summed in fp32


@hashed_once
@dataclass(frozen=True)
class Device:
    """One accelerator. GB/s are 10^9 bytes per second.

    units: number of processors (SMs). peak_tflops: dtype of a product -> TFLOP/s of the data sheet. sustained: fraction of the peak that
    large products reach in a long run. attention: fraction of the peak that fused attention reaches (forward, backward).
    memory_share: fraction of the memory bandwidth that pointwise kernels reach. launch_us: shortest time from one kernel to the next.
    rates: dtype -> FLOPs of a product -> measured TFLOP/s, which replaces the prediction by tiles for this dtype.
    attention_times: dtype -> measured picoseconds of fused attention: forward per FLOP and per (query, key) pair, backward per FLOP and
    per pair. (On a CPU core, the softmax of a pair takes considerable time.) watts: power while computing; idle_watts: otherwise.
    """

    __pydantic_config__ = FILE
    name: Text
    memory_gib: Positive
    memory_gb_s: Positive
    units: Count
    peak_tflops: Annotated[dict[Text, Positive], AfterValidator(_rated)] = field(hash=False)
    sustained: Positive
    attention: tuple[Positive, Positive]
    memory_share: Positive = 0.85
    launch_us: NotNegative = 4.0
    watts: NotNegative = 0.0
    idle_watts: NotNegative = 0.0
    rates: dict[Text, Annotated[dict[Positive, Positive], NotEmpty]] = field(default_factory=dict, hash=False)
    attention_times: dict[Text, Annotated[list[NotNegative], Field(min_length=4, max_length=4)]] = field(default_factory=dict, hash=False)

    def rate(self, kind: str = "bf16") -> float:
        """Sustained FLOP/s of large products of dtype `kind`, or of the nearest wider dtype that the device has."""
        for wider in (kind, *RATED):
            if wider in self.peak_tflops:
                return self.peak_tflops[wider] * 1e12 * self.sustained
        raise AssertionError(f"{self.name} has no rate")

    @property
    def bandwidth(self) -> float:
        """Bytes per second that pointwise kernels read and write."""
        return self.memory_gb_s * 1e9 * self.memory_share

    def product(self, m: float, n: float, k: float, *, count: float = 1, kind: str = "bf16", of_weights: bool = False) -> float:
        """Seconds of `count` matrix products (m x k by k x n) in one kernel. of_weights: the product is a gradient of weights, so k counts
        tokens. The time depends on the alignment of the operands' rows in memory. Rows have k and n elements, or m and n for a gradient of
        weights. kind: dtype of the operands."""
        if min(m, n, k, count) <= 0:
            return 0.0
        return _product(self, round(m), round(n), round(k), max(1, round(count)), kind, round(m if of_weights else k))

    def stream(self, num_bytes: float, *, kernels: float = 1) -> float:
        """Seconds of `kernels` pointwise kernels that together read and write `num_bytes`."""
        return max(num_bytes / self.bandwidth, kernels * self.launch_us * 1e-6)

    def fused_attention(self, flops: float, pairs: float, *, backward: bool = False, kind: str = "bf16") -> float:
        """Seconds of fused attention (FlashAttention). pairs: number of (query, key) pairs. kind: dtype."""
        if kind in self.attention_times:
            of_operation, of_pair = self.attention_times[kind][2:] if backward else self.attention_times[kind][:2]
            seconds = (of_operation * flops + of_pair * pairs) * 1e-12
        else:
            seconds = flops / (self.rate(kind) / self.sustained * self.attention[1 if backward else 0])
        return max(seconds, self.launch_us * 1e-6)


@lru_cache(maxsize=200_000)
def _product(device: Device, m: int, n: int, k: int, count: int, kind: str, row: int) -> float:
    """Return the seconds of `count` products of m x k by k x n in one kernel. kind: dtype of the operands. row: number of elements in a row
    of the first operand in memory."""
    if kind in device.rates:
        return max(count * _measured(device.rates[kind], 2.0 * m * n * k), device.launch_us * 1e-6)
    element = {"fp32": 4, "tf32": 4, "fp8": 1}.get(kind, 2)
    of_unit = device.rate(kind) / device.units * min(alignment(size * element) for size in (n, row))
    best = math.inf
    for a, b, share in TILES:
        tiles = math.ceil(m / a) * math.ceil(n / b) * count
        for parts in SPLITS:
            if parts > 1 and tiles * parts > device.units:
                break
            waves = math.ceil(tiles * parts / device.units)
            summed = 4 * 2 * parts * m * n * count / device.bandwidth if parts > 1 else 0.0
            best = min(best, waves * (k / parts + RAMP) * 2 * a * b / (of_unit * share) + summed)
    moved = element * count * (m * k + k * n + m * n) / device.bandwidth
    return max(best, moved, device.launch_us * 1e-6)


def _measured(rates: dict[float, float], flops: float) -> float:
    """Seconds of a product with `flops` FLOPs. rates: FLOPs -> measured TFLOP/s, interpolated linearly over log(FLOPs)."""
    sizes = sorted(rates)
    at = bisect_left(sizes, flops)
    if at in (0, len(sizes)):
        return flops / (rates[sizes[min(at, len(sizes) - 1)]] * 1e12)
    low, high = sizes[at - 1], sizes[at]
    share = math.log(flops / low) / math.log(high / low)
    return flops / ((rates[low] + share * (rates[high] - rates[low])) * 1e12)


def alignment(num_bytes: int) -> float:
    """Fraction of the full rate that a product reaches if its rows have `num_bytes` bytes: 1 for multiples of 128 bytes, otherwise less.
    The values are fitted to BLOOM's published speeds."""
    for multiple, share in ((128, 1.0), (64, 0.85), (32, 0.8), (16, 0.7), (4, 0.5)):
        if num_bytes % multiple == 0:
            return share
    return 0.3
