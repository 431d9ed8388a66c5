"""What this process may use: memory and CPUs, of the host and of the control groups it lies in.

A limit may stand in any group from the process's own up to the root (systemd's `MemoryMax=`, a
container, a pod). Memory in swap is never counted: an engine that is swapped out serves nobody.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path("/")
_NO_LIMIT = 1 << 60  # version 1 writes "no limit" as a number near 2**63


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes still available, and the most there could be; whether a control group limits them."""

    available: int
    total: int
    limit: bool


def host_memory(root: Path = ROOT) -> Memory:
    """The memory this process may use: the host's, or what its control groups leave of it."""
    host = {}
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        host[name] = int(value.split()[0]) * 1024
    available, total, limited = host["MemAvailable"], host["MemTotal"], False
    for group in _groups(root, "memory"):
        limit = min(_numbers(group, "memory.max", "memory.high", "memory.limit_in_bytes"))
        used = min(_numbers(group, "memory.current", "memory.usage_in_bytes"))
        if limit < total:
            total, limited = limit, True
        if limit < _NO_LIMIT and used < _NO_LIMIT:
            available = min(available, max(0, limit - used + min(used, _file_cache(group))))
    return Memory(min(available, total), total, limited)


def available_memory() -> int:
    """Bytes this process may still use."""
    return host_memory().available


def usable_threads(root: Path = ROOT) -> int:
    """CPUs this process may run on, within the quotas of its control groups."""
    cpus = len(os.sched_getaffinity(0))
    for group in _groups(root, "cpu"):
        quota, period = _NO_LIMIT, 1
        words = _text(group / "cpu.max").split()
        if len(words) == 2 and words[0] != "max":
            quota, period = int(words[0]), int(words[1])
        elif _text(group / "cpu.cfs_quota_us") not in ("", "-1"):
            quota = int(_text(group / "cpu.cfs_quota_us"))
            period = int(_text(group / "cpu.cfs_period_us") or 100_000)
        cpus = min(cpus, max(1, quota // period))
    return cpus


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of the process's groups, its own first, in each hierarchy with the controller."""
    mounts = _mounts(root)
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        kind = controller if controller in names.split(",") else "" if not names else None
        if kind not in mounts:
            continue
        top, shown = mounts[kind]
        own = PurePosixPath(path)
        inside = own.relative_to(shown) if own.is_relative_to(shown) else PurePosixPath()
        if ".." in inside.parts:  # the mount shows less than the whole way up
            inside = PurePosixPath()
        yield from (top / part for part in (inside, *inside.parents))


def _mounts(root: Path) -> dict[str | None, tuple[Path, PurePosixPath]]:
    """Where hierarchies are mounted and which group is seen there: "" is version 2's, others are
    named by their controllers."""
    found: dict[str | None, tuple[Path, PurePosixPath]] = {}
    for line in _text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, (kind, _, options) = before.split(), after.split()[:3]
        shown, where = (_unescape(f) for f in fields[3:5])
        place = (root / where.lstrip("/"), PurePosixPath(shown))
        if kind == "cgroup2":
            found[""] = place
        elif kind == "cgroup":
            found.update(dict.fromkeys(options.split(","), place))
    return found


def _unescape(field: str) -> str:
    """A field of mountinfo, where blanks are written in octal."""
    for code in (" ", "\t", "\n", "\\"):
        field = field.replace(f"\\{ord(code):03o}", code)
    return field


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _numbers(group: Path, *names: str) -> list[int]:
    """The numbers that those files hold, and one that means there is none."""
    texts = (_text(group / name) for name in names)
    return [_NO_LIMIT, *(int(t) for t in texts if t.isascii() and t.isdigit())]


def _file_cache(group: Path) -> int:
    """Bytes of file pages, which the kernel gives back when memory runs short."""
    lines = (line.split() for line in _text(group / "memory.stat").splitlines())
    stat = {words[0]: int(words[1]) for words in lines if len(words) == 2}
    prefix = "total_" if "total_inactive_file" in stat else ""  # version 1 counts children apart
    return sum(stat.get(f"{prefix}{kind}_file", 0) for kind in ("inactive", "active"))
