"""
How many processor cores this process may really use.

`os.cpu_count()` is the host's: a container's quota (cgroup v1 or v2) and the
affinity mask are both invisible to it, and onnxruntime would start a thread
per host core.
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path

from service.host import cgroup


@dataclass(frozen=True)
class CpuBudget:
    """What limits the cores; `threads` is the answer."""

    threads: int
    affinity: int
    """Cores in the affinity mask."""
    quota: float | None
    """Cores' worth of time the container may use; None = no quota found."""
    chosen: int | None
    """What the setting asked for; None = automatic."""

    def __str__(self) -> str:
        quota = "none" if self.quota is None else f"{self.quota:g}"
        chosen = "auto" if self.chosen is None else str(self.chosen)
        return f"{self.threads} (affinity {self.affinity}, quota {quota}, setting {chosen})"


def cpu_budget(
    chosen: int | None = None, *, root: Path = cgroup.ROOT, membership: Path = cgroup.MEMBERSHIP
) -> CpuBudget:
    """
    Return the thread budget: the setting if given, else the smaller of affinity and quota.

    A fractional quota is rounded up, so that half a core still gets one thread.
    """
    affinity = len(os.sched_getaffinity(0))
    quota = cpu_quota(root, membership)
    automatic = affinity if quota is None else min(affinity, math.ceil(quota))
    return CpuBudget(chosen or max(1, automatic), affinity, quota, chosen)


def cpu_quota(root: Path, membership: Path) -> float | None:
    """
    Return the tightest cgroup CPU quota over this process, in cores; None = none.

    In v1 it is `cpu.cfs_quota_us` over `cpu.cfs_period_us`, in v2 `cpu.max`.
    """
    found = map(_quota_of, cgroup.groups("cpu", root=root, membership=membership))
    return min((quota for quota in found if quota is not None), default=None)


def _quota_of(group: Path) -> float | None:
    limit = cgroup.read(group / "cpu.max").split()
    if len(limit) == 2 and limit[0] != "max":
        return _ratio(*limit)
    quota, period = (cgroup.read(group / f"cpu.cfs_{what}_us") for what in ("quota", "period"))
    return _ratio(quota, period) if quota and period else None


def _ratio(quota: str, period: str) -> float | None:
    try:
        ratio = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):
        return None
    return ratio if ratio > 0 else None
