"""Learning-rate schedules as functions of the position: those that a DeepSpeed JSON can name, and Megatron-LM's.

*Position* is the number of steps that the scheduler has taken; `rate(position)` is the rate that the optimizer's
next update then uses. A scheduler of DeepSpeed (deepspeed/runtime/lr_schedules.py, 0.19.8) that has taken N steps has
`last_batch_iteration` N - 1, written b below. Operations are in the order of the source, so that results are equal to
the last bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol


class Schedule(Protocol):
    """A learning rate for every position; `end` is the position from which it stays, None where it never does."""

    def rate(self, position: int) -> float: ...

    @property
    def end(self) -> int | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """No scheduler: the rate that the optimizer was given."""

    lr: float

    def rate(self, position: int) -> float:
        return self.lr

    @property
    def end(self) -> int | None:
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Warmup:
    """`WarmupLR`: min + (max - min) g(b), and min before the first step.

    g is b / W ("linear") or ln(b + 1) / ln(W) (any other type) while b < W, and 1 from there; W is at least 2.
    """

    min_lr: float
    max_lr: float
    warmup_steps: int
    kind: str = "log"

    def rate(self, position: int) -> float:
        if position == 0:
            return self.min_lr
        return self.min_lr + ((self.max_lr - self.min_lr) * self._factor(position - 1))

    def _factor(self, b: int) -> float:
        return _warming(b, self.warmup_steps, self.kind) if b < max(2, self.warmup_steps) else 1.0

    @property
    def end(self) -> int | None:
        return max(2, self.warmup_steps) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupDecay(Warmup):
    """`WarmupDecayLR`: as `WarmupLR` while b < W, then g = max(0, (T - b) / max(1, T - W)) with T the total steps."""

    total_steps: float

    def _factor(self, b: int) -> float:
        warmup = max(2, self.warmup_steps)
        if b < warmup:
            return _warming(b, self.warmup_steps, self.kind)
        return max(0.0, float(self.total_steps - b) / float(max(1.0, self.total_steps - warmup)))

    @property
    def end(self) -> int | None:
        return max(math.ceil(self.total_steps), max(2, self.warmup_steps)) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupCosine:
    """`WarmupCosineLR`: the optimizer's own rate times a ratio, and 0 before the first step.

    The ratio is r + (1 - r) g(b) while b < W, with g as for `WarmupLR` and r the ratio of the beginning; then
    c + (1 - c) (1 + cos(pi p)) / 2, at least 0, with p = min(1, (b - W + 1) / max(1, T - W)) and c the ratio of the
    end. Releases before 0.19.8 do not stop at p = 1.
    """

    base_lr: float
    warmup_steps: int
    total_steps: float
    min_ratio: float = 0.0
    end_ratio: float = 0.0001
    kind: str = "log"

    def rate(self, position: int) -> float:
        return 0.0 if position == 0 else self.base_lr * self._ratio(position - 1)

    def _ratio(self, b: int) -> float:
        warmup = max(2, self.warmup_steps)
        if b < warmup:
            return self.min_ratio + _warming(b, self.warmup_steps, self.kind) * (1.0 - self.min_ratio)
        progress = min(1.0, (b - warmup + 1) / max(1, self.total_steps - warmup))
        cosine = (1 + math.cos(math.pi * progress)) / 2
        return max(0.0, self.end_ratio + (1.0 - self.end_ratio) * cosine)

    @property
    def end(self) -> int | None:
        return max(math.ceil(self.total_steps), max(2, self.warmup_steps) + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class OneCycle:
    """`OneCycle`: from min to max in `first` steps and back in `second`, then min / (1 + decay_rate d / decay_size).

    In the cycle, at position n of length S = first + second: x = n / S - floor(n / S), and the share of the way up is
    x / (first / S) up to there, then (x - 1) / (first / S - 1). With stairs it is floor(share * stairs) / stairs, taken
    from n itself (since 0.19.8). d = n - S. Without a decay size or rate the rate stays at min.
    """

    min_lr: float
    max_lr: float
    first: float = 2000.0
    second: float = 2000.0
    first_stairs: float = 0
    second_stairs: float = 0
    decay_size: float = 0.0
    decay_rate: float = 0.0

    def rate(self, position: int) -> float:
        total = self.first + self.second
        if position - 1 < total:
            return self.min_lr + (self.max_lr - self.min_lr) * self._share(position)
        if self._flat:
            return self.min_lr
        return self.min_lr / (1 + self.decay_rate * ((position - 1 - total + 1) / self.decay_size))

    def _share(self, position: int) -> float:
        total = self.first + self.second
        turn = self.first / total
        cycle = math.floor(1 + position / total)
        x = 1.0 + position / total - cycle
        share, stairs = (x / turn, self.first_stairs) if x <= turn else ((x - 1) / (turn - 1), self.second_stairs)
        if stairs <= 0:
            return share
        within = position % total
        if within <= self.first:
            return math.floor(within * stairs / self.first) / stairs
        return math.floor((total - within) * stairs / self.second) / stairs

    @property
    def _flat(self) -> bool:
        return math.isclose(self.decay_size, 0) or math.isclose(self.decay_rate, 0)

    @property
    def end(self) -> int | None:
        return math.ceil(self.first + self.second) + 1 if self._flat else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeTest:
    """`LRRangeTest`: min (1 + r n / size) at position n, with the whole part of n / size in a staircase."""

    min_lr: float
    step_size: int = 2000
    step_rate: float = 1.0
    staircase: bool = False

    def rate(self, position: int) -> float:
        interval = float(position) / self.step_size
        return self.min_lr * (1 + self.step_rate * (math.floor(interval) if self.staircase else interval))

    @property
    def end(self) -> int | None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronRate:
    """`OptimizerParamScheduler.get_lr` (megatron/core/optimizer_param_scheduler.py, the same in 0.16.1 and 0.19.2).

    Positions count what the scheduler is stepped by: samples. With n the position, W warm-up and D decay:

    * init + (max - init) n / W while n <= W and W > 0; then max if constant; min where n > D;
    * inverse-square-root: max sqrt(max(W, 1)) / sqrt(max(n, 1)), at least min;
    * else min + k (max - min), with q = (n - W) / (D - W): linear k = 1 - q; cosine k = (cos(pi q) + 1) / 2; WSD
      k = 1 up to D - A, then with w = (n - (D - A)) / A: linear 1 - w, cosine (cos(pi w) + 1) / 2, exponential
      2 * 0.5 ** w - 1, minus_sqrt 1 - sqrt(w).
    """

    max_lr: float
    min_lr: float = 0.0
    init_lr: float = 0.0
    warmup: int = 0
    decay: int
    style: str = "linear"
    wsd_decay: int | None = None
    wsd_style: str = "exponential"

    def __post_init__(self) -> None:
        styles = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
        if self.style not in styles or self.wsd_style not in ("linear", "cosine", "exponential", "minus_sqrt"):
            raise ValueError(f"unknown decay style {self.style!r}, or {self.wsd_style!r} of WSD")
        if not 0 <= self.warmup < self.decay or (self.style == "WSD" and not self.wsd_decay):
            raise ValueError("warm-up ends before decay does, and WSD needs the length of its decay")

    def rate(self, position: int) -> float:
        if self.warmup > 0 and position <= self.warmup:
            return self.init_lr + ((self.max_lr - self.init_lr) * float(position) / float(self.warmup))
        if self.style == "constant":
            return self.max_lr
        if position > self.decay:
            return self.min_lr
        if self.style == "inverse-square-root":
            return max(self.min_lr, float(self.max_lr * max(self.warmup, 1) ** 0.5 / (max(position, 1) ** 0.5)))
        return self.min_lr + self._share(position) * (self.max_lr - self.min_lr)

    def _share(self, position: int) -> float:
        done = float(position - self.warmup) / float(self.decay - self.warmup)
        style = self.style
        if style == "WSD":
            assert self.wsd_decay is not None
            begin = self.decay - self.wsd_decay
            if position <= begin:
                return 1.0
            done, style = float(position - begin) / float(self.wsd_decay), self.wsd_style
        if style == "linear":
            return 1.0 - done
        if style == "cosine":
            return 0.5 * (math.cos(math.pi * done) + 1.0)
        return (2.0 * math.pow(0.5, done)) - 1.0 if style == "exponential" else 1.0 - math.sqrt(done)

    @property
    def end(self) -> int | None:
        return self.warmup if self.style == "constant" else self.decay + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronWeightDecay:
    """`OptimizerParamScheduler.get_wd`, to be multiplied by the group's `wd_mult`.

    start + k (end - start) with q = n / I while n <= I, then end: linear k = q; cosine k = (cos(pi (1 - q)) + 1) / 2.
    """

    start: float
    stop: float
    increase: int = 0
    style: str = "constant"

    def __post_init__(self) -> None:
        if self.style not in ("constant", "linear", "cosine"):
            raise ValueError(f"unknown increment style {self.style!r}")
        if self.style == "constant" and self.start != self.stop:
            raise ValueError("a constant weight decay ends as it starts")
        if self.increase < 0 or (self.style != "constant" and not self.increase):
            raise ValueError("a weight decay that changes needs the length of its increase")

    def weight_decay(self, position: int) -> float:
        if position > self.increase or self.style == "constant":
            return self.stop
        done = float(position) / float(self.increase)
        share = done if self.style == "linear" else 0.5 * (math.cos(math.pi * (1 - done)) + 1.0)
        return self.start + share * (self.stop - self.start)


def _warming(b: int, steps: int, kind: str) -> float:
    """The part of a warm-up of DeepSpeed that is behind at `last_batch_iteration` b."""
    if kind == "linear":
        return b / max(2, steps)
    return 1.0 / math.log(max(2, steps)) * math.log(b + 1)
