"""What the host and its control groups leave of memory and CPUs, read from trees made for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from octavo.engine.host import host_memory, usable_threads
from octavo.engine.plan import parse_size
from octavo.errors import UsageError

GIB, MIB = 1 << 30, 1 << 20
V2 = "31 23 0:28 / /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"


def tree(root: Path, cgroup: str, mounts: str, **groups: dict[str, object]) -> Path:
    """A root folder with /proc and /sys; `groups`: files by the group's path below /sys/fs/cgroup."""
    own = root / "proc/self"
    own.mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        f"MemTotal: {24 * MIB} kB\nMemFree: 5 kB\nMemAvailable: {20 * MIB} kB\n"
    )
    (own / "cgroup").write_text(cgroup)
    (own / "mountinfo").write_text(mounts)
    for path, files in groups.items():
        folder = root / "sys/fs/cgroup" / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            (folder / name).write_text(f"{value}\n")
    return root


def group(limit: object, used: int, **more: object) -> dict[str, object]:
    return {"memory.max": limit, "memory.current": used} | {
        k.replace("_", "."): v for k, v in more.items()
    }


def test_no_group_at_all(tmp_path: Path) -> None:
    found = host_memory(tree(tmp_path, "", ""))
    assert (found.available, found.total, found.limit) == (20 * GIB, 24 * GIB, False)


def test_the_limit_of_a_unit_is_seen(tmp_path: Path) -> None:
    """`MemoryMax=4G` of a unit: the root group has no limit, the process's own has."""
    root = tree(
        tmp_path, "0::/system.slice/octavo.service\n", V2,
        **{"system.slice": group("max", 9 * GIB), "system.slice/octavo.service": group(4 * GIB, GIB)},
    )  # fmt: skip
    found = host_memory(root)
    assert (found.available, found.total, found.limit) == (3 * GIB, 4 * GIB, True)


def test_file_pages_are_not_in_the_way(tmp_path: Path) -> None:
    stat = f"anon {GIB}\nfile {3 * GIB}\nshmem {GIB}\ninactive_file {GIB}\nactive_file {GIB // 2}"
    root = tree(tmp_path, "0::/a\n", V2, a=group(4 * GIB, 3 * GIB, memory_stat=stat))
    assert host_memory(root).available == 4 * GIB - 3 * GIB + GIB + GIB // 2


def test_siblings_in_a_parent_count(tmp_path: Path) -> None:
    """The parent's limit is the larger one, but others have used most of it."""
    root = tree(
        tmp_path, "0::/pod/box\n", V2,
        **{"pod": group(10 * GIB, 9 * GIB), "pod/box": group(8 * GIB, GIB)},
    )  # fmt: skip
    found = host_memory(root)
    assert (found.available, found.total) == (GIB, 8 * GIB)


def test_memory_high_throttles_so_it_limits(tmp_path: Path) -> None:
    root = tree(tmp_path, "0::/a\n", V2, a=group(8 * GIB, GIB, memory_high=2 * GIB))
    assert host_memory(root).available == GIB


def test_a_limit_above_the_host_changes_nothing(tmp_path: Path) -> None:
    root = tree(tmp_path, "0::/a\n", V2, a=group(64 * GIB, GIB))
    assert host_memory(root) == host_memory(tree(tmp_path / "bare", "", ""))


def test_version_1(tmp_path: Path) -> None:
    """A hybrid host: memory in version 1 below a container's group, which is what the mount shows."""
    mounts = (
        "35 31 0:32 /docker/x /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        "33 31 0:30 /docker/x /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
        "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    )
    cgroup = "4:memory:/docker/x/job\n2:cpu,cpuacct:/docker/x/job\n0::/\n"
    limit = {"memory.limit_in_bytes": 4 * GIB, "memory.usage_in_bytes": 3 * GIB}
    stat = f"inactive_file 5\ntotal_inactive_file {GIB}\ntotal_active_file 0"
    root = tree(
        tmp_path, cgroup, mounts,
        **{
            "memory": {"memory.limit_in_bytes": 9223372036854771712, "memory.usage_in_bytes": GIB},
            "memory/job": limit | {"memory.stat": stat},
            "cpu,cpuacct/job": {"cpu.cfs_quota_us": 100000, "cpu.cfs_period_us": 100000},
        },
    )  # fmt: skip
    found = host_memory(root)
    assert (found.available, found.total, found.limit) == (2 * GIB, 4 * GIB, True)
    assert usable_threads(root) == 1


def test_quotas_of_cpus(tmp_path: Path) -> None:
    cpus = len(os.sched_getaffinity(0))
    assert (
        usable_threads(tree(tmp_path / "none", "0::/a\n", V2, a={"cpu.max": "max 100000"})) == cpus
    )
    half = tree(tmp_path / "half", "0::/a/b\n", V2, a={"cpu.max": "50000 100000"})
    assert usable_threads(half) == 1
    wide = tree(tmp_path / "wide", "0::/a/b\n", V2, a={"cpu.max": "99900000 100000"})
    assert usable_threads(wide) == cpus


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8GiB", 8 * GIB), ("8g", 8 * GIB), ("8 GB", 8 * GIB), ("1.5G", 3 * GIB // 2),
        ("800M", 800 * MIB), ("800mib", 800 * MIB), ("1T", 1024 * GIB), ("50%", 10 * GIB),
        ("100%", 20 * GIB), ("8589934592", 8 * GIB), ("8b", 8),
    ],
)  # fmt: skip
def test_amounts(text: str, expected: int) -> None:
    assert parse_size(text, 20 * GIB) == expected


@pytest.mark.parametrize(
    "text",
    ["", "lots", "0", "0GiB", "-1GiB", "-5%", "nan", "inf", "infGiB", "1e400GiB", "9" * 400, "200%",
     "100.1%", "1_000MiB", "8XiB", "8GiBiB", "٨GiB", "1e3M"],
)  # fmt: skip
def test_what_is_no_amount(text: str) -> None:
    with pytest.raises(UsageError, match="is not an amount"):
        parse_size(text, 20 * GIB)


def test_a_bare_number_asks_for_its_unit() -> None:
    with pytest.raises(UsageError, match="--lora-memory 8 means 8 bytes") as failure:
        parse_size("8", 20 * GIB, "--lora-memory")
    assert failure.value.suggestions == ("--lora-memory 8GiB",)
