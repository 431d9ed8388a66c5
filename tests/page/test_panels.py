"""The playground, the dashboard, keys, prefixes and accessibility in a real browser."""

from __future__ import annotations

import http.client
import json
import math
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from playwright.sync_api import Page, expect

from tests.api.server import Server
from tests.page.conftest import ADMIN, ENDLESS, KEY, Watched, faults, replying, say, settled

HEADERS = {"authorization": f"Bearer {ADMIN}"}
PROMPT = "Once upon a time"
WARM = (0.9, 0.6, 0.3, 0.1, 0.0)  # the least likelihood of each colour


def play(page: Page, **numbers: str) -> None:
    page.get_by_role("link", name="Playground").click()
    page.get_by_label("Prompt", exact=True).fill(PROMPT)
    for name, value in ({"Temperature": "0", "Length": "12"} | numbers).items():
        page.get_by_label(name, exact=True).fill(value)


def complete(page: Page) -> None:
    page.get_by_role("button", name="Complete", exact=True).click()
    written(page)


def written(page: Page) -> None:
    page.get_by_role("button", name="Stop", exact=True).wait_for(state="hidden")


def text(page: Page) -> str:
    return page.get_by_role("region", name="Completion of the first model").inner_text()


def completion(server: Server, **changes: object) -> str:
    body = {"model": "smollm2", "prompt": PROMPT, "temperature": 0, "max_tokens": 12} | changes
    status, reply = server.post("/v1/completions", body, HEADERS)
    assert status == 200, reply
    return str(reply["choices"][0]["text"])


def likelihoods(server: Server) -> tuple[list[float], list[dict[str, float]]]:
    """The logarithms of what the tokens of the completion had, and the likeliest at each place."""
    body = {"model": "smollm2", "prompt": PROMPT, "temperature": 0, "max_tokens": 12, "logprobs": 5}
    found = server.post("/v1/completions", body, HEADERS)[1]["choices"][0]["logprobs"]
    return found["token_logprobs"], found["top_logprobs"]


def test_alternatives_are_gone_on_from(page: Page, server: Server) -> None:
    play(page)
    page.get_by_label("Prompt", exact=True).press("Control+Enter")
    written(page)
    expect(page.locator(".token")).to_have_count(12)
    assert "".join(page.locator(".token").all_text_contents()) == completion(server)
    each, tops = likelihoods(server)
    warm = [next(i for i, p in enumerate(WARM) if math.exp(logprob) >= p) for logprob in each]
    shown = page.locator(".token").evaluate_all("all => all.map(each => each.className)")
    assert shown == [f"token heat-{heat}" for heat in warm] and len(set(warm)) > 1
    page.locator(".token").nth(3).focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    card = page.get_by_role("dialog", name="What else could have come")
    expect(card.get_by_role("button")).to_have_count(5)
    names = [text.replace("·", " ") for text in card.locator("code").all_inner_texts()]
    assert names == sorted(tops[4], key=lambda name: -tops[4][name])
    kept = "".join(page.locator(".token").all_text_contents()[:4])
    chosen = card.get_by_role("button").nth(1)
    kept += chosen.locator("code").inner_text().replace("·", " ")
    chosen.click()
    expect(page.locator(".kept")).to_have_text(kept)
    written(page)
    shown = "".join(page.locator(".token").all_text_contents())
    assert shown == completion(server, prompt=PROMPT + kept)


def test_rules_are_kept_to(page: Page) -> None:
    play(page, Length="60", Temperature="1")
    page.get_by_label("Keep to").select_option("schema")
    rule = page.get_by_label("Schema, expression or grammar")
    rule.fill('{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}')
    complete(page)
    assert isinstance(json.loads(text(page))["a"], bool)
    page.get_by_label("Keep to").select_option("grammar")
    complete(page)
    assert text(page) in ("yes.", "no.")
    page.get_by_label("Keep to").select_option("regex")
    rule.fill("[")
    complete(page)
    expect(page.get_by_role("alert")).to_be_visible()
    page.get_by_label("Keep to").select_option("schema")
    rule.fill("{")
    page.get_by_role("button", name="Complete", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("The schema is no JSON")


def test_a_completion_is_stopped(page: Page, server: Server) -> None:
    play(page, Length="8000")
    page.evaluate(ENDLESS)
    page.get_by_role("button", name="Complete", exact=True).click()
    page.locator(".token").nth(20).wait_for()
    page.get_by_role("button", name="Stop", exact=True).click()
    expect(page.locator(".result .note").first).to_have_text("Stopped.")
    server.headers = HEADERS
    server.wait_idle()


def test_two_models_have_one_seed(page: Page) -> None:
    play(page, Temperature="1")
    page.get_by_label("Two models side by side").check()
    page.get_by_label("Show how likely").uncheck()
    sent = []
    page.on("request", lambda r: sent.append(r.post_data_json) if "completions" in r.url else None)
    page.get_by_role("combobox", name="Second model").select_option("smollm2")
    complete(page)
    first, second = page.locator(".completion").all_inner_texts()
    assert first == second != ""
    page.get_by_role("combobox", name="Second model").select_option("tiny-vlm")
    complete(page)
    assert [body["model"] for body in sent[2:]] == ["smollm2", "tiny-vlm"]
    assert sent[2]["seed"] == sent[3]["seed"]


def test_the_dashboard_moves_and_cancels(page: Page, server: Server) -> None:
    page.get_by_role("link", name="Dashboard").click()
    expect(page.get_by_text("Nothing runs.")).to_be_visible()
    answers = []
    body = {"model": "smollm2", "prompt": PROMPT, "max_tokens": 8000, "ignore_eos": True}

    def ask() -> None:
        named = HEADERS | {"x-request-id": "watched"}
        answers.append(server.post("/v1/completions", body, named))

    asking = threading.Thread(target=ask)
    asking.start()
    tile = page.get_by_role("article", name="Requests")
    expect(tile.locator(".now")).to_have_text("1running")
    written = page.get_by_role("article", name="Tokens written").locator(".now")
    expect(written).to_have_text(re.compile(r"[1-9].*tokens/s"))
    page.get_by_role("button", name="Cancel watched").click()
    asking.join()
    assert answers[0][0] == 499
    expect(tile.locator(".now")).to_have_text("0running")
    figures = {
        "Time to the first token": r"\dm?s", "Time between tokens": r"\dm?s", "KV cache": r"\d%",
        "Prompt tokens from the cache": r"\d%",
    }  # fmt: skip
    for name, figure in figures.items():
        expect(page.get_by_role("article", name=name).locator(".now")).to_have_text(re.compile(figure))  # fmt: skip
    memory = page.get_by_role("article", name="Memory").locator(".now").inner_text()
    assert float(memory.rstrip("GMB").strip()) > 0


def test_keys_are_asked_for(visit: Callable[..., Watched]) -> None:
    visitor = visit(key=None)
    page = visitor.open()
    page.get_by_label("Key", exact=True).fill("wrong")
    page.keyboard.press("Enter")
    expect(page.get_by_text("The server does not know this key.")).to_be_visible()
    page.get_by_label("Key", exact=True).fill(KEY)
    page.keyboard.press("Enter")
    expect(page.get_by_label("Model", exact=True)).to_have_value("smollm2")
    assert page.evaluate("localStorage.getItem('octavo.key')") is None
    page.reload()
    page.get_by_label("Key", exact=True).fill(KEY)
    page.get_by_label("Keep it in this browser").check()
    page.keyboard.press("Enter")
    expect(page.get_by_label("Model", exact=True)).to_have_value("smollm2")
    page.reload()
    expect(page.get_by_label("Model", exact=True)).to_have_value("smollm2")
    page.get_by_role("link", name="Dashboard").click()  # whose list of requests is for admins
    expect(page.get_by_role("heading", name="Models")).to_be_visible()
    expect(page.get_by_role("heading", name="Running requests")).to_be_hidden()
    page.get_by_role("button", name="API key").click()
    assert page.evaluate("localStorage.getItem('octavo.key')") is None
    visitor.check()


@contextmanager
def behind(server: Server, prefix: str) -> Iterator[str]:
    """A proxy that serves the server under a prefix; its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"

        def do_GET(self) -> None:
            assert self.path.startswith(prefix + "/"), self.path
            inner = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            with closing(inner):
                inner.request(
                    self.command, self.path.removeprefix(prefix), body, dict(self.headers)
                )
                with inner.getresponse() as answer, suppress(ConnectionError):  # left by the page
                    self.send_response(answer.status)
                    for name, value in answer.getheaders():
                        if name not in ("transfer-encoding", "connection"):
                            self.send_header(name, value)
                    self.end_headers()
                    while data := answer.read1(1 << 16):
                        self.wfile.write(data)

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=proxy.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{proxy.server_port}{prefix}"
    finally:
        proxy.shutdown()
        thread.join()
        proxy.server_close()


def test_under_a_prefix(visit: Callable[..., Watched], server: Server) -> None:
    with behind(server, "/deep/octavo") as url:
        visitor = visit()
        page = visitor.open(url=url)
        say(page, "What is the capital of France?")
        settled(page)
        expect(page.get_by_role("article", name="Model")).to_contain_text("Paris")
        page.get_by_role("link", name="Dashboard").click()
        expect(page.get_by_text("Live")).to_be_visible()
        visitor.check(url)
        visitor.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_fault(visit: Callable[..., Watched], axe: str, scheme: str) -> None:
    visitor = visit(color_scheme=scheme)
    page = visitor.open()
    page.evaluate(axe)

    assert faults(page) == []
    replying(page, {"reasoning_content": "hm"}, {"content": "# A\n\n```c\nint x; // y\n```\n\n|a|b|\n|-|-|\n|1|2|"})  # fmt: skip
    say(page, "Hello")
    settled(page)
    page.get_by_role("button", name="Settings of this chat").click()
    page.get_by_text("More", exact=True).click()
    page.get_by_text("Thoughts", exact=True).click()
    page.get_by_role("button", name="Edit").click()
    assert faults(page) == []
    play(page, Temperature="1")
    complete(page)
    assert faults(page) == []
    page.locator(".token").first.click()
    assert faults(page) == []
    page.keyboard.press("Escape")
    page.get_by_role("link", name="Dashboard").click()
    page.get_by_role("heading", name="Models").wait_for()
    assert faults(page) == []
    visitor.check()
