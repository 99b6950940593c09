"""Limits that change while a server runs."""

import asyncio
import os
from collections.abc import Iterator

import pytest

from service.host import limits
from service.host.limits import MachineLimits
from tests.support.layers import Layers
from tests.support.server import Server

pytestmark = pytest.mark.fault("E8d")

GIB = 2**30


def test_each_change_of_the_limits_is_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it was and what it is; no change, no line."""
    seen = [
        MachineLimits(4, GIB),
        MachineLimits(4, GIB),
        MachineLimits(2, GIB),
        MachineLimits(2, GIB),
        MachineLimits(2, 2 * GIB),
    ]
    logged: list[dict[str, object]] = []
    values: Iterator[MachineLimits] = iter(seen)
    monkeypatch.setattr(limits, "INTERVAL_S", 0)
    monkeypatch.setattr(limits, "machine_limits", lambda: next(values))
    monkeypatch.setattr(limits, "event", lambda message, **fields: logged.append(fields))

    with pytest.raises(RuntimeError, match="StopIteration"):  # at the end of what was seen
        asyncio.run(limits.watch_limits())

    changes = [(line["cpus_before"], line["cpus"]) for line in logged]
    sizes = [(line["memory_bytes_before"], line["memory_bytes"]) for line in logged]
    assert changes == [(4, 2), (2, 2)]
    assert sizes == [(GIB, GIB), (GIB, 2 * GIB)]


def test_server_reports_cores_that_are_taken_away(layers: Layers) -> None:
    """As `docker update --cpuset-cpus` or a resize of the pod takes them."""
    with Server(layers.repository) as server:
        cores = sorted(os.sched_getaffinity(server.process.pid))
        os.sched_setaffinity(server.process.pid, cores[:1])
        if len(cores) > 1:
            server.wait_for_log(rf'"limits changed.*"cpus":1,.*"cpus_before":{len(cores)}\b')
        assert server.get("/v2/health/ready").status_code == 200
