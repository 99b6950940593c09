"""
What a raw file holds: what was measured, with what came of it.

The format is the load tester's own; its fields are those of the JSON.  Nothing here knows
how a report looks.
"""

import math
from typing import Any, Literal, Self

from hdrh.histogram import HdrHistogram
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from loadtest.errors import UsageWrong
from loadtest.notation import Objective

REFUSALS = frozenset({"429", "503", "504"})
"""Statuses that say "not now": the queue is full, the server stops, the call's time is over."""

STAGES = ("queue", "assembly", "compute", "encode")
"""What a server may tell of a call, in the order of a call."""

BEYOND_STAGES = ("other", "network", "waiting", "rest")
"""
What the stages leave of a latency: the server's own time that no stage names, the way there and
back, waiting to be sent; `rest` is the first two together where the server told no total.
"""

_LOST_SHARE = 0.01
"""Refusals and failures above this share of the offered calls mean saturation."""

_LATE_SHARE = 0.05
"""More of the offered calls than this still unanswered at the end mean saturation."""


class RawInvalid(Exception):
    """A raw file cannot be reported; the message says which, where, and what was expected."""


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)


class Latency(_Value):
    """Latencies in milliseconds; all None where nothing was counted."""

    count: int = Field(ge=0)
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    p99_9: float | None = Field(default=None, alias="p99.9")
    max: float | None = None

    @model_validator(mode="after")
    def _has_figures(self) -> Self:
        figures = (self.mean, self.p50, self.p90, self.p99, self.p99_9, self.max)
        if self.count and None in figures:
            raise ValueError(f"expected every figure of {self.count} latencies, got some as null")
        return self


class Stage(_Value):
    """What one stage of the server took, in milliseconds."""

    p50: float | None = None
    p99: float | None = None
    mean: float | None = None


class Stages(_Value):
    """The server's own view of a call, from `Server-Timing`."""

    queue: Stage = Stage()
    assembly: Stage = Stage()
    compute: Stage = Stage()
    encode: Stage = Stage()
    total: Stage = Stage()

    def means(self) -> list[tuple[str, float]]:
        """Return (stage, mean in ms), in the order of a call."""
        named = ((name, getattr(self, name).mean) for name in STAGES)
        return [(name, mean) for name, mean in named if mean is not None]


class Window(_Value):
    """A part of the measured time: when it began, and what it saw."""

    at_s: float
    answered: int | None = None
    rate: float | None = None
    p50: float | None = None
    p99: float | None = None


class Lag(_Value):
    """How late the generator sent, in milliseconds."""

    p50: float | None = None
    p99: float | None = None
    max: float | None = None


class Work(_Value):
    """What each call asked for."""

    rows: str
    length: str
    weights: str
    mask: str
    format: str
    body: str = ""
    """The file whose bodies were sent."""

    @field_validator("rows", "length", mode="before")
    @classmethod
    def _as_text(cls, value: object) -> object:
        return str(value) if isinstance(value, int) else value


class Point(_Value):
    """One load on one kind of work."""

    id: str
    model: Literal["open", "closed"]
    arrivals: str | None = None
    rate: float | None = Field(default=None, gt=0)
    clients: int | None = Field(default=None, gt=0)
    work: Work
    warmup_s: float = 0.0
    seconds: float = Field(gt=0)
    address: str = ""
    """Of the server: the one of its name's addresses that was called."""
    offered: int = Field(ge=0)
    good_per_s: float | None = None
    latency_ms: Latency
    sent_ms: Latency | None = None
    histogram: str = ""
    statuses: dict[str, int] = {}
    codes: dict[str, int] = {}
    failures: dict[str, int] = {}
    stages_ms: Stages | None = None
    decode_ms: Stage | None = None
    windows: tuple[Window, ...] = ()
    lag_ms: Lag | None = None
    cpu_share: float | None = None
    checked: int = 0
    wrong: int = 0
    warnings: tuple[str, ...] = ()
    """What the load tester itself says against the figures."""

    @field_validator("histogram")
    @classmethod
    def _is_histogram(cls, value: str) -> str:
        try:
            if value:
                HdrHistogram.decode(value)
        except Exception:
            raise ValueError("expected an HDR histogram in base64, got something else") from None
        return value

    @property
    def load(self) -> float:
        """Calls a second offered, or clients that wait."""
        return float(self.rate or self.clients or 0)

    @property
    def load_text(self) -> str:
        """The same with its unit."""
        if self.model == "open":
            return f"{self.load:,.6g}/s".replace(",", "\N{NARROW NO-BREAK SPACE}")
        return f"{self.load:g} client{'' if self.load == 1 else 's'}"

    @property
    def series(self) -> tuple[str, str, Work]:
        """What the points of one curve share."""
        return self.model, self.arrivals or "", self.work

    @property
    def good(self) -> int:
        """Calls answered with a status of success."""
        return sum(n for status, n in self.statuses.items() if status.startswith("2"))

    @property
    def refused(self) -> int:
        """Calls that the server would not take now."""
        return sum(n for status, n in self.statuses.items() if status in REFUSALS)

    @property
    def failed(self) -> int:
        """Calls answered with any other status, or not at all."""
        answered = sum(self.statuses.values())
        return answered - self.good - self.refused + sum(self.failures.values())

    @property
    def unanswered(self) -> int:
        """Calls that were due and of which nothing more is known."""
        return self.offered - self.good - self.refused - self.failed

    @property
    def good_rate(self) -> float:
        """Good answers a second, of those that came within the measured time."""
        return self.good / self.seconds if self.good_per_s is None else self.good_per_s

    @property
    def parts_ms(self) -> dict[str, float]:
        """
        Mean latency in ms by `STAGES` and `BEYOND_STAGES`, those that are known.

        They add up to the mean latency.  Empty where the server told no stage.
        """
        whole = self.latency_ms.mean
        if self.stages_ms is None or whole is None:
            return {}
        sent = whole if self.sent_ms is None or self.sent_ms.mean is None else self.sent_ms.mean
        parts = dict(self.stages_ms.means())
        staged, total = sum(parts.values()), self.stages_ms.total.mean
        if total is None:
            parts["rest"] = max(0.0, sent - staged)
        else:
            parts["other"] = max(0.0, total - staged)
            parts["network"] = max(0.0, sent - max(total, staged))
        if self.model == "open":
            parts["waiting"] = max(0.0, whole - sent)
        return parts

    @property
    def offered_rate(self) -> float:
        """Calls a second that were really due: chance makes them more or fewer than the rate."""
        return self.offered / self.seconds

    @property
    def is_saturated(self) -> bool:
        """Whether calls were lost, or piled up: more were due than were answered in time."""
        if self.refused + self.failed > _LOST_SHARE * self.offered:
            return True
        if self.model == "closed":
            return False
        late = (self.offered_rate - self.good_rate) * self.seconds
        # So many are under way at any moment, the last one too; chance makes them more.
        quick_ms = min((window.p50 for window in self.windows if window.p50), default=0.0)
        under_way = self.offered_rate * quick_ms / 1e3
        return late > _LATE_SHARE * self.offered + under_way + 3 * math.sqrt(under_way)

    def latency_at(self, statistic: str) -> float | None:
        """Return a latency in ms by its name in the raw file; others come from the histogram."""
        value: float | None = getattr(self.latency_ms, statistic.replace(".", "_"), None)
        if value is not None:
            return value
        histogram = self.recorded()
        if histogram is None or not statistic.startswith("p"):
            return None
        return float(histogram.get_value_at_percentile(float(statistic[1:]))) / 1e3

    def recorded(self) -> HdrHistogram | None:
        """Return the latencies in microseconds; None = none were."""
        if not self.histogram:
            return None
        histogram = HdrHistogram.decode(self.histogram)
        return histogram if histogram.get_total_count() else None

    def curve(self, per_octave: int = 6) -> list[tuple[float, float]]:
        """
        Return (1 / (1 - p), latency in ms at p) from p = 0 to the slowest call.

        The steps grow geometrically, as the spacing of percentiles does that say something new.
        """
        histogram = self.recorded()
        if histogram is None:
            return []
        count = int(histogram.get_total_count())
        octaves = math.log2(count)
        steps = max(1, math.ceil(octaves * per_octave))
        shares = [2 ** (octaves * step / steps) for step in range(steps + 1)]
        return [
            (x, float(histogram.get_value_at_percentile(100 * (1 - 1 / x))) / 1e3)
            for x in shares[:-1]
        ] + [(float(count), self.latency_ms.max or float(histogram.get_max_value()) / 1e3)]


class Client(_Value):
    """The machine that asked."""

    cpu: str = ""
    cores: float | None = None
    memory_gb: float | None = None
    python: str = ""
    kernel: str = ""
    commit: str | None = None

    @property
    def summary(self) -> str:
        """In a line."""
        cores = "" if self.cores is None else f"{self.cores:g} cores, "
        return f"{self.cpu or 'unknown'}, {cores}{self.kernel}, {self.commit or 'no commit'}"


class ServerSide(_Value):
    """What answered."""

    url: str = ""
    name: str | None = None
    version: str | None = None
    model: str | None = None
    details: Any = None


class Generator(_Value):
    """How fast the load tester is where nothing is computed."""

    null_calls_per_s: float | None = None


class Resumed(_Value):
    """When a measurement was gone on with."""

    command: tuple[str, ...] = ()
    started: str
    client: Client


class Capacity(_Value):
    """What a search found: the highest rate that kept the objective, the lowest that broke it."""

    rate: float | None = None
    slo: str = ""
    broken_at: float | None = None


class Measurement(_Value):
    """One raw file, or several parts of one measurement put together."""

    format: Literal[1]
    tool: str
    command: tuple[str, ...]
    started: str
    ended: str
    interrupted: bool
    failure: str | None = None
    """Why loads are missing that were to be made."""
    client: Client
    server: ServerSide
    generator: Generator = Generator()
    slo: str | None = None
    capacity: Capacity | None = None
    resumed: tuple[Resumed, ...] = ()
    points: tuple[Point, ...]
    warnings: tuple[str, ...] = ()
    """What is to be said of the whole; the raw file has none."""

    @property
    def objective(self) -> Objective | None:
        """
        What the latency was held against.

        Raises:
            RawInvalid: the raw file's words for it mean nothing.
        """
        return objective("slo", self.slo) if self.slo else None


def objective(where: str, text: str) -> Objective:
    """
    Return what a text such as `p99<20ms` means.

    Raises:
        RawInvalid: it means nothing.
    """
    try:
        return Objective.parse(where, text)
    except UsageWrong as error:
        raise RawInvalid(str(error)) from None


def keeps(point: Point, wanted: Objective) -> bool:
    """Return whether a point keeps an objective, and as many calls were answered as offered."""
    figures = point.latency_ms.model_dump(by_alias=True)
    return not point.is_saturated and wanted.broken(figures, offered=point.offered) is None
