"""Faults that are real, each named by a real Prometheus and by `octavo doctor`; a healthy load is not.

They want the processors to themselves: CI runs them after the other tests.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.alerts.faults import neighbours, slowed, stalled
from tests.alerts.prometheus import Prometheus, watching
from tests.api.server import Server

LEAKY = Path(__file__).parent / "leaky"
LATE = {"OctavoOverloaded", "OctavoSlowFirstToken"}  # who waits is late


def doctor(server: Server, seconds: int) -> dict[str, str]:
    """What `octavo doctor` names, with what it says of it."""
    words = ["doctor", "--server", server.url, "--json", "--seconds", str(seconds)]
    command = [sys.executable, "-P", "-m", "octavo.cli.main", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 30)
    findings = json.loads(done.stdout)["findings"]
    assert done.returncode == bool(findings) and all(f["mitigation"] for f in findings)
    return {f["name"]: f["meaning"] for f in findings}


@contextmanager
def asking(
    server: Server, clients: int, pause: float = 0.0, words: int = 0, **changes: Any
) -> Iterator[list[int]]:
    """Clients that ask again and again, each time something else, of so many words. Gives the statuses
    of what they were answered."""
    over, statuses = threading.Event(), list[int]()

    def ask(client: int) -> None:
        turn = 0
        while not over.wait(pause):
            turn += 1
            start = f"Story {turn} of {client}. {' '.join(str(client + turn + i) for i in range(words))}"
            body = {"prompt": f"{start} Once upon a time", "max_tokens": 64, "temperature": 0, "stop": ["."]}  # fmt: skip
            statuses.append(server.post("/v1/completions", body | changes)[0])

    with ThreadPoolExecutor(clients) as pool:
        asked = [pool.submit(ask, i) for i in range(clients)]
        try:
            yield statuses
        finally:
            over.set()
    for each in asked:
        each.result()


def settled(servers: list[Server]) -> None:
    """Waits until engines do nothing: what they prepare while they are idle is done."""
    deadline, before = time.monotonic() + 30, [-1.0]
    while before != (now := [s.metric("octavo_engine_process_cpu_seconds_total") for s in servers]):
        assert time.monotonic() < deadline, now
        before = now
        time.sleep(0.5)


def until_full(server: Server) -> None:
    """Waits until requests hold nine of ten KV blocks: prompts are computed one after the other."""
    deadline = time.monotonic() + 60
    while server.metric("octavo_kv_blocks", state="held") < 0.9 * server.metric("octavo_kv_blocks"):
        assert time.monotonic() < deadline
        time.sleep(0.2)


@dataclass
class Watched:
    """Servers with a Prometheus, and threads in which a doctor looks at them meanwhile."""

    prometheus: Prometheus
    plain: Server
    small: Server
    leaky: Server
    pool: ThreadPoolExecutor

    def named(
        self, server: Server, *must: str, seconds: int = 4, may: set[str] = frozenset()
    ) -> None:  # type: ignore[assignment]
        """A fault that is there now raises these alerts, and the doctor names them."""
        began = time.monotonic()
        examined = self.pool.submit(doctor, server, seconds)
        for name in must:
            self.prometheus.wait(server, name)
        said = {"Prometheus": self.prometheus.fired(server, began), "doctor": examined.result()}
        for found in said.values():
            assert set(must) <= set(found) <= {*must, *may, "slow_requests"}, said


@pytest.fixture(scope="module")
def watched(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("watched")
    path = os.pathsep.join([str(LEAKY), os.environ.get("PYTHONPATH", "")])
    options: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
        "plain": (("--max-queue", "4"), {}),
        "small": (("--memory", "280MiB", "--context", "1024"), {}),
        "leaky": ((), {"PYTHONPATH": path, "LEAK": str(folder / "leak")}),
    }
    with ExitStack() as stack:
        servers = {}
        for name, (words, env) in options.items():
            server = Server("smollm2", "--offline", "--threads", "1", *words, log=folder / name, env=env)  # fmt: skip
            stack.callback(server.stop)
            servers[name] = server
        prometheus = stack.enter_context(watching(*servers.values(), folder=folder))
        for server in servers.values():
            server.wait_ready()
        settled(list(servers.values()))
        pool = stack.enter_context(ThreadPoolExecutor())
        yield Watched(prometheus, **servers, pool=pool)


@pytest.fixture(scope="module")
def leak(watched: Watched) -> Future[dict[str, str]]:
    """A leak takes longest to tell: it begins with the first fault. Gives what the doctor names."""
    (watched.leaky.log.parent / "leak").touch()
    return watched.pool.submit(doctor, watched.leaky, 60)


def test_a_healthy_load_raises_nothing(watched: Watched) -> None:
    servers = watched.plain, watched.small, watched.leaky
    began = time.monotonic()
    with ExitStack() as load:
        pauses = 1.6, 2.0, 2.4  # so that they do not all compute at once
        answered = [
            load.enter_context(asking(s, 1, p)) for s, p in zip(servers, pauses, strict=True)
        ]
        said = [doctor(s, 3) for s in servers]
    assert said == [{}] * 3
    assert [watched.prometheus.fired(s, began) for s in servers] == [set()] * 3
    assert all(len(each) > 2 and set(each) == {200} for each in answered)


@pytest.mark.usefixtures("leak")
def test_overload(watched: Watched) -> None:
    """Sixteen at a time, where four may be in flight."""
    with asking(watched.plain, 16, pause=0.05) as statuses:
        watched.named(watched.plain, "OctavoRefusing", may=LATE)
    assert set(statuses) == {200, 503}


def test_a_starved_cache(watched: Watched) -> None:
    """Requests hold what there is: prefixes have no room, and other requests wait."""
    long = {"max_tokens": 150, "temperature": 1, "stop": None}
    with asking(watched.small, 12, words=100, **long) as statuses:
        may = LATE | {"OctavoPreempting", "OctavoCutAnswers"}
        until_full(watched.small)
        watched.named(watched.small, "OctavoKvFull", "OctavoCacheStarved", seconds=10, may=may)
    assert set(statuses) == {200}


def test_an_engine_that_a_signal_has_stopped(watched: Watched) -> None:
    """It is replaced, and nobody is told but who operates it."""
    engine = watched.small.engine()
    with asking(watched.small, 2, pause=0.1) as statuses:
        os.kill(engine.pid, signal.SIGSTOP)
        watched.prometheus.wait(watched.small, "OctavoEngineRestarted")
        assert "OctavoEngineRestarted" in doctor(watched.small, 0)
    assert not engine.is_running() and set(statuses) == {200}


def test_a_slow_kernel(watched: Watched) -> None:
    """A step takes five times as long."""
    with asking(watched.plain, 1, pause=0.1) as statuses:
        with slowed(watched.plain.engine().pid):
            watched.named(watched.plain, "OctavoSlowSteps", may={"OctavoCpuContended"})
        watched.prometheus.wait_quiet(watched.plain)
    assert set(statuses) == {200}


def test_a_stalled_engine(watched: Watched) -> None:
    """The thread that computes stands still; requests are answered once it goes on."""
    with asking(watched.plain, 2, pause=0.1) as statuses:
        with stalled(watched.plain.engine().pid):
            watched.named(watched.plain, "OctavoEngineStalled", seconds=2)
    assert len(statuses) >= 2 and set(statuses) == {200}
    watched.prometheus.wait_quiet(watched.plain)


def test_noisy_neighbours(watched: Watched) -> None:
    """Other processes want all the cores."""
    with asking(watched.plain, 1, pause=0.1) as statuses:
        with neighbours(2 * (os.cpu_count() or 1)):
            watched.named(watched.plain, "OctavoCpuContended", may={"OctavoSlowSteps"})
    assert set(statuses) == {200}


def test_a_leak(watched: Watched, leak: Future[dict[str, str]]) -> None:
    watched.prometheus.wait(watched.leaky, "OctavoMemoryGrows")
    assert set(leak.result()) == {"OctavoMemoryGrows"}


def test_what_is_over_is_not_raised_any_more(watched: Watched) -> None:
    """Nor is anything held."""
    for server in (watched.plain, watched.small):
        watched.prometheus.wait_quiet(server)
        server.wait_idle()
