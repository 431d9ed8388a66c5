"""octavo ps."""

from __future__ import annotations

import os
import time
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from octavo.cli.options import json_flag
from octavo.cli.screen import say, say_json, table

PROC = Path("/proc")
ENGINE = "octavo.client.engine_process"


@dataclass(frozen=True)
class RunningServer:
    """A server of this user, as the kernel knows it."""

    pid: int
    model: str  # those it was started with
    url: str
    state: str  # ready, loading or starting
    bytes: int  # resident, with its children
    seconds: int  # since its start
    loaded: list[str]  # models that have an engine


@click.command()
@json_flag
def ps(as_json: bool) -> None:
    """List this user's servers that run on this machine."""
    found = running()
    if as_json:
        say_json([asdict(r) for r in found])
    elif not found:
        say("no server is running")
    else:
        table(
            [
                (
                    r.pid,
                    r.model,
                    ", ".join(r.loaded),
                    r.url,
                    r.state,
                    f"{r.bytes / 1e6:,.0f} MB",
                    _duration(r.seconds),
                )
                for r in found
            ],
            ("pid", "model", "loaded", "URL", "state", "memory", "up"),
            right=(0, 5, 6),
        )


def running() -> list[RunningServer]:
    """Processes of this user whose command is `octavo serve`, from /proc: nothing to go stale."""
    from octavo.server.ports import listening_sockets

    sockets = listening_sockets()
    found = []
    for folder in sorted(PROC.glob("[0-9]*"), key=lambda f: int(f.name)):
        try:
            if folder.stat().st_uid != os.getuid():
                continue
            model = served_model(_words(folder))
            if model is not None:
                found.append(_describe(folder, model, sockets))
        except (OSError, ValueError):
            continue  # ended meanwhile
    return found


def served_model(words: list[str]) -> str | None:
    """The models on the command line of a server (the demo if none is named); None for others."""
    from octavo.cli.serve import DEMO

    if (given := _options(words)) is None:
        return None
    folder = given.get("models_dir")
    places = [f"{folder}/*"] * bool(folder) + ["*"] * bool(given.get("on_demand"))
    named = [given["name"]] if given.get("name") else given.get("models") or ()
    return ", ".join([*named, *places]) or DEMO


def options_of(pid: int) -> dict[str, Any]:
    """The options that a server was started with; none for other processes."""
    return _options(_words(PROC / str(pid))) or {}


def _words(folder: Path) -> list[str]:
    return (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]


def _options(words: list[str]) -> dict[str, Any] | None:
    """The parameters of `octavo serve` on a command line; None on others, as that of `timeout`."""
    from octavo.cli.serve import serve

    scripts = Path(words[0]).name.startswith("python") if words else False
    for i, word in enumerate(words[: 4 if scripts else 1]):
        if Path(word).name == "octavo" or word == "octavo.cli.main":
            rest = [w for w in words[i + 1 :] if w != "--debug"]
            if rest[:1] != ["serve"]:
                return None
            try:
                return serve.make_context("serve", rest[1:], resilient_parsing=True).params
            except click.ClickException:
                return None
    return None


def _describe(folder: Path, model: str, sockets: dict[str, tuple[str, int]]) -> RunningServer:
    links = [os.readlink(fd) for fd in (folder / "fd").iterdir()]
    address = next((sockets[link] for link in links if link in sockets), None)
    url = f"http://{address[0]}:{address[1]}" if address else ""
    started = int((folder / "stat").read_text().rpartition(")")[2].split()[19])
    ticks = os.sysconf("SC_CLK_TCK")
    seconds = time.clock_gettime(time.CLOCK_BOOTTIME) - started / ticks
    return RunningServer(
        int(folder.name), model, url, _state(url), _resident(folder), int(seconds), _loaded(folder)
    )


def _loaded(folder: Path) -> list[str]:
    """Names of the models whose engines are children of a process, which their last argument is."""
    found = []
    for children in folder.glob("task/*/children"):
        for child in children.read_text().split():
            words = (PROC / child / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if ENGINE in words:
                found.append(words[-2])
    return found


def _state(url: str) -> str:
    """What the server says of itself: /health/ready needs no key."""
    if not url:
        return "starting"
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(f"{url}/health/ready", timeout=2) as response:
            return "ready" if response.status == 200 else "loading"
    except urllib.error.HTTPError as e:
        return "loading" if e.code == 503 else f"status {e.code}"
    except OSError:
        return "no answer"


def _resident(folder: Path) -> int:
    """Resident bytes of a process and its children."""
    pages = int((folder / "statm").read_text().split()[1])
    total = pages * os.sysconf("SC_PAGE_SIZE")
    for children in folder.glob("task/*/children"):
        total += sum(_resident(PROC / child) for child in children.read_text().split())
    return total


def _duration(seconds: int) -> str:
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min" if minutes else f"{seconds} s"
