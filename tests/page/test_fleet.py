"""What the dashboard shows of several servers and engines, in a real browser: a gateway with its
releases and experiments, and a server with replicas."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.api import faulty
from tests.api.server import Server, serving
from tests.page.conftest import ADMIN, Watched, faults, say, settled

HEADERS = {"authorization": f"Bearer {ADMIN}"}
GUARDS = [{"metric": "error_rate", "max": 0.01}, {"metric": "itl_mean", "worse_than_baseline": 1}]
RELEASE = {"model": "m", "stable": "default", "canary": "next", "hold": "1h", "guards": GUARDS}
SERIOUS = [{"metric": "error_rate", "max": 0.01, "alpha": 0.006}]  # one error of one: watched
FAILING = {"model": "simulated", "stable": "default", "canary": "bad", "steps": [100], "guards": SERIOUS}  # fmt: skip
VARIANTS = {"a": {"weight": 50}, "b": {"weight": 50, "set": {"temperature": 0.3}}}
EXPERIMENT = {"id": "cooler", "model": "m", "control": "a", "variants": VARIANTS}


@contextmanager
def simulated_gateway(folder: Path, name: str, *options: str, step: int = 1) -> Iterator[Server]:
    """A gateway, with a server that computes nothing in each of two pools."""
    fast = ("--name", name, "--step", str(step))
    simulated = [Server(*fast, log=folder / pool, does="simulate") for pool in ("old", "next")]
    try:
        places = ("--upstream", simulated[0].url, "--upstream", f"next={simulated[1].url}")
        with serving(*places, *options, log=folder / "log", does="gateway") as one:
            yield one
    finally:
        for server in simulated:
            server.stop()


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("gateway")
    with simulated_gateway(folder, "m", "--admin-key", ADMIN) as one:
        yield one


@pytest.fixture
def dashboard(visit: Callable[..., Watched], gateway: Server) -> Iterator[Page]:
    visitor = visit()
    yield visitor.open("#dashboard", url=gateway.url)
    visitor.check(gateway.url)


def part(page: Page, name: str) -> Locator:
    return page.get_by_role("region", name=name, exact=True)


def press(page: Page, name: str) -> None:
    page.get_by_role("button", name=name, exact=True).click()


def post(server: Server, path: str, body: Any) -> None:
    status, reply = server.post(path, body, HEADERS)
    assert status == 200, reply


def test_a_gateway_has_the_page(visit: Callable[..., Watched], gateway: Server) -> None:
    """Its chat goes through it, and its reference says what it serves."""
    visitor = visit()
    page = visitor.open(url=gateway.url)
    expect(page.get_by_label("Model", exact=True).locator("option")).to_have_text(["m"])
    with page.expect_response("**/v1/chat/completions") as answered:
        say(page, "Hello")
        settled(page)
    assert answered.value.headers["x-replica"].startswith("127.0.0.1:")
    reply = page.get_by_role("article", name="Model").locator(".text").inner_text()
    assert len(reply.split()) > 10
    page.get_by_role("link", name="API reference").click()
    expect(page.get_by_text("/v1/releases/{action}")).to_be_visible()
    visitor.check(gateway.url)


def test_upstreams_are_drained_and_resumed(dashboard: Page, gateway: Server) -> None:
    rows = part(dashboard, "Upstreams").locator("tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.nth(1)).to_contain_text("next")
    name = rows.nth(1).locator("code").inner_text()
    press(dashboard, f"Drain {name}")
    expect(rows.nth(1).locator(".state")).to_have_text("draining")
    assert gateway.metric("octavo_upstream_state", replica=name, state="draining") == 1
    press(dashboard, f"Resume {name}")
    expect(rows.nth(1).locator(".state")).to_have_text("up")
    for _ in range(3):
        post(gateway, "/v1/completions", {"model": "m", "prompt": "Hello", "max_tokens": 5})
    written = dashboard.get_by_role("article", name="Tokens written").locator(".now")
    expect(written).to_have_text(re.compile(r"[1-9].*tokens/s"))
    expect(dashboard.get_by_role("article", name="KV cache")).to_have_count(0)


def test_a_release_is_led_from_the_page(dashboard: Page, gateway: Server, axe: str) -> None:
    post(gateway, "/v1/releases", RELEASE)
    card = dashboard.get_by_role("article", name="Release of m")
    expect(card).to_contain_text("next in place of default has 5 % of the requests (step 1 of 5)")
    expect(card.locator("tbody tr")).to_have_count(2)
    expect(card.locator("tbody tr").first).to_contain_text("nothing seen yet")
    press(dashboard, "Next step of m")
    expect(card).to_contain_text("has 10 % of the requests (step 2 of 5): promote by admin")
    press(dashboard, "Pause the release of m")
    expect(card.locator("h3")).to_contain_text("paused")
    press(dashboard, "Resume the release of m")
    expect(card.locator("h3")).to_contain_text("running")
    for user in range(40):
        body = {"model": "m", "prompt": "Hello", "max_tokens": 2, "user": f"user-{user}"}
        post(gateway, "/v1/completions", body)
    expect(card.locator("tbody tr").first).to_contain_text("nothing against it")
    expect(card.locator("tbody tr").first).to_contain_text("0.00 % of")
    dashboard.evaluate(axe)
    assert faults(dashboard) == []
    press(dashboard, "Roll back m")
    press(dashboard, "Cancel")
    expect(card.locator("h3")).to_contain_text("running")
    press(dashboard, "Roll back m")
    assert faults(dashboard) == []
    press(dashboard, "Roll back")
    expect(card.locator("h3")).to_contain_text("rolled back")
    expect(card.get_by_role("button")).to_have_count(0)


def test_a_release_that_fails_is_watched_and_then_rolled_back(
    visit: Callable[..., Watched], tmp_path: Path, axe: str
) -> None:
    """By itself: its upstream answers nothing but errors; clients hear the old version."""
    with faulty.faulty(faulty.page("502 Bad Gateway")) as bad:
        places = ("--upstream", f"bad={bad.url}", "--admin-key", ADMIN)
        with simulated_gateway(tmp_path, "simulated", *places) as gateway:
            visitor = visit()
            page = visitor.open("#dashboard", url=gateway.url)
            # before it has answered once, the old version takes what it cannot
            expect(page.get_by_role("row", name=re.compile(" bad up simulated "))).to_be_visible()
            post(gateway, "/v1/releases", FAILING)
            card = page.get_by_role("article", name="Release of simulated")
            expect(card).to_contain_text("bad in place of default has 100 % of the requests")
            guard = card.locator("tbody tr")
            expect(guard.locator(".state")).to_have_text("nothing seen yet")
            post(gateway, "/v1/completions", {"model": "simulated", "prompt": "Hello"})
            expect(guard.locator(".state.draining")).to_have_text("watched")
            expect(guard).to_contain_text("100.00 % of 1")
            expect(card.locator("h3")).to_contain_text("running")
            half = float(guard.locator("progress").get_attribute("value") or 0)
            assert 0.5 <= half < 1
            page.evaluate(axe)
            assert faults(page) == []
            post(gateway, "/v1/completions", {"model": "simulated", "prompt": "Hello again"})
            expect(guard.locator(".state.down")).to_have_text("worse")
            expect(guard.locator("progress")).to_have_attribute("value", "1")
            expect(card.locator("h3")).to_contain_text("rolled back")
            expect(card).to_contain_text("has 0 % of the requests")
            expect(card).to_contain_text("error_rate > 0.01")
            expect(card.get_by_role("button")).to_have_count(0)
            assert bad.posts == 2 and faults(page) == []
            visitor.check(gateway.url)


def test_an_experiment_is_read_and_stopped(dashboard: Page, gateway: Server) -> None:
    post(gateway, "/v1/experiments", EXPERIMENT)
    card = dashboard.get_by_role("article", name="Experiment cooler")
    expect(card).to_contain_text("m: a 50 % (control), b 50 %")
    press(dashboard, "Report of cooler")
    expect(card).to_contain_text("Too few users yet")
    press(dashboard, "Hide the report of cooler")
    expect(card).not_to_contain_text("Too few users yet")
    press(dashboard, "Stop cooler")
    press(dashboard, "Stop")
    expect(card.locator("h3")).to_contain_text("ended")


def test_only_admins_see_them(visit: Callable[..., Watched], gateway: Server) -> None:
    visitor = visit(key=None)
    page = visitor.open("#dashboard", url=gateway.url)
    expect(part(page, "Models")).to_be_visible()
    for name in ("Upstreams", "Releases", "Running requests"):
        expect(page.locator(f"section[aria-label='{name}']")).to_be_hidden()
    visitor.check(gateway.url)


def test_replicas_are_drained_and_restarted(
    visit: Callable[..., Watched], smollm2: Path, tmp_path: Path
) -> None:
    options = ("--replicas", "2", "--context", "512", "--memory", "1GiB", "--admin-key", ADMIN)
    with serving("smollm2", "--offline", *options, log=tmp_path / "log") as server:
        visitor = visit()
        page = visitor.open("#dashboard", url=server.url)
        rows = part(page, "Replicas").locator("tbody tr")
        expect(rows).to_have_count(2)
        press(page, "Drain replica 1 of smollm2")
        expect(rows.nth(1).locator(".state")).to_have_text("draining")
        press(page, "Drain replica 0 of smollm2")
        expect(page.get_by_role("status")).to_contain_text("no replica but 0 takes requests")
        press(page, "Resume replica 1 of smollm2")
        expect(rows.nth(1).locator(".state")).to_have_text("up")
        process = rows.nth(0).locator("td").nth(6)
        before = process.inner_text()
        press(page, "Restart replica 0 of smollm2")
        expect(page.get_by_role("status")).to_contain_text("has a new engine")
        expect(process).not_to_have_text(before)
        visitor.check(server.url)
