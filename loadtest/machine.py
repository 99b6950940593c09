"""What the client side of a test ran on."""

import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any


def describe() -> dict[str, Any]:
    """Return processor, cores, memory, versions and commit, as the raw file has them."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "python": platform.python_version(),
        "kernel": f"{platform.system()} {platform.release()}",
        "commit": _commit(),
    }


def _cpu() -> str:
    try:
        found = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def _commit() -> str:
    try:
        ended = subprocess.run(
            ["/usr/bin/env", "git", "--no-optional-locks", "describe", "--always", "--dirty"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return "unknown"
    return ended.stdout.strip() or "unknown"
