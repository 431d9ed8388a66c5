"""Who may send a request: the same checks for HTTP and for WebSockets."""

from __future__ import annotations

import pytest
from starlette.types import Receive, Scope, Send

from octavo.errors import UsageError
from octavo.server.guard import Access, Principal, guarded, principal, require_admin
from tests.unit.asgi import call, scope

KINDS = ("http", "websocket")


class Passed:
    """An application that keeps whom it has been called for."""

    def __init__(self) -> None:
        self.principals: list[Principal] = []
        self.kinds: list[str] = []

    async def __call__(self, given: Scope, receive: Receive, send: Send) -> None:
        self.kinds.append(given["type"])
        if given["type"] != "lifespan":
            self.principals.append(principal(given))


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_is_needed_whatever_the_protocol(kind: str) -> None:
    passed = Passed()
    app = guarded(passed, Access(api_keys=("one", "two")))
    for headers in ({}, {"authorization": "Bearer three"}, {"authorization": "one"}):
        sent = call(app, scope(kind, "/v1/models", **headers))
        if kind == "http":
            assert sent[0]["status"] == 401
            assert sent[1]["body"] == b"401 invalid_api_key: a valid API key is needed"
        else:
            assert sent == [{"type": "websocket.close", "code": 1008, "reason": "invalid_api_key"}]
    assert passed.principals == []
    for key in ("one", "two", "one"):
        assert call(app, scope(kind, "/v1/models", authorization=f"Bearer {key}")) == []
    first, second, again = passed.principals
    assert first == again and first.salt != second.salt and len(first.salt) == 16
    assert not first.admin


@pytest.mark.parametrize("kind", KINDS)
def test_without_keys_everybody_is_the_same(kind: str) -> None:
    passed = Passed()
    assert call(guarded(passed, Access()), scope(kind)) == []
    assert passed.principals == [Principal("", admin=True)]


def test_a_refused_websocket_gets_a_response_where_the_server_can_send_one() -> None:
    asked = scope("websocket") | {"extensions": {"websocket.http.response": {}}}
    sent = call(guarded(Passed(), Access(api_keys=("one",))), asked)
    assert [m["type"] for m in sent] == [
        "websocket.http.response.start",
        "websocket.http.response.body",
    ]
    assert sent[0]["status"] == 401


def test_the_start_and_end_of_a_server_pass() -> None:
    passed = Passed()
    assert call(guarded(passed, Access(api_keys=("one",))), {"type": "lifespan"}) == []
    assert passed.kinds == ["lifespan"]


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready"])
def test_health_needs_no_key(path: str) -> None:
    passed = Passed()
    call(guarded(passed, Access(api_keys=("one",))), scope(path=path))
    assert passed.principals == [Principal("", admin=False)]


@pytest.mark.parametrize("kind", KINDS)
def test_names_of_other_hosts_are_refused(kind: str) -> None:
    passed = Passed()
    app = guarded(passed, Access(hosts=("good.example",)))
    sent = call(app, scope(kind, host="evil.example"))
    assert sent[0].get("status", sent[0].get("code")) == {"http": 403, "websocket": 1008}[kind]
    assert passed.principals == []
    for host in ("good.example:80", "127.0.0.1", "localhost", "a.localhost", "[::1]:8000"):
        assert call(app, scope(kind, host=host)) == []


def test_pages_of_other_origins() -> None:
    """Simple requests pass a server with keys, which a page does not have; WebSockets do not."""
    app = guarded(Passed(), Access(api_keys=("one",), origins=("https://good.example",)))
    key = {"authorization": "Bearer one"}
    assert call(app, scope("http", origin="https://evil.example", **key)) == []
    refused = call(app, scope("websocket", origin="https://evil.example", **key))
    assert refused[0]["reason"] == "origin_not_allowed"
    assert call(app, scope("websocket", origin="https://good.example", **key)) == []
    assert call(app, scope("websocket", origin="http://localhost", **key)) == []


def test_admins() -> None:
    passed = Passed()
    app = guarded(passed, Access(api_keys=("one",), admin_key="root"))
    for key in ("one", "root"):
        call(app, scope(authorization=f"Bearer {key}"))
    user, admin = ({"principal": p} for p in passed.principals)
    require_admin(admin)
    with pytest.raises(Exception, match="--admin-key") as refused:
        require_admin(user)
    assert refused.value.status == 403  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "options",
    [{"api_keys": ("",)}, {"admin_key": " "}, {"api_keys": ("a",), "admin_key": "a"},
     {"origins": ("example.com",)}],
)  # fmt: skip
def test_options_that_would_guard_nothing(options: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        Access(**options)  # type: ignore[arg-type]
