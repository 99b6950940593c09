"""
The control groups over this process, where a container's limits stand (cgroup v1 and v2).

https://docs.kernel.org/admin-guide/cgroup-v1 and .../cgroup-v2.html
"""

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def groups(controller: str, *, root: Path, membership: Path) -> Iterator[Path]:
    """
    Give the directories that may hold limits of a controller: `cpu`, `memory`.

    Every level from the process's own group up to the root counts.  Inside a
    container the group's path may not exist below its mounts; then the mount's own
    root is the container's group.
    """
    for controllers, path in _memberships(controller, membership):
        # v2 has one mount for all; in v1 each controller, or pair of them, has its own.
        for mount in {root, root / controllers, root / controller}:
            own = mount / path.strip("/")
            for group in (own, *own.parents):
                if group == mount or mount in group.parents:
                    yield group


def read(file: Path) -> str:
    """Return what stands in a file; empty where it is not to be read."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _memberships(controller: str, file: Path) -> list[tuple[str, str]]:
    """Return (controllers, path) for each hierarchy that could hold such limits."""
    parts = [line.split(":", 2) for line in read(file).splitlines() if line.count(":") >= 2]
    named = [(p[1], p[2]) for p in parts if p[1] == "" or controller in p[1].split(",")]
    return named or [("", "/")]
