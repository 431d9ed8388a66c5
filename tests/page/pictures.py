"""Draws the pictures of the page and of the terminal that the documents show:
python -m tests.page.pictures"""

from __future__ import annotations

import io
import json
import re
import tempfile
import threading
import urllib.request
from itertools import count
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Locator, Page, sync_playwright
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from tests.api.server import Server, serving
from tests.page.conftest import CHROMIUM, FLAGS, FORMATTING, say, settled
from tests.page.test_fleet import simulated_gateway
from tests.terminal import Terminal

FOLDER = Path(__file__).parents[2] / "docs" / "images"
WIDE, PHONE = {"width": 1180, "height": 740}, {"width": 390, "height": 800}
STORY = "Once upon a time, there was a lighthouse keeper who"
SHADES = 200  # colours of a picture, which keep it small


CONTROLS = re.compile(
    r"\x1b\[\?\d+[hl]|\x1b\[2K|[^\r\n]*\r(?!\n)"
)  # of the cursor, and what is overwritten
SCREEN = """<style>pre {{ background: #1d1b19; color: #ece7de; font: 14px/1.45 "DejaVu Sans Mono";
border-radius: 10px; padding: 18px 22px; width: max-content; margin: 0 }}</style><pre>{code}</pre>"""
COLUMNS = 100
LOCAL = "http://127.0.0.1:8000"
QUESTION = "What is the capital of France?"
RELEASE = {"model": "qwen", "stable": "default", "canary": "next", "steps": [10, 50, 100]}


def save(page: Page | Locator, name: str) -> None:
    drawn = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    drawn.quantize(SHADES, dither=Image.Dither.NONE).save(FOLDER / name, optimize=True)


def visit(browser: Browser, server: Server, view: str, scheme: str, phone: bool = False) -> Page:
    page = browser.new_page(
        viewport=PHONE if phone else WIDE,  # type: ignore[arg-type]
        color_scheme=scheme,  # type: ignore[arg-type]
        device_scale_factor=1.5,
    )
    page.goto(f"{server.url}/{view}")
    page.wait_for_selector("html[data-ready]")
    page.evaluate(FORMATTING)
    return page


def chat(page: Page) -> None:
    for text in (
        QUESTION,
        "Write a Python function that adds two numbers.",
    ):
        say(page, text)
        settled(page)
    page.get_by_role("region", name="Conversation", exact=True).evaluate("e => e.scrollTo(0, 0)")


def playground(page: Page) -> None:
    page.get_by_label("Prompt", exact=True).fill(STORY)
    page.get_by_label("Seed", exact=True).fill("7")
    page.get_by_role("button", name="Complete", exact=True).click()
    page.get_by_text("tokens in").wait_for()
    page.get_by_label("Prompt", exact=True).scroll_into_view_if_needed()
    page.locator(".given").evaluate("e => e.scrollTo(0, 0)")
    page.locator(".token").nth(8).click()


def dashboard(page: Page, server: Server) -> None:
    def ask(number: int) -> None:
        for i in range(9):
            prompt = f"{STORY} {number}" * (1 + i % 3)
            server.post("/v1/completions", {"prompt": prompt, "max_tokens": 40 + 30 * (i % 4)})

    asking = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
    for one in asking:
        one.start()
    page.wait_for_timeout(20_000)
    save(page, "page-dashboard.png")
    for one in asking:
        one.join()


def asking(server: Server, until: threading.Event) -> list[threading.Thread]:
    """Three clients that read streams until something has happened."""

    def ask(client: int) -> None:
        for i in count():
            user = {"user": f"{client}-{i}", "prompt": f"{STORY} {client}" * 30}
            body = {"model": "qwen", "max_tokens": 60 + 20 * (i % 5), "stream": True} | user
            with urllib.request.urlopen(
                f"{server.url}/v1/completions", json.dumps(body).encode()
            ) as r:
                r.read()
            if until.wait(0.1):
                return

    clients = [threading.Thread(target=ask, args=(client,)) for client in range(3)]
    for one in clients:
        one.start()
    return clients


def gateway(browser: Browser, folder: Path) -> None:
    """A release half-way."""
    with simulated_gateway(folder, "qwen", step=8) as server:
        server.post("/v1/releases", RELEASE)
        server.post("/v1/releases/promote", {"model": "qwen"})
        page = visit(browser, server, "#dashboard", "light")
        page.set_viewport_size({"width": WIDE["width"], "height": 1740})
        seen = threading.Event()
        clients = asking(server, seen)
        page.wait_for_timeout(25_000)
        save(page, "page-gateway.png")
        seen.set()
        for one in clients:
            one.join()


def terminal(browser: Browser) -> None:
    """A server, an answer, and a look at the server."""
    server = Terminal("serve", "--offline", columns=COLUMNS)
    shown = "$ octavo serve\n" + server.wait_for("}]}'")
    chat = Terminal("chat", "-p", QUESTION, columns=COLUMNS)
    chat.end()
    body = json.dumps({"prompt": STORY, "max_tokens": 3000, "ignore_eos": True}).encode()
    asked = threading.Thread(target=urllib.request.urlopen, args=(f"{LOCAL}/v1/completions", body))
    asked.start()
    top = Terminal("top", "--server", LOCAL, "--once", columns=COLUMNS)
    top.end()
    asked.join()
    server.process.terminate()
    server.end()
    shown += f"\n\n$ octavo chat -p '{QUESTION}'\n{chat.seen}\n$ octavo top --server {LOCAL} --once\n{top.seen}"
    console = Console(record=True, file=io.StringIO(), width=COLUMNS)
    console.print(Text.from_ansi(CONTROLS.sub("", shown)))
    page = browser.new_page(device_scale_factor=1.5)
    page.set_content(console.export_html(inline_styles=True, theme=MONOKAI, code_format=SCREEN))
    save(page.locator("pre"), "terminal.png")


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    log = Path(tempfile.mkdtemp()) / "log"
    with serving("smollm2", "--offline", log=log) as server, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        gateway(browser, log.parent)
        terminal(browser)
        page = visit(browser, server, "#chat", "light")
        chat(page)
        save(page, "page-chat.png")
        page = visit(browser, server, "#playground", "dark")
        playground(page)
        save(page, "page-playground.png")
        page = visit(browser, server, "#chat", "light", phone=True)
        chat(page)
        save(page, "page-phone.png")
        dashboard(visit(browser, server, "#dashboard", "light"), server)
        browser.close()


if __name__ == "__main__":
    main()
