"""Hostile media over HTTP: each is answered as docs/vision.md says, and the server is as before."""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
from collections import defaultdict
from contextlib import closing, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import repeat
from pathlib import Path
from typing import Any

import psutil
import pytest

from octavo.server.bodies import MAX_BODY
from tests.api.hostile_media import AT, CASES, CHAT, CIRCLE, UNPICKLED, Case, by_url, noise
from tests.api.server import Server, serving
from tests.api.test_images import ask, drawing, shown
from tests.api.test_robust import prepared

INTERNET = Path(__file__).parent / "internet"
DOMAINS = ("allowed.test", "changing.test", "hanging.test", "localhost")
OPENAI = (CHAT, "/v1/completions")
WARM, ROUNDS = 2, 2
# The allocator gives back what is freed: what a process has, it holds.
FRUGAL = {"MALLOC_ARENA_MAX": "1"} | dict.fromkeys(
    ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), "65536"
)
SECRETS = re.compile(r'0x[0-9a-f]{6,}|Traceback|File "|/(home|root|usr|work|tmp)/')


class Host(ThreadingHTTPServer):
    """A host of files, good and bad, which counts its visitors. inside: what it redirects to."""

    def __init__(self, inside: str = "") -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.hits, self.inside, self.noise = 0, inside, noise(2600, 2600)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A visitor left before the end."""


class _Answer(BaseHTTPRequestHandler):
    server: Host

    def do_GET(self) -> None:
        self.server.hits += 1
        status, headers, pieces, pause = {
            "/circle.png": (200, {}, [CIRCLE], 0),
            "/noise.png": (200, {}, [self.server.noise], 0),
            "/redirect": (302, {"location": self.server.inside}, [], 0),
            "/compressed": (200, {"content-encoding": "gzip"}, [CIRCLE], 0),
            "/more": (200, {"content-length": "10"}, repeat(CIRCLE, 10_000), 0),
            "/endless": (200, {}, repeat(CIRCLE * 100), 0),
            "/slow": (200, {}, repeat(b"a"), 1),
        }.get(self.path, (404, {}, [], 0))  # fmt: skip
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        for piece in pieces:
            self.wfile.write(piece)
            time.sleep(pause)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@dataclass
class Sweep:
    """What came of all cases in all rounds, and what the front and the engine had after each."""

    inside: Host
    answers: dict[str, set[tuple[int, str]]] = field(default_factory=lambda: defaultdict(set))
    said: list[str] = field(default_factory=list)  # of the good picture after each case
    right: list[str] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    handles: list[tuple[int, int]] = field(default_factory=list)
    engines: set[int] = field(default_factory=set)
    changing: list[int] = field(default_factory=list)
    log: str = ""

    def send(self, server: Server, case: Case, bodies: list[bytes]) -> None:
        """A case, then a good picture."""
        port = b"%d" % self.inside.server_port
        for body in bodies:
            answer = post(server, case.path, body.replace(b"{inside}", port))
            self.answers[case.id].add(answer)
        number = len(self.said)
        color, x = ("red", "blue", "green", "yellow")[number % 4], 40 + number // 4
        circle = drawing(("circle", color, (x, 40, x + 80, 120)))  # seen never before
        reply = ask(server, shown(circle, text="What color is the circle?"))
        self.said.append(reply["choices"][0]["message"]["content"])
        self.right.append(color)


def post(server: Server, path: str, body: bytes) -> tuple[int, str]:
    """As a client that reads the answer also if it could not send all."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    with closing(connection):
        with suppress(ConnectionError):
            connection.request("POST", path, body)
        reply = connection.getresponse()
        return reply.status, reply.read().decode()


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    log = tmp_path_factory.mktemp("server") / "log"
    inside = Host()
    outside = Host(f"http://127.0.0.1:{inside.server_port}/")
    env = {"PYTHONPATH": str(INTERNET), "OUTSIDE": str(outside.server_port), **FRUGAL}
    domains = [word for name in DOMAINS for word in ("--media-domain", name)]
    made = [(case, case.bodies()) for case in CASES]
    out = Sweep(inside)
    with serving("tiny-vlm", "--offline", *domains, log=log, env=env) as server:
        front, engine = psutil.Process(server.process.pid), server.engine()
        for _ in range(WARM + ROUNDS):
            for case, bodies in made:
                out.send(server, case, bodies)
            server.wait_idle()
            out.memory.append(front.memory_info().rss + prepared(engine))
            out.handles.append((front.num_fds(), engine.num_fds()))
            out.engines.add(server.engine().pid)
        (changing,) = by_url("http://changing.test:{inside}/circle.png")
        changing = changing.replace(b"{inside}", b"%d" % inside.server_port)
        out.changing = [post(server, CHAT, changing)[0] for _ in range(4)]
    out.log = log.read_text()
    return out


def test_every_row_is_here() -> None:
    assert {case.row for case in CASES} == {f"S{number}" for number in range(60, 68)}
    assert len({case.id for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_answer(sweep: Sweep, case: Case) -> None:
    """An answer, or an error of one line that names the part."""
    for status, text in sweep.answers[case.id]:
        assert status == case.status and case.said in text
        assert not SECRETS.search(text)


@pytest.mark.parametrize("case", [c for c in CASES if c.status != 200 and c.path in OPENAI], ids=lambda c: c.id)  # fmt: skip
def test_error(sweep: Sweep, case: Case) -> None:
    for _, text in sweep.answers[case.id]:
        error = json.loads(text)["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["param"] == case.param
        assert len(error["message"].splitlines()) == 1 and len(error["message"]) < 300


def test_good_pictures_after_each(sweep: Sweep) -> None:
    assert sweep.said == sweep.right and len(sweep.engines) == 1


def test_memory_is_back(sweep: Sweep) -> None:
    """What was kept of one request alone, of as many bytes as there may be, would show."""
    print([m >> 20 for m in sweep.memory])
    assert min(sweep.memory[WARM:]) - sweep.memory[WARM - 1] < MAX_BODY


def test_handles_are_back(sweep: Sweep) -> None:
    assert set(sweep.handles[WARM:]) == {sweep.handles[WARM - 1]}


def test_nothing_inside_was_visited_or_unpickled(sweep: Sweep) -> None:
    """Nor by a name that means another host the second time."""
    assert sweep.changing == [200, 400, 200, 400]
    assert sweep.inside.hits == 0 and not UNPICKLED.exists()


def test_the_log_has_no_secrets(sweep: Sweep) -> None:
    assert not SECRETS.search(sweep.log)


def test_no_address_is_visited_unless_it_is_allowed(tmp_path: Path) -> None:
    """Without --media-domain all of them are refused."""
    inside, addresses = Host(), next(c for c in CASES if c.name == "addresses inside").bodies()
    addresses += by_url("http://allowed.test:{inside}/circle.png")
    with serving("tiny-vlm", "--offline", log=tmp_path / "log") as server:
        for body in addresses:
            status, text = post(server, CHAT, body.replace(b"{inside}", b"%d" % inside.server_port))
            assert (status, json.loads(text)["error"]["param"]) == (400, AT)
        assert ask(server, shown(CIRCLE, text="What color is the circle?"))["choices"][0]["message"]["content"] == "red"  # fmt: skip
    assert inside.hits == 0
