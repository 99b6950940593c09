"""The thread budget: affinity, cgroup quota of either version, setting."""

import os
from pathlib import Path

import pytest

from service.host.cpu import cpu_budget, cpu_quota

AFFINITY = len(os.sched_getaffinity(0))


def write(root: Path, files: dict[str, str]) -> None:
    """Make a tree of small files."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize(
    ("membership", "files", "quota"),
    [
        pytest.param("0::/\n", {}, None, id="v2 without a quota"),
        pytest.param("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5, id="v2 in a container"),
        pytest.param("0::/\n", {"cpu.max": "max 100000\n"}, None, id="v2 unlimited"),
        pytest.param(
            "0::/pods/one\n",
            {"pods/cpu.max": "200000 100000", "pods/one/cpu.max": "max 100000"},
            2.0,
            id="v2 limited above",
        ),
        pytest.param(
            "0::/pods/one\n",
            {"pods/cpu.max": "400000 100000", "pods/one/cpu.max": "50000 100000"},
            0.5,
            id="v2 the tightest counts",
        ),
        pytest.param(
            "4:cpu,cpuacct:/docker/x\n0::/\n",
            {
                "cpu,cpuacct/docker/x/cpu.cfs_quota_us": "300000\n",
                "cpu,cpuacct/docker/x/cpu.cfs_period_us": "100000\n",
            },
            3.0,
            id="v1 on the host",
        ),
        pytest.param(
            "4:cpu,cpuacct:/docker/x\n",
            {"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "50000"},
            2.0,
            id="v1 in a container, where the path does not exist",
        ),
        pytest.param(
            "4:cpu:/\n",
            {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"},
            None,
            id="v1 unlimited",
        ),
        pytest.param("garbage\n", {"cpu.max": "x y"}, None, id="unreadable"),
        pytest.param("0::/\n", {"cpu.max": "1 0"}, None, id="no period"),
    ],
)
def test_cpu_quota_of_a_cgroup_tree(
    tmp_path: Path, membership: str, files: dict[str, str], quota: float | None
) -> None:
    """Both versions are read, at every level above the process."""
    write(tmp_path / "fs", files)
    write(tmp_path, {"cgroup": membership})

    assert cpu_quota(tmp_path / "fs", tmp_path / "cgroup") == quota


def test_cpu_quota_without_any_cgroup_is_none(tmp_path: Path) -> None:
    """A host without cgroups limits nothing."""
    assert cpu_quota(tmp_path / "none", tmp_path / "none either") is None


def test_cpu_budget_fraction_of_a_core_gets_one_thread(tmp_path: Path) -> None:
    """A quota is rounded up."""
    write(tmp_path, {"cpu.max": "10000 100000", "cgroup": "0::/"})

    budget = cpu_budget(root=tmp_path, membership=tmp_path / "cgroup")

    assert (budget.threads, budget.quota) == (1, 0.1)
    assert str(budget) == f"1 (affinity {AFFINITY}, quota 0.1, setting auto)"


def test_cpu_budget_quota_above_affinity_gives_affinity(tmp_path: Path) -> None:
    """The smaller of both counts."""
    write(tmp_path, {"cpu.max": "100000000 100000", "cgroup": "0::/"})

    assert cpu_budget(root=tmp_path, membership=tmp_path / "cgroup").threads == AFFINITY


def test_cpu_budget_setting_wins(tmp_path: Path) -> None:
    """Who asks for a number gets it."""
    budget = cpu_budget(5, root=tmp_path, membership=tmp_path / "cgroup")

    assert budget.threads == 5
    assert str(budget) == f"5 (affinity {AFFINITY}, quota none, setting 5)"
