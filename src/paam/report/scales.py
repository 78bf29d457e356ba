"""Axes: a range of values, the position of a value in percent, and ticks at round numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Tick:
    """``at``: position along the axis in percent."""

    at: float
    label: str


@dataclass(frozen=True)
class Axis:
    low: float
    high: float
    log: bool = False
    count: float = 5

    def place(self, value: float) -> float:
        """Position between ``low`` and ``high`` in percent, clipped to the plot."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, self.low))
        return round(min(max(100 * (value - low) / (high - low), 0.0), 100.0), 2)

    @property
    def ticks(self) -> list[Tick]:
        values = _decades(self.low, self.high) if self.log else round_steps(self.low, self.high, self.count)
        labels = [f"{value:g}" for value in values] if self.log else _labels(values)
        return [Tick(self.place(value), label) for value, label in zip(values, labels, strict=True)]


def linear(values: Iterable[float], *, count: int = 5, least: float = 1e-9) -> Axis:
    """An axis with some padding around the values; ``least``: its minimum range."""
    values = list(values) or [0.0, 1.0]
    low, high = min(values), max(values)
    air = max(0.06 * (high - low), (least - (high - low)) / 2, 1e-9 * abs(high))
    return Axis(low - air, high + air, count=count)


def logarithmic(values: Iterable[float]) -> Axis:
    """Logarithmic if the values are positive and span a factor of more than 20, else linear from 0."""
    values = list(values) or [1.0]
    low, high = min(values), max(values)
    if low > 0 and high / low > 20:
        return Axis(low / 1.25, high * 1.25, log=True)
    return Axis(min(low, 0.0), max(high, 1e-6) * 1.06)


def round_steps(low: float, high: float, count: float) -> list[float]:
    """About ``count`` multiples of 1, 2 or 5 times a power of ten within a range."""
    step = round_step((high - low) / max(count, 1))
    return [round(k * step, 12) for k in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def round_step(raw: float) -> float:
    """The nearest of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(raw))
    return min((power, 2 * power, 5 * power, 10 * power), key=lambda step: abs(math.log(step / raw)))


def _decades(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if len(powers) <= 4 else (1,)
    return [v for power in powers for k in steps if low <= (v := k * 10.0**power) <= high]


def _labels(values: list[float]) -> list[str]:
    """Labels with the same number of decimals and with thousands separators."""
    if len(values) < 2:
        return [f"{value:g}" for value in values]
    digits = max(0, -math.floor(math.log10(values[1] - values[0]) + 1e-9))
    return [f"{value:,.{digits}f}" for value in values]
