"""The chat in a real browser, with a real server behind it where a reply is not scripted."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, expect

from tests.api.server import Server
from tests.api.test_images import drawing
from tests.page.conftest import ENDLESS, Watched, replying, say, settled

QUESTION = "What is the capital of France?"
TOOL = {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}


def last(page: Page) -> Any:
    return page.get_by_role("article", name="Model").last


def setting(page: Page, name: str, value: str) -> None:
    page.get_by_label(name, exact=True).fill(value)


def test_a_reply_streams_and_is_kept(page: Page, server: Server) -> None:
    say(page, QUESTION)
    settled(page)
    body = {"model": "smollm2", "messages": [{"role": "user", "content": QUESTION}]}
    key = {"authorization": "Bearer page-key"}
    wanted = server.post("/v1/chat/completions", body, key)[1]["choices"][0]["message"]["content"]
    expect(last(page).locator(".text")).to_have_text(wanted)
    expect(last(page).locator(".speed")).to_contain_text("tokens")
    assert page.locator("#history li").all_inner_texts() == [QUESTION]
    page.reload()
    expect(last(page).locator(".text")).to_have_text(wanted)
    page.get_by_role("button", name="Export this chat").click()
    with page.expect_download() as saved:
        page.get_by_role("button", name="Markdown").click()
    assert saved.value.path().read_text() == f"# {QUESTION}\n\n## You\n\n{QUESTION}\n\n## Model\n\n{wanted}\n"  # fmt: skip
    page.get_by_role("button", name="Export this chat").click()
    with page.expect_download() as saved:
        page.get_by_role("button", name="JSON").click()
    whole = json.loads(saved.value.path().read_text())
    assert [m["text"] for m in whole["messages"]] == [QUESTION, wanted]
    assert whole["leaf"] == whole["messages"][1]["id"] and whole["settings"]["system"] == ""


def test_stop(page: Page, server: Server) -> None:
    page.evaluate(ENDLESS)
    say(page, QUESTION)
    expect(last(page).locator(".text")).to_contain_text("Paris")
    page.keyboard.press("Escape")
    settled(page)
    expect(last(page).locator(".note")).to_have_text("Stopped.")
    server.headers = {"authorization": "Bearer page-admin-key"}
    server.wait_idle()


def test_a_reply_that_is_left_is_stopped(page: Page) -> None:
    page.evaluate(ENDLESS)
    say(page, QUESTION)
    expect(last(page).locator(".text")).to_contain_text("Paris")
    page.reload()
    expect(last(page).locator(".note")).to_have_text("Stopped.")
    settled(page)


def test_edit_regenerate_and_branches(page: Page) -> None:
    sent = replying(page, {"content": "One."})
    say(page, "First")
    settled(page)
    you = page.get_by_role("article", name="You")
    you.get_by_role("button", name="Edit").click()
    page.get_by_label("Edited message").fill("Second")
    you.get_by_role("button", name="Send").click()
    settled(page)
    expect(you.locator(".text")).to_have_text("Second")
    expect(you.locator(".branches")).to_have_text("2/2")
    last(page).get_by_role("button", name="Regenerate").click()
    settled(page)
    expect(last(page).locator(".branches")).to_have_text("2/2")
    you.get_by_role("button", name="Previous branch").click()
    expect(you.locator(".text")).to_have_text("First")
    said = [[m["content"] for m in body["messages"]] for body in sent]
    assert said == [["First"], ["Second"], ["Second"]]
    last(page).get_by_role("button", name="Branch into a new chat").click()
    say(page, "More")
    settled(page)
    assert [m["content"] for m in sent[-1]["messages"]] == ["First", "One.", "More"]
    expect(page.locator("#history li")).to_have_count(2)
    page.get_by_role("button", name="Delete “First”").first.click()
    expect(page.locator("#history li")).to_have_count(1)
    page.get_by_role("button", name="Undo").click()
    expect(page.locator("#history li")).to_have_count(2)


def test_settings_are_sent(page: Page) -> None:
    sent = replying(page, {"content": "Yes."})
    page.get_by_role("button", name="Settings of this chat").click()
    fields = page.get_by_role("region", name="Settings of this chat").locator("input")
    expect(fields).to_have_count(10)
    for each in fields.all():
        expect(each).to_have_accessible_description(re.compile(r"\w+ \w+"))
    setting(page, "System prompt", "Be brief.")
    setting(page, "Temperature", "0.5")
    page.get_by_text("More", exact=True).click()
    setting(page, "Seed", "7")
    setting(page, "Stop at", "\\n")
    page.get_by_label("Thinking").select_option("low")
    say(page, "Hello")
    settled(page)
    wanted = {"temperature": 0.5, "seed": 7, "stop": "\n", "reasoning_effort": "low"}
    assert sent[0].items() >= wanted.items() and "top_p" not in sent[0]
    assert sent[0]["messages"][0] == {"role": "system", "content": "Be brief."}


def test_thoughts_are_folded(page: Page) -> None:
    replying(page, {"reasoning_content": "Two and two"}, {"content": "4"})
    say(page, "2 + 2?")
    settled(page)
    expect(last(page).locator(".text")).to_have_text("4")
    expect(page.get_by_text("Two and two")).to_be_hidden()
    page.get_by_text("Thoughts", exact=True).click()
    expect(page.get_by_text("Two and two")).to_be_visible()


def test_calls_are_answered(page: Page) -> None:
    function = {"name": "get_weather", "arguments": '{"city": '}
    start = {"index": 0, "id": "call_1", "type": "function", "function": function}
    more = {"index": 0, "function": {"arguments": '"Paris"}'}}
    sent = replying(page, {"tool_calls": [start]}, {"tool_calls": [more]}, finish="tool_calls")
    page.get_by_role("button", name="Settings of this chat").click()
    page.get_by_text("More", exact=True).click()
    setting(page, "Tools", json.dumps([TOOL]))
    say(page, "Weather?")
    settled(page)
    call = page.get_by_role("group", name="Call of get_weather")
    expect(call.locator("pre")).to_have_text('{\n  "city": "Paris"\n}')
    replied = replying(page, {"content": "It is sunny."})
    page.get_by_label("Result of get_weather").fill("sunny")
    page.get_by_role("button", name="Send the result").click()
    settled(page)
    expect(last(page).locator(".text")).to_have_text("It is sunny.")
    assert sent[0]["tools"] == [{"type": "function", "function": TOOL}]
    asked, result = replied[0]["messages"][1:]
    assert asked["tool_calls"][0]["function"]["arguments"] == '{"city": "Paris"}'
    assert result == {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}


def test_real_calls(page: Page, server: Server) -> None:
    """The server takes the page's tools, and the messages it makes of a call and its result."""
    page.get_by_role("button", name="Settings of this chat").click()
    setting(page, "Length", "3")
    page.get_by_text("More", exact=True).click()
    setting(page, "Tools", json.dumps([TOOL]))
    say(page, "Weather?")
    settled(page)
    expect(last(page).locator(".note")).to_have_text("It ends here because of its length.")


def test_images(page: Page, tmp_path: Path) -> None:
    page.get_by_label("Model", exact=True).select_option("tiny-vlm")
    file = tmp_path / "circle.png"
    file.write_bytes(drawing(("circle", "red", (60, 40, 140, 120))))
    page.get_by_label("Images", exact=True).set_input_files(file)
    expect(page.get_by_alt_text("Image 1", exact=True)).to_be_visible()
    say(page, "What color is the circle?")
    settled(page)
    expect(last(page).locator(".text")).to_have_text("red")
    expect(page.get_by_alt_text("Image 1 of the message")).to_be_visible()


BRING = """([bytes, how]) => {
  const brought = new DataTransfer();
  brought.items.add(new File([new Uint8Array(bytes)], "a.png", { type: "image/png" }));
  const event = how === "drop" ? new DragEvent(how, { dataTransfer: brought, bubbles: true })
    : new ClipboardEvent(how, { clipboardData: brought, bubbles: true });
  document.querySelector(".composer textarea").dispatchEvent(event);
}"""


def test_images_are_pasted_dropped_and_taken_away(page: Page) -> None:
    sent = replying(page, {"content": "Yes."})
    colours = {"paste": "red", "drop": "blue"}
    for how, colour in colours.items():
        picture = drawing(("circle", colour, (60, 40, 140, 120)))
        page.evaluate(BRING, [list(picture), how])
        expect(page.get_by_alt_text("Image 1", exact=True)).to_be_visible()
    expect(page.get_by_alt_text("Image 2", exact=True)).to_be_visible()
    page.get_by_role("button", name="Remove image 1").click()
    say(page, "Which colour?")
    settled(page)
    image, text = sent[0]["messages"][0]["content"]
    assert text == {"type": "text", "text": "Which colour?"}
    head, _, data = image["image_url"]["url"].partition(",")
    assert (head, base64.b64decode(data)) == ("data:image/png;base64", picture)


def test_markdown(page: Page) -> None:
    text = "# Head\n\nSome **bold** `code`\n\n```python\ndef f(x):  # why\n    return x\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n- one\n- two\n"
    replying(page, *({"content": part} for part in text))
    say(page, "Show")
    settled(page)
    shown = last(page).locator(".text")
    assert shown.get_by_role("heading").inner_text() == "Head"
    assert shown.locator("strong").inner_text() == "bold"
    assert shown.locator("li").all_inner_texts() == ["one", "two"]
    assert shown.locator("td").all_inner_texts() == ["1", "2"]
    assert shown.locator(".hl-comment").inner_text() == "# why"
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    shown.get_by_role("button", name="Copy the code").click()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == "def f(x):  # why\n    return x\n"


HOSTILE = [
    "<script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 1'>",
    "<svg onload='window.hacked = 1'><style>*{display:none}</style>",
    "[click](javascript:window.hacked=1) [data](data:text/html,x) <javascript:window.hacked=1>",
    "![pixel](https://elsewhere.example/x.png?secret)",
    "<iframe src='https://elsewhere.example'></iframe><form action='https://elsewhere.example'>",
    "```html onload=x\" onmouseover=\"window.hacked=1\n<script>window.hacked = 1</script>\n```",
    "<a href='javascript:window.hacked=1' id='main'>x</a><base href='https://elsewhere.example/'>",
    "[x](https://a.example/\"onmouseover=\"window.hacked=1)",
]  # fmt: skip


def test_hostile_replies_do_nothing(page: Page) -> None:
    replying(page, *({"content": text + "\n\n"} for text in HOSTILE))
    say(page, "<img src=x onerror='window.hacked = 1'>")
    settled(page)
    shown = page.locator(".log")
    expect(shown).to_contain_text("<script>window.hacked = 1</script>")
    made = "script, img, svg:not(.glyph), iframe, form, style, base, [onerror], [onmouseover], [onload]"
    expect(shown.locator(made)).to_have_count(0)
    links = shown.locator("a").evaluate_all("all => all.map(a => [a.protocol, a.rel])")
    assert {protocol for protocol, _ in links} == {"https:"}
    assert {rel for _, rel in links} == {"noopener noreferrer nofollow"}
    for link in shown.locator("a").all():
        link.hover()
    assert page.evaluate("window.hacked") is None


def test_lines_of_a_megabyte(page: Page) -> None:
    """In pieces, as they come: words, brackets, and a block of code without an end."""
    for begin, unit in (("", "word "), ("", "[("), ("```\n", "x" * 9 + "\n")):
        text = begin + unit * (1_000_000 // len(unit))
        parts = [text[i : i + 50_000] for i in range(0, len(text), 50_000)]
        page.keyboard.press("Control+Shift+O")
        replying(page, *({"content": part} for part in parts))
        say(page, "Go on")
        settled(page)
        assert last(page).locator(".text").evaluate("e => e.textContent.length") >= 999_000
    say(page, "Still there?")
    settled(page)


def test_errors_are_told(page: Page) -> None:
    page.get_by_role("button", name="Settings of this chat").click()
    setting(page, "Length", "100000")
    say(page, QUESTION)
    settled(page)
    expect(page.get_by_role("alert")).to_contain_text("maximum context length is 8192 tokens")
    setting(page, "Length", "2")
    page.get_by_role("button", name="Try again").click()
    settled(page)
    expect(page.get_by_role("alert")).to_have_count(0)


def test_tools_that_are_no_json_are_not_sent(page: Page) -> None:
    sent = replying(page, {"content": "Yes."})
    page.get_by_role("button", name="Settings of this chat").click()
    page.get_by_text("More", exact=True).click()
    setting(page, "Tools", "{")
    say(page, "Hello")
    expect(page.locator("#toasts")).to_contain_text("Tools are no JSON")
    expect(page.get_by_role("textbox", name="Message", exact=True)).to_have_value("Hello")
    assert sent == []


def test_the_theme_is_the_systems_or_ones_own(visit: Callable[..., Watched]) -> None:
    visitor = visit(color_scheme="dark")
    page = visitor.open()
    shade = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(shade)
    page.get_by_role("button", name="Theme: as the system’s").click()
    expect(page.get_by_role("button", name="Theme: light")).to_be_visible()
    light = page.evaluate(shade)
    page.reload()
    page.get_by_role("button", name="Theme: light").click()
    assert page.evaluate(shade) == dark != light
    page.get_by_role("button", name="Theme: dark").click()
    page.emulate_media(color_scheme="light")
    assert page.evaluate(shade) == light
    visitor.check()


def test_on_a_phone(visit: Callable[..., Watched]) -> None:
    visitor = visit(viewport={"width": 360, "height": 700}, has_touch=True, is_mobile=True)
    page = visitor.open()
    replying(page, {"content": "```\n" + "a long line " * 40 + "\n```\n" + "long" * 100})
    say(page, "Hello")
    settled(page)
    page.get_by_role("button", name="Open the menu").click()
    page.get_by_role("link", name="Dashboard").click()
    page.get_by_role("heading", name="Dashboard").wait_for()
    expect(page.get_by_role("link", name="Dashboard")).not_to_be_in_viewport()
    page.get_by_role("button", name="Open the menu").click()
    page.get_by_role("link", name="Chat", exact=True).click()
    for view in ("chat", "playground", "dashboard"):
        page.goto(f"{visitor.url}/#{view}")
        page.locator(f"main > .{view}").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") == 360
    visitor.check()


def test_by_keyboard(page: Page) -> None:
    replying(page, {"content": "Hi."})
    page.locator("body").press("/")
    page.keyboard.type("Hello")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("there")
    page.keyboard.press("Enter")
    settled(page)
    expect(page.get_by_role("article", name="You").locator(".text")).to_have_text("Hello\nthere")
    expect(page.locator(".chat [role=status]")).to_have_text("The reply is complete.")  # said aloud
    page.keyboard.press("Control+Shift+O")
    expect(page.get_by_role("article")).to_have_count(0)
    expect(page.get_by_role("textbox", name="Message", exact=True)).to_be_focused()
