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

CGROUP_ROOT = Path("/sys/fs/cgroup")


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
    chosen: int | None = None,
    *,
    root: Path = CGROUP_ROOT,
    membership: Path = Path("/proc/self/cgroup"),
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

    Every level from the process's own group up to the root counts, for v1
    (`cpu.cfs_quota_us` over `cpu.cfs_period_us`) and for v2 (`cpu.max`).  Inside
    a container the group's path may not exist below its mounts; then the mount's
    own root is the container's group.
    """
    quotas = []
    for controllers, path in _memberships(membership):
        for mount in (root, root / controllers, root / "cpu", root / "cpu,cpuacct"):
            quotas += [_quota_of(group) for group in _levels(mount, path)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _memberships(file: Path) -> list[tuple[str, str]]:
    """Return (controllers, path) for each hierarchy that could hold a CPU quota."""
    text = _read(file) or "0::/"
    parts = [line.split(":", 2) for line in text.splitlines() if line.count(":") >= 2]
    return [(c, path) for _, c, path in parts if c == "" or "cpu" in c.split(",")]


def _levels(mount: Path, path: str) -> list[Path]:
    own = mount / path.strip("/")
    return [own, *(parent for parent in own.parents if parent == mount or mount in parent.parents)]


def _quota_of(group: Path) -> float | None:
    limit = (_read(group / "cpu.max") or "").split()
    if len(limit) == 2 and limit[0] != "max":
        return _ratio(*limit)
    quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
    if quota and period:
        return _ratio(quota, period)
    return None


def _ratio(quota: str, period: str) -> float | None:
    try:
        ratio = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):
        return None
    return ratio if ratio > 0 else None


def _read(file: Path) -> str | None:
    try:
        return file.read_text().strip()
    except OSError:
        return None
