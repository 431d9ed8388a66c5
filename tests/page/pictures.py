"""Draws the pictures of the page that the documents show: python -m tests.page.pictures"""

from __future__ import annotations

import io
import tempfile
import threading
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from tests.api.server import Server, serving
from tests.page.conftest import CHROMIUM, FLAGS, say, settled

FOLDER = Path(__file__).parents[2] / "docs" / "images"
WIDE, PHONE = {"width": 1180, "height": 740}, {"width": 390, "height": 800}
STORY = "Once upon a time, there was a lighthouse keeper who"
SHADES = 200  # colours of a picture, which keep it small


def save(page: Page, name: str) -> None:
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
    return page


def chat(page: Page) -> None:
    for text in (
        "What is the capital of France?",
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


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    log = Path(tempfile.mkdtemp()) / "log"
    with serving("smollm2", "--offline", log=log) as server, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
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
