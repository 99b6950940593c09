"""Limits of CPU and memory that change while the server runs: not followed, but logged."""

import asyncio
import logging
from dataclasses import dataclass
from typing import Final

from service.host.cpu import cpu_budget
from service.host.memory_limit import memory_limit
from service.logs import event

INTERVAL_S: Final = 5.0


@dataclass(frozen=True)
class MachineLimits:
    """What this process may use now."""

    cpus: int
    """Threads that affinity and quota allow."""
    memory_bytes: int


def machine_limits() -> MachineLimits:
    """Return what affinity mask and control groups allow now."""
    return MachineLimits(cpu_budget().threads, memory_limit())


async def watch_limits() -> None:
    """Log each change of the limits, for ever: what was sized by them stays as it is."""
    before = machine_limits()
    while True:
        await asyncio.sleep(INTERVAL_S)
        now = machine_limits()
        if now != before:
            event(
                "limits changed; a restart takes them up",
                level=logging.WARNING,
                cpus=now.cpus,
                memory_bytes=now.memory_bytes,
                cpus_before=before.cpus,
                memory_bytes_before=before.memory_bytes,
            )
        before = now
