"""One point of a test: one kind of work at one load, from its requests to its figures."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from loadtest.arrivals import Arrivals
from loadtest.drive import closed_load, default_connections, open_load
from loadtest.plan import DEFAULT_PLAN, Plan, Watch
from loadtest.prepare import Prepared, prepared
from loadtest.records import Records
from loadtest.summary import figures_of, stage
from loadtest.target import Target
from loadtest.work import Work

_SAMPLES: Final = 50
"""Answers that are kept and read afterwards, to tell what reading them takes."""
_HELD_BYTES: Final = 256 * 2**20
"""Answers that differ in some bit wait for a closer look until the load is over, up to this."""


@dataclass(frozen=True)
class Point:
    """What is to be measured; it can be sent to another process."""

    work: Work
    rate: float | None = None
    """Calls a second of an open load; None = a closed one."""
    clients: int | None = None
    arrivals: Arrivals = "poisson"
    connections: int | None = None
    plan: Plan = DEFAULT_PLAN
    bodies: int = 16
    """Different calls of a fixed shape; a drawn one has four times as many."""
    seed: int = 0
    check: bool = False
    repository: Path | None = None
    attempt: int = 1
    """Which time it is measured within one test."""

    @property
    def id(self) -> str:
        """What tells it from the other points of a test."""
        load = f"{self.rate:g}/s" if self.rate is not None else f"{self.clients} clients"
        constant = " constant" if self.rate is not None and self.arrivals == "constant" else ""
        again = f" try {self.attempt}" if self.attempt > 1 else ""
        return f"{self.work} {load}{constant}{again}"

    @property
    def expected_s(self) -> float:
        """About how long it takes."""
        plan = self.plan
        seconds = plan.seconds
        if plan.count is not None and self.rate is not None:
            seconds = min(seconds, plan.count / self.rate)
        return plan.warmup_s + seconds + 0.5

    def as_dict(self) -> dict[str, Any]:
        """Return it as the raw file has it."""
        is_open = self.rate is not None
        return {
            "id": self.id,
            "model": "open" if is_open else "closed",
            "arrivals": self.arrivals if is_open else None,
            "rate": self.rate,
            "clients": self.clients,
            "connections": self.slots,
            "work": self.work.as_dict(),
            "options": {
                "seed": self.seed,
                "bodies": self.bodies,
                "check": self.check,
                "repository": None if self.repository is None else str(self.repository),
                "count": self.plan.count,
                "duration_s": None if self.plan.count is not None else self.plan.seconds,
                "warmup_s": self.plan.warmup_s,
                "timeout_s": self.plan.timeout_s,
            },
        }

    @property
    def slots(self) -> int:
        """How many connections it has."""
        if self.rate is None:
            return self.clients or 1
        return self.connections or default_connections(self.rate)


def measure(target: Target, point: Point, watch: Watch | None = None) -> dict[str, Any]:
    """
    Return a point with its figures, as the raw file has it, but for the warnings.

    Raises:
        LoadTestError: it cannot be measured.
    """
    with prepared(
        target,
        point.work,
        connections=point.slots,
        bodies=point.bodies,
        seed=point.seed,
        check=point.check,
        repository=point.repository,
    ) as given:
        checker = _Checker(given, check=point.check)
        records = _load(target, point, given, checker, watch)
        checker.finish()
        records.checked, records.wrong = checker.checked, checker.wrong
        return {
            **point.as_dict(),
            "address": records.address,
            "planned": point.plan.count,
            **figures_of(records),
            "decode_ms": stage(given.decode_times(records.bodies)),
            "interrupted": records.interrupted,
            "warnings": [],
        }


def _load(
    target: Target, point: Point, given: Prepared, checker: "_Checker", watch: Watch | None
) -> Records:
    if point.rate is None:
        return closed_load(
            target.endpoint,
            given.requests,
            clients=point.clients or 1,
            plan=point.plan,
            watch=watch,
            keep=_SAMPLES,
            examine=checker,
            every=point.check,
        )
    return open_load(
        target.endpoint,
        given.requests,
        rate=point.rate,
        arrivals=point.arrivals,
        connections=point.connections,
        plan=point.plan,
        seed=point.seed,
        watch=watch,
        keep=_SAMPLES,
        examine=checker,
        every=point.check,
    )


class _Checker:
    """
    Compares answers, as far as can be outside the measured time.

    Most answers are equal to one that was found right, bit by bit, which is quick to see;
    the others are held until the load is over.
    """

    def __init__(self, given: Prepared, *, check: bool) -> None:
        self.checked = 0
        self.wrong = 0
        self._given = given
        self._check = check
        self._right: dict[tuple[int, int | None], bytes] = {}
        self._held: list[tuple[int, bytes, int | None]] = []
        self._held_bytes = 0

    def __call__(
        self, index: int, connection: int, body: bytes, header_length: int | None
    ) -> bytes:
        if self._given.regions is not None:
            body = self._given.regions.answer(connection, index)
        if self._check:
            self.checked += 1
            if self._right.get((index, header_length)) != body:
                self._hold(index, body, header_length)
        return body

    def finish(self) -> None:
        """Look closely at what was held."""
        for held in self._held:
            self._look(*held)
        self._held = []

    def _hold(self, index: int, body: bytes, header_length: int | None) -> None:
        # The first one of each call is looked at right away: the rest is compared with it.
        if (index, header_length) not in self._right or self._held_bytes > _HELD_BYTES:
            self._look(index, body, header_length)
            return
        self._held.append((index, body, header_length))
        self._held_bytes += len(body)

    def _look(self, index: int, body: bytes, header_length: int | None) -> None:
        if self._given.is_right(index, body, header_length):
            self._right.setdefault((index, header_length), body)
        else:
            self.wrong += 1
