"""A real server and a real browser, which reaches nothing else."""

from __future__ import annotations

import json
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Route, expect, sync_playwright

from octavo.checkpoint.hub import cache_folder
from tests.api.server import Server, serving

KEY, ADMIN = "page-key", "page-admin-key"
CHROMIUM = "/usr/bin/chromium"  # Debian: apt install chromium
FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync
--disable-background-networking --disable-component-update""".split()
SECONDS = 60  # until a step of a test is given up
AXE = "axe-core-4.14.1"
ENDLESS = """() => {
  const whole = window.fetch, more = { ignore_eos: true, max_tokens: 4000 };
  window.fetch = (url, asked) => whole(url, asked.body
    ? { ...asked, body: JSON.stringify({ ...JSON.parse(asked.body), ...more }) } : asked);
}"""
FORMATTING = "() => import('./ui/markdown.js').then(({ formatting }) => formatting())"
expect.set_options(timeout=1000 * SECONDS)


@pytest.fixture(scope="package")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = ("--api-key", KEY, "--admin-key", ADMIN)
    models = ("smollm2", "tiny-vlm")
    log = tmp_path_factory.mktemp("page") / "log"
    with serving(*models, "--offline", *keys, log=log) as one:
        yield one


@pytest.fixture(scope="package")
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


class Watched:
    """Pages of one visitor; `check` tells what they did that a page must not."""

    def __init__(self, context: BrowserContext, url: str) -> None:
        self.context, self.url = context, url
        self.asked: list[str] = []
        self.faults: list[str] = []
        context.set_default_timeout(1000 * SECONDS)
        context.on("request", lambda request: self.asked.append(request.url))
        context.on("weberror", lambda fault: self.faults.append(str(fault.error)))
        context.on("console", lambda said: self._heard(said.type, said.text))

    def _heard(self, kind: str, text: str) -> None:
        if kind in ("error", "warning") and "the server responded with" not in text:
            self.faults.append(text)

    def open(self, view: str = "", *, url: str | None = None) -> Page:
        page = self.context.new_page()
        page.goto((url or self.url) + "/" + view)
        page.wait_for_selector("html[data-ready]")
        page.evaluate(FORMATTING)  # or a quick reply is plain text for a moment
        return page

    def check(self, *hosts: str) -> None:
        """Nothing left these hosts, no script failed, and the policy had nothing to forbid."""
        places = {urlsplit(url).netloc for url in self.asked if url.startswith("http")}
        assert places <= {urlsplit(host).netloc for host in (self.url, *hosts)}
        assert self.faults == []


@pytest.fixture
def visit(chromium: Browser, server: Server) -> Iterator[Callable[..., Watched]]:
    """Makes visitors, who have the admin's key unless told otherwise."""
    made: list[Watched] = []

    def new(key: str | None = ADMIN, **options: Any) -> Watched:
        context = chromium.new_context(**options)
        if key is not None:
            kept = f"localStorage.setItem('octavo.key', {json.dumps(key)})"
            context.add_init_script(f"location.protocol == 'about:' || {kept}")
        made.append(Watched(context, server.url))
        return made[-1]

    yield new
    for one in made:
        one.context.close()


@pytest.fixture
def page(visit: Callable[..., Watched]) -> Iterator[Page]:
    visitor = visit()
    yield visitor.open()
    visitor.check()


def replying(page: Page, *deltas: dict[str, Any], finish: str = "stop") -> list[Any]:
    """Answers the page's chats in the server's place; the bodies that it has sent."""
    sent: list[Any] = []
    chunks = [{"choices": [{"index": 0, "delta": d, "finish_reason": None}]} for d in deltas]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"

    def answer(route: Route) -> None:
        sent.append(route.request.post_data_json)
        route.fulfill(body=text, content_type="text/event-stream")

    page.route("**/v1/chat/completions", answer)
    return sent


def say(page: Page, text: str) -> None:
    page.get_by_role("textbox", name="Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def settled(page: Page) -> None:
    """Until the reply is complete."""
    page.locator("[aria-busy=true]").wait_for(state="detached")
    page.get_by_role("button", name="Send", exact=True).wait_for()


def faults(page: Page) -> list[str]:
    """What axe, which was loaded, finds wrong with the page as it is."""
    run = "() => axe.run().then(r => r.violations.map(v => [v.impact, v.id, v.nodes[0].html]))"
    return [f"{i}: {id} {html}" for i, id, html in page.evaluate(run) if i != "minor"]


@pytest.fixture(scope="session")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The accessibility checker, from the package that carries it."""
    file = cache_folder() / f"{AXE}.min.js"
    if not file.exists():
        folder = tmp_path_factory.mktemp("axe")
        wanted = AXE.replace("-4", "@4")
        subprocess.run(["npm", "pack", "--silent", wanted], check=True, cwd=folder)
        with tarfile.open(folder / f"{AXE}.tgz") as tar:
            member = tar.extractfile("package/axe.min.js")
            assert member is not None
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(member.read())
    return file.read_text()
