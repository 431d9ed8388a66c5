"""What comes after the page: what formats replies, styles of other views, the history."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from octavo.server import page as served
from tests.page.conftest import Watched, replying, say, settled

LIBRARIES = ["vendor/dompurify/purify.es.mjs", "vendor/marked/marked.esm.js"]
LATER = ["highlight.js", "render.js", *LIBRARIES]
HOSTILE = "**bold** <img src=x onerror='window.hacked = 1'> [x](javascript:window.hacked=1)"
PLAIN = "Replies are plain text: what formats them could not be loaded."
# Names of what was asked for before a message could be written.
ASKED = """() => {
  const ready = performance.getEntriesByName("ready")[0].startTime;
  const before = performance.getEntriesByType("resource").filter((each) => each.startTime < ready);
  return before.map((each) => each.name.split("/ui/")[1]);
}"""
GROWN = """async ([text, step]) => {
  const { MarkdownView, formatting } = await import("./ui/markdown.js");
  await formatting();
  const drawn = (view) => view.element.innerHTML;
  const grown = new MarkdownView(document.createElement("div"));
  const differ = [];
  for (let end = step; end < text.length + step; end += step) {
    const whole = new MarkdownView(document.createElement("div"));
    const begun = text.slice(0, end);
    grown.update(begun);
    whole.update(begun);
    if (drawn(grown) !== drawn(whole)) differ.push(begun);
  }
  return differ;
}"""
KEPT = """async () => {
  const { MarkdownView, formatting } = await import("./ui/markdown.js");
  await formatting();
  const view = new MarkdownView(document.createElement("div"));
  document.querySelector(".log").append(view.element);
  view.update("```python\\nif one:\\n");
  const [figure, word] = ["figure", ".hl-word"].map((name) => view.element.querySelector(name));
  view.update("```python\\nif one:\\n    return 2\\n```\\n\\nAfter");
  return [figure, word].map((each) => view.element.contains(each));
}"""
DOCUMENT = """# Head

Some **bold**, `code` and [a link](https://a.example "title"), ~~gone~~ <b>no</b>.
Second line\\
third

1. one
2. two
   - inner
   - [x] done

     paragraph
3. three

> quote
> ```sql
> select 1 -- why
> ```

| a | b |
|---|:-:|
| 1 | **2** |
| `3` | 4 |

Head
====

```python
def f(x):  # why
    return "a\\"b"
```

- a

- b
---
    indented

![image](https://c.example/x.png)
"""


def held(page: Page, pattern: str) -> list[Route]:
    """Holds what is asked for by these names, until each is continued."""
    routes: list[Route] = []
    page.route(pattern, lambda route: routes.append(route))
    return routes


def let_go(page: Page, routes: list[Route], count: int) -> None:
    """Lets this many held requests go on, once they have come."""
    while len(routes) < count:
        page.wait_for_timeout(10)
    while routes:
        routes.pop().continue_()


def begun(visitor: Watched) -> Page:
    """A page that waits for nothing: what is asked of it can be held before."""
    return visitor.context.new_page()


def ready(page: Page, visitor: Watched) -> None:
    page.goto(f"{visitor.url}/")
    page.wait_for_selector("html[data-ready]")


def last(page: Page) -> Any:
    return page.get_by_role("article", name="Model").last


def kept(page: Page, text: str) -> None:
    """A chat with this reply."""
    replying(page, {"content": text})
    say(page, "Say it")
    settled(page)


def test_the_first_load_asks_only_for_what_it_shows(page: Page) -> None:
    asked = page.evaluate(ASKED)
    named = re.findall(r'(?:src|href)="ui/([^"]+)"', (served.FOLDER / "index.html").read_text())
    assert sorted(asked) == sorted(set(named))  # all at once, none found late
    assert [name for name in asked if name in (*LATER, "panels.css")] == []
    names = page.evaluate("performance.getEntriesByType('resource').map((e) => e.name)")
    later = [name.split("/ui/")[1] for name in names if "/ui/" in name]
    assert sorted(set(later) - set(asked)) == LATER


def test_a_reply_that_begins_before_what_formats_it(visit: Callable[..., Watched]) -> None:
    """It is plain text, of which nothing is read as HTML; then it is formatted, and the end stays in view."""
    visitor = visit()
    page = begun(visitor)
    routes = held(page, "**/ui/vendor/**")
    ready(page, visitor)
    long = "".join(f"\n\n{i}. item" for i in range(200))
    replying(page, {"content": HOSTILE}, {"content": long})
    say(page, "Show")
    settled(page)
    shown = last(page).locator(".text")
    assert shown.evaluate("e => e.textContent") == HOSTILE + long
    assert shown.locator("*").evaluate_all("all => all.map((e) => e.className)") == ["plain"]
    expect(page.locator("#toasts > *")).to_have_count(0)
    let_go(page, routes, len(LIBRARIES))
    expect(shown.locator("strong")).to_have_text("bold")
    expect(shown.locator("li")).to_have_count(200)
    expect(shown.locator("img, .plain, [onerror]")).to_have_count(0)
    expect(shown.get_by_text("item").last).to_be_in_viewport()
    assert page.evaluate("window.hacked") is None
    visitor.check()


@pytest.mark.parametrize("missing", [*LIBRARIES, "render.js"])
def test_what_formats_a_reply_cannot_be_loaded(visit: Callable[..., Watched], missing: str) -> None:
    """It is said, the text is plain, and nothing is HTML without the sanitizer; a new load brings all back."""
    visitor = visit()
    page = begun(visitor)
    page.route(f"**/ui/{missing}", lambda route: route.abort())
    ready(page, visitor)
    kept(page, HOSTILE)
    shown = last(page).locator(".text")
    expect(page.locator("#toasts")).to_contain_text(PLAIN)
    assert shown.evaluate("e => e.textContent") == HOSTILE
    assert shown.locator("*").evaluate_all("all => all.map((e) => e.className)") == ["plain"]
    page.reload()
    expect(page.locator("#toasts")).to_contain_text(PLAIN)
    expect(shown.locator(".plain")).to_have_text(HOSTILE)
    page.unroute(f"**/ui/{missing}")
    page.get_by_role("button", name="Reload").click()
    expect(shown.locator("strong")).to_have_text("bold")
    expect(shown.locator("img, .plain")).to_have_count(0)
    assert page.evaluate("window.hacked") is None
    visitor.faults = [fault for fault in visitor.faults if "ERR_FAILED" not in fault]
    visitor.check()


def test_what_is_sent_before_the_models_are_known(visit: Callable[..., Watched]) -> None:
    """It waits for them, and goes to the first; both views."""
    visitor = visit()
    page = begun(visitor)
    routes = held(page, "**/v1/models")
    ready(page, visitor)
    sent = replying(page, {"content": "Yes."})
    say(page, "Are you there?")
    let_go(page, routes, 2)
    settled(page)
    expect(last(page).locator(".text")).to_have_text("Yes.")
    assert [body["model"] for body in sent] == ["smollm2"]
    page.get_by_role("link", name="Playground").click()
    page.get_by_label("Length", exact=True).fill("3")
    page.get_by_label("Prompt", exact=True).press("Control+Enter")
    let_go(page, routes, 2)
    expect(page.locator(".token")).to_have_count(3)
    visitor.check()


def test_who_comes_back_to_a_reply_never_sees_it_plain(page: Page) -> None:
    page.add_init_script(
        """new MutationObserver(() => {
          if (document.querySelector(".plain")) window.plain = true;
        }).observe(document, { childList: true, subtree: true });"""
    )
    kept(page, "**bold**")
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert last(page).locator("strong").count() == 1
    assert page.evaluate("window.plain") is None
    page.get_by_role("button", name="New chat", exact=True).click()
    page.reload()  # nothing is to be shown: as the first load
    page.wait_for_selector("html[data-ready]")
    expect(page.get_by_role("article")).to_have_count(0)
    assert [name for name in page.evaluate(ASKED) if name in LATER] == []
    expect(page.locator("#history li")).to_have_count(1)


SLOW = """() => {
  const whole = indexedDB.open.bind(indexedDB);
  indexedDB.open = (...asked) => {
    const real = whole(...asked), seen = {};
    real.onupgradeneeded = () => { seen.result = real.result; seen.onupgradeneeded?.(); };
    real.onsuccess = () => { seen.result = real.result; window.opened = () => seen.onsuccess(); };
    return seen;
  };
}"""


def test_a_message_that_is_sent_before_the_history_is_there(page: Page) -> None:
    kept(page, "Old.")
    page.get_by_role("button", name="New chat", exact=True).click()
    page.add_init_script(f"({SLOW})()")
    page.reload()
    page.wait_for_selector("html[data-ready]")
    while not page.evaluate("Boolean(window.opened)"):
        page.wait_for_timeout(10)
    replying(page, {"content": "New."})
    say(page, "First")
    settled(page)
    expect(page.locator("#history li")).to_have_count(1)
    page.evaluate("window.opened()")
    expect(page.locator("#history li")).to_have_text(["First", "Say it"])
    expect(last(page).locator(".text")).to_have_text("New.")
    stored = "import('./ui/store.js').then((store) => store.all())"
    titles = [chat["title"] for chat in page.evaluate(stored)]
    assert titles == ["First", "Say it"]


@pytest.mark.parametrize("step", [1, 7, 40])
def test_a_text_that_grows_is_drawn_as_if_it_had_come_at_once(page: Page, step: int) -> None:
    assert page.evaluate(GROWN, [DOCUMENT, step]) == []


def test_what_stays_of_a_block_that_grows_is_left_alone(page: Page) -> None:
    """And the copy button has what the block is at the end."""
    assert page.evaluate(KEPT) == [True, True]
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator(".log").get_by_role("button", name="Copy the code").click()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == "if one:\n    return 2\n"


def test_other_views_bring_their_styles(visit: Callable[..., Watched]) -> None:
    visitor = visit()
    page = begun(visitor)
    styles = held(page, "**/ui/panels.css")
    page.goto(f"{visitor.url}/#playground", wait_until="commit")
    while not styles:
        page.wait_for_timeout(10)
    expect(page.locator("main > .playground")).to_have_count(0)  # not without them
    styles[0].continue_()
    expect(page.locator("main > .playground")).to_have_css("display", "grid")
    page.get_by_role("link", name="Dashboard").click()
    page.get_by_role("heading", name="Dashboard").wait_for()
    assert [url for url in visitor.asked if url.endswith("panels.css")] == [f"{visitor.url}/ui/panels.css"]  # fmt: skip
    visitor.check()


def test_a_view_that_cannot_be_loaded_is_said(visit: Callable[..., Watched]) -> None:
    visitor = visit()
    page = begun(visitor)
    page.route("**/ui/vendor/uplot/uPlot.esm.js", lambda route: route.abort())
    ready(page, visitor)
    page.get_by_role("link", name="Dashboard").click()
    expect(page.locator("#toasts")).to_have_text(
        "This view cannot be loaded. Does the server still run?"
    )
    expect(page.get_by_role("textbox", name="Message", exact=True)).to_be_visible()
    assert json.dumps(visitor.faults).count("ERR_FAILED") == len(visitor.faults)
