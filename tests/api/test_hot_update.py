"""A model is changed under load on one machine: real engines, the new beside the old, and no other."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import psutil

from tests.api.server import Server, serving
from tests.api.test_gateway import ADMIN, upstreams, wait

PROMPTS = [f"Question {number}:" for number in range(4)]
LIMITS = ("--name", "smollm2", "--offline", "--context", "512", "--memory", "800MiB")
QUICK = {"model": "smollm2", "stable": "default", "canary": "next", "steps": [50, 100],
         "hold": 0.5, "min_events": 6, "warmup": 0,
         "guards": [{"metric": "error_rate", "max": 0.01}]}  # fmt: skip
Answer = tuple[str, str, str]  # prompt, who answered, text


def ask(server: Server, prompt: str, stream: bool = False) -> Answer:
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": 24, "temperature": 0,
            "ignore_eos": True, "stream": stream}  # fmt: skip
    request = urllib.request.Request(f"{server.url}/v1/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as reply:
        who, raw = reply.headers.get("x-replica", ""), reply.read()
    if not stream:
        return prompt, who, json.loads(raw)["choices"][0]["text"]
    assert raw.endswith(b"data: [DONE]\n\n")
    events = [json.loads(event[6:]) for event in raw.split(b"\n\n")[:-2]]
    return prompt, who, "".join(event["choices"][0]["text"] for event in events)


@contextmanager
def asking(gateway: Server) -> Iterator[list[Answer]]:
    """Four users ask all the while; each request has to be answered."""
    answers: list[Answer] = []
    over = Event()

    def user(number: int) -> None:
        while not over.wait(0.25):  # two processors are to load a model, too
            answers.append(ask(gateway, PROMPTS[number], stream=len(answers) % 2 == 0))

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        users = [pool.submit(user, number) for number in range(len(PROMPTS))]
        try:
            yield answers
        finally:
            over.set()
    for each in users:
        each.result()


def held(server: Server) -> int:
    """Bytes of memory that are a server's own, with all of its processes."""
    one = psutil.Process(server.process.pid)
    return sum(p.memory_full_info().pss for p in (one, *one.children(recursive=True)))


def said(server: Server) -> dict[str, str]:
    return {prompt: ask(server, prompt)[2] for prompt in PROMPTS}


def phase(gateway: Server) -> str:
    return str(json.loads(gateway.get("/v1/releases?model=smollm2", ADMIN)[1])["phase"])


def test_a_model_is_updated_under_load(smollm2: Path, worse: Path, tmp_path: Path) -> None:
    """Nobody is refused, every text is that of the version that gave it, the old one is gone."""
    arguments = ("--admin-key", "admin", "--probe-interval", "0.2")
    with (
        serving(str(smollm2), *LIMITS, log=tmp_path / "old") as old,
        serving(
            "--upstream", old.url, *arguments, log=tmp_path / "door", does="gateway"
        ) as gateway,
    ):
        names = {server: server.url.partition("://")[2] for server in (old,)}
        texts = {names[old]: said(old)}
        with asking(gateway) as answers:
            wait(lambda: len(answers) >= 8)
            before = held(old)
            with serving(str(worse), *LIMITS, log=tmp_path / "new") as new:
                names[new] = new.url.partition("://")[2]
                texts[names[new]] = said(new)
                gateway.post("/v1/upstreams", {"upstream": f"next={new.url}"}, ADMIN)
                wait(lambda: upstreams(gateway)[names[new]]["state"] == "up")
                assert gateway.post("/v1/releases", QUICK, ADMIN)[0] == 200
                wait(lambda: phase(gateway) == "promoted", 90)
                gateway.post("/v1/upstreams/drain", {"upstream": names[old]}, ADMIN)
                wait(lambda: not upstreams(gateway)[names[old]]["running"])
                assert old.stop() == 0
                gateway.post("/v1/upstreams/remove", {"upstream": names[old]}, ADMIN)
                after = len(answers)
                wait(lambda: len(answers) >= after + 12)
                new.wait_ready()
                assert held(new) < 1.2 * before
                at_last = answers[after + 4 :]  # those that were asked since
                assert {who for _, who, _ in at_last} == {names[new]}
                assert {who for _, who, _ in answers} == set(texts)
                assert all(text == texts[who][prompt] for prompt, who, text in answers)
                assert texts[names[old]] != texts[names[new]]


def test_what_does_not_fit_beside_the_old_is_refused_with_the_sum(
    smollm2: Path, tmp_path: Path
) -> None:
    log = tmp_path / "little"
    little = Server(str(smollm2), *LIMITS[:-1], "100MiB", log=log)
    began = time.monotonic()
    assert little.process.wait(60) != 0 and time.monotonic() - began < 60
    little.stop()
    assert "does not fit" in log.read_text() and "> 100 MiB" in log.read_text()
