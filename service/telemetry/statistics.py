"""
What the protocol's statistics extension tells of each model and version.

Plain integers of nanoseconds, changed on the event loop only.  A model here is
what a protocol client names: `<name>` and `<name>-weights` are counted apart.
"""

import time
from typing import Any, Final

from service.inference.calls import Run, Stages

_NS_PER_S: Final = 1_000_000_000
_NS_PER_MS: Final = 1_000_000


class Statistics:
    """Every model's statistics, by name and version, since the process began."""

    def __init__(self) -> None:
        self._models: dict[tuple[str, int], ModelStatistics] = {}

    def of(self, name: str, version: int) -> "ModelStatistics":
        """Return the statistics of one version of a model; zeros when it was never called."""
        found = self._models.get((name, version))
        if found is None:
            found = self._models[name, version] = ModelStatistics(name, version)
        return found


class ModelStatistics:
    """
    One version's calls, and the runs of the engine that they took part in.

    `queue + compute_input + compute_infer + compute_output <= success` for each call.
    """

    def __init__(self, name: str, version: int) -> None:
        self._name = name
        self._version = version
        self._last_ns = 0
        self._rows = 0
        self._success_ns = 0
        self._queue_ns = 0
        self._calls = _Compute()
        self._fails = 0
        self._fail_ns = 0
        self._batches: dict[int, _Compute] = {}

    def answered(self, rows: int, stages: Stages, total_s: float) -> None:
        """
        Count a call of so many sequences that was answered.

        `total_s` is from its request's head to its encoded answer.  Runs of one call
        may overlap in time: what they add up to counts no longer than the call took.
        """
        self._last_ns = time.time_ns()
        self._rows += rows
        total = int(total_s * _NS_PER_S)
        queue = int(stages.queue_s * _NS_PER_S)
        output = int(stages.splitting_s * _NS_PER_S)
        into = int((stages.assembly_s - stages.splitting_s) * _NS_PER_S)
        compute = int(stages.compute_s * _NS_PER_S)
        if queue + output + into + compute > total:
            queue, output, into, compute = _cut(total, queue, output, into, compute)
        self._success_ns += total
        self._queue_ns += queue
        self._calls.add(into, compute, output)

    def failed(self, seconds: float) -> None:
        """Count a call that ended in an error, or whose caller left."""
        self._fails += 1
        self._fail_ns += int(seconds * _NS_PER_S)

    def run(self, run: Run) -> None:
        """Count a run of the engine that at least one of this model's calls took part in."""
        batch = self._batches.get(run.rows)
        if batch is None:
            batch = self._batches[run.rows] = _Compute()
        batch.add(
            int((run.assembly_s - run.splitting_s) * _NS_PER_S),
            int(run.compute_s * _NS_PER_S),
            int(run.splitting_s * _NS_PER_S),
        )

    def document(self) -> dict[str, Any]:
        """Return all of it as the extension writes it; there is no cache to hit or miss."""
        return {
            "name": self._name,
            "version": str(self._version),
            "last_inference": self._last_ns // _NS_PER_MS,
            "inference_count": self._rows,
            "execution_count": sum(batch.count for batch in self._batches.values()),
            "inference_stats": {
                "success": _duration(self._calls.count, self._success_ns),
                "fail": _duration(self._fails, self._fail_ns),
                "queue": _duration(self._calls.count, self._queue_ns),
                **self._calls.document(),
                "cache_hit": _duration(0, 0),
                "cache_miss": _duration(0, 0),
            },
            "response_stats": {},
            "batch_stats": [
                {"batch_size": rows, **self._batches[rows].document()}
                for rows in sorted(self._batches)
            ],
            "memory_usage": [],
        }


class _Compute:
    """How often, and how long: putting calls together, the engine, taking answers apart."""

    __slots__ = ("count", "infer_ns", "input_ns", "output_ns")

    def __init__(self) -> None:
        self.count = self.input_ns = self.infer_ns = self.output_ns = 0

    def add(self, input_ns: int, infer_ns: int, output_ns: int) -> None:
        self.count += 1
        self.input_ns += input_ns
        self.infer_ns += infer_ns
        self.output_ns += output_ns

    def document(self) -> dict[str, dict[str, int]]:
        return {
            "compute_input": _duration(self.count, self.input_ns),
            "compute_infer": _duration(self.count, self.infer_ns),
            "compute_output": _duration(self.count, self.output_ns),
        }


def _cut(total: int, *parts: int) -> list[int]:
    """Return the parts, each no more than those before it leave of the total."""
    cut = []
    for part in parts:
        cut.append(min(part, total))
        total -= cut[-1]
    return cut


def _duration(count: int, ns: int) -> dict[str, int]:
    return {"count": count, "ns": ns}
