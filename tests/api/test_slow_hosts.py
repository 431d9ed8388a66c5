"""Pictures by URL whose hosts are slow, over HTTP, beside pictures that requests bring."""

from __future__ import annotations

import threading
from pathlib import Path

from tests.api.server import serving
from tests.api.test_hostile_media import INTERNET
from tests.api.test_images import ABOUT, CHAT, CIRCLE, ask, shown
from tests.unit.test_fetch import Waiting, response

SLOW = 4  # more than threads that decode


def test_a_picture_is_answered_while_others_are_fetched(tmp_path: Path) -> None:
    """Four requests wait for a host; one that brings its picture is answered, and then these are,
    with the same word."""
    host, done = Waiting(response(CIRCLE), SLOW), []
    env = {"PYTHONPATH": str(INTERNET), "OUTSIDE": str(host.port)}
    with serving("tiny-vlm", "--media-domain", "allowed.test", log=tmp_path / "log", env=env) as s:
        ask(s, shown(CIRCLE, text=ABOUT))  # whatever starts with the first has started
        by_url = shown(CIRCLE, text=ABOUT)
        by_url[0]["content"][0]["image_url"]["url"] = "http://allowed.test/circle.png"

        def fetched() -> None:
            status, reply = s.post(CHAT, {"messages": by_url, "temperature": 0, "max_tokens": 12})
            done.append(("fetched", status, reply["choices"][0]["message"]["content"]))

        threads = [threading.Thread(target=fetched) for _ in range(SLOW)]
        try:
            for thread in threads:
                thread.start()
            for _ in threads:
                assert host.visitors.acquire(timeout=30)
            reply = ask(s, shown(CIRCLE, text=ABOUT))
            done.append(("sent", 200, reply["choices"][0]["message"]["content"]))
        finally:
            host.close()
        for thread in threads:
            thread.join()
    assert done == [("sent", 200, "red"), *[("fetched", 200, "red")] * SLOW]
