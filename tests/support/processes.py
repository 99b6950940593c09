"""What the system says of processes, while threads and processes come and go."""

from pathlib import Path


def children_of(pid: int) -> list[int]:
    """Return the processes that a process has started, those included that ended unnoticed."""
    # By every process's parent: the lists of children that threads have move when a thread ends.
    return [int(folder.name) for folder in Path("/proc").glob("[0-9]*") if parent_of(folder) == pid]


def parent_of(folder: Path) -> int | None:
    """Return the parent of the process with this folder of /proc; None = it is gone."""
    try:
        return int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None


def command_of(pid: int) -> bytes | None:
    """Return a process's command line; empty = it has ended unnoticed, None = it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
