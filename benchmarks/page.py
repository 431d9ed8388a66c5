"""How fast the page is there, and whether it keeps up with a reply: first load and frames, in Chromium.

python benchmarks/page.py [--runs 9] [--rate 200] [--seconds 10]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
import json
import socket
import statistics
import threading
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import uvicorn
import uvloop
from playwright.sync_api import Browser, sync_playwright
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from octavo.server import page as served

TEXT = Path(__file__).parents[1].joinpath("CONTRIBUTING.md").read_text()[:4000]
TEXT += "\n\n```python\n" + Path(__file__).read_text()[:4000]
CHROMIUM = "/usr/bin/chromium"
FRAME = 1000 / 60  # ms
FRAMES = """() => {
  window.frames_ = []; window.long_ = [];
  const next = (time) => { frames_.push(time); requestAnimationFrame(next); };
  requestAnimationFrame(next);
  new PerformanceObserver((list) => long_.push(...list.getEntries().map((e) => e.duration)))
    .observe({ type: "longtask" });
}"""


def application(rate: int, seconds: float) -> Starlette:
    """The page, and a model that writes so many tokens a second."""

    async def tokens() -> AsyncGenerator[bytes, None]:
        loop = asyncio.get_running_loop()
        began = loop.time()
        for i in range(int(rate * seconds)):
            await asyncio.sleep(max(0.0, began + i / rate - loop.time()))
            delta = {"content": TEXT[4 * i % len(TEXT) :][:4]}
            chunk = {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
            yield f"data: {json.dumps(chunk)}\n\n".encode()
        yield b"data: [DONE]\n\n"

    async def chat(request: Request) -> StreamingResponse:
        return StreamingResponse(tokens(), media_type="text/event-stream")

    async def models(request: Request) -> JSONResponse:
        return JSONResponse({"data": [{"id": "scripted", "state": "ready"}]})

    own = [Route("/v1/chat/completions", chat, methods=["POST"]), Route("/v1/models", models)]
    return Starlette(routes=[*served.ROUTES, *own])


@contextlib.contextmanager
def listening(app: Starlette) -> Iterator[str]:
    """Serves an application until the end of the block; its address."""
    sock = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: uvloop.run(server.serve([sock])))  # as octavo serve
    thread.start()
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}/"
    finally:
        server.should_exit = True
        thread.join()


def first_load(browser: Browser, url: str) -> float:
    """Milliseconds from the navigation to a page that takes a message, with nothing in its cache."""
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(url)
        page.wait_for_selector("html[data-ready]")
        return float(page.evaluate("performance.getEntriesByName('ready')[0].startTime"))


def next_load(browser: Browser, url: str, runs: int) -> list[float]:
    """The same of a visitor who comes back to a reply, which is shown by then."""
    taken = []
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(url)
        page.wait_for_selector("html[data-ready]")
        page.get_by_role("textbox", name="Message", exact=True).fill("Go")
        page.keyboard.press("Enter")
        page.wait_for_selector(".message .foot .speed")
        for _ in range(runs):
            page.reload()
            page.wait_for_selector("html[data-ready]")
            assert page.locator(".message.assistant h2").count() > 0
            taken.append(page.evaluate("performance.getEntriesByName('ready')[0].startTime"))
    return taken


def frames(browser: Browser, url: str, seconds: float) -> dict[str, Any]:
    """Times between frames while a reply is written, in milliseconds, and tasks above 50 ms."""
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(url)
        page.wait_for_selector("html[data-ready]")
        page.get_by_role("textbox", name="Message", exact=True).fill("Go")
        page.evaluate(FRAMES)
        page.keyboard.press("Enter")
        page.wait_for_selector(".message .foot .speed", timeout=1000 * (seconds + 60))
        times, long = page.evaluate("[frames_, long_]")
    gaps = sorted(b - a for a, b in zip(times, times[1:], strict=False))
    return {
        "frames": len(gaps),
        "median_ms": round(statistics.median(gaps), 2),
        "p99_ms": round(gaps[int(0.99 * len(gaps))], 2),
        "longest_ms": round(gaps[-1], 2),
        "dropped": sum(round(gap / FRAME) - 1 for gap in gaps if gap > 1.5 * FRAME),
        "long_tasks": len(long),
    }


def told(what: str, taken: list[float]) -> None:
    """Prints the median and what it is of."""
    print(f"{what}: median {statistics.median(taken):.0f} ms, of {[round(x) for x in taken]}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--rate", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=10)
    given = parser.parse_args()
    wire = sum(len(gzip.compress((served.FOLDER / name).read_bytes())) for name in served.names())
    print(f"all files, compressed: {wire / 1024:.0f} KiB")
    with sync_playwright() as playwright, listening(application(given.rate, given.seconds)) as url:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        loads = [first_load(browser, url) for _ in range(given.runs)]
        told("first load", loads)
        with listening(application(2000, 0.4)) as short:
            told("next load, to a reply", next_load(browser, short, given.runs))
        print(f"{given.rate} tokens/s: {json.dumps(frames(browser, url, given.seconds))}")
        browser.close()


if __name__ == "__main__":
    main()
