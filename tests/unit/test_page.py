"""The files of the page over HTTP."""

from __future__ import annotations

import gzip
import http.client
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from octavo.checkpoint import open_checkpoint
from octavo.cli.serve import serve
from octavo.server import page
from octavo.server.app import create_app
from octavo.server.guard import Access
from octavo.server.metrics import Metrics
from octavo.server.registry import Registry
from octavo.text import load_tokenizer
from tests.unit.asgi import call, scope
from tests.unit.dialects import scripted, speaking
from tests.unit.fake_models import Listener

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
WIRE = 250 << 10  # bytes that everything may have together, compressed


@pytest.fixture(scope="module")
def server(smollm2: Path) -> Iterator[Listener]:
    tokenizer = load_tokenizer(open_checkpoint(smollm2))
    with speaking(scripted(tokenizer, "ann", "hi"), access=Access(api_keys=("k",))) as one:
        yield one


def fetch(
    server: Listener, path: str, method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, headers=named)
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response.status, {k.lower(): v for k, v in response.getheaders()}, body


def test_every_file(server: Listener) -> None:
    """Without a key, as it is and compressed, and only once while it is the same."""
    total = 0
    for name in sorted(page.names()):
        path, plain = f"/ui/{name}", (page.FOLDER / name).read_bytes()
        status, headers, body = fetch(server, path)
        assert (status, body) == (200, plain), name
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["content-security-policy"] == page.POLICY
        assert "cache-control" in headers and headers["content-type"].endswith(("utf-8", "svg+xml"))
        status, packed, body = fetch(server, path, accept_encoding="gzip, br")
        assert (status, packed["content-encoding"]) == (200, "gzip")
        assert gzip.decompress(body) == plain and packed["etag"] == headers["etag"]
        total += len(body)
        status, _, body = fetch(server, path, if_none_match=headers["etag"])
        assert (status, body) == (304, b"")
        status, head, body = fetch(server, path, "HEAD")
        assert (status, body, head["content-length"]) == (200, b"", str(len(plain)))
    assert total <= WIRE


def test_the_root_is_the_page_for_browsers(server: Listener) -> None:
    status, headers, body = fetch(server, "/", **BROWSER)
    assert status == 200 and headers["content-type"] == "text/html; charset=utf-8"
    assert body == (page.FOLDER / "index.html").read_bytes()
    for asked in ({}, {"accept": "*/*"}, {"accept": "application/json"}):
        assert fetch(server, "/", **asked)[::2] == (200, b"Ollama is running")


def test_the_policy_holds_for_the_page_itself() -> None:
    """Nothing inline, nothing that runs text, nothing from elsewhere."""
    index = (page.FOLDER / "index.html").read_text()
    assert "<style" not in index and "style=" not in index and " on" not in index.lower().split("<body>")[0]  # fmt: skip
    assert index.count("<script") == index.count("<script src=") + index.count('<script type="module" src=')  # fmt: skip
    assert "//" not in index.replace("://", "") and "http" not in index
    ours = [page.FOLDER / n for n in page.names() if "/" not in n and n.endswith(".js")]
    assert len(ours) > 10
    for path in ours:
        text = path.read_text()
        for banned in ("innerHTML", "outerHTML", "insertAdjacent", "eval(", "Function(", "document.write"):  # fmt: skip
            assert banned not in text, (path.name, banned)
        assert text.count("\n") <= 400
    for vendored in (page.FOLDER / "vendor").iterdir():
        assert (vendored / "LICENSE").stat().st_size > 500


@pytest.mark.parametrize(
    "path",
    ["/ui/", "/ui/nothing.js", "/ui/../page.py", "/ui/%2e%2e/page.py", "/ui/..%2fpage.py",
     "/ui/%2fetc/passwd", "/ui//etc/passwd", "/ui/vendor", "/ui/vendor/..", "/ui/./app.js",
     "/ui/app.js%00", "/ui/app.js/"],
)  # fmt: skip
def test_no_other_file_is_reached(server: Listener, path: str) -> None:
    status, headers, body = fetch(server, path)
    assert status == 404 and headers["content-type"] == "application/json"


def test_the_page_takes_nothing(server: Listener) -> None:
    assert fetch(server, "/ui/app.js", "POST", authorization="Bearer k")[0] == 405
    assert fetch(server, "/v1/models")[0] == 401


def test_it_can_be_left_out() -> None:
    models = Registry()
    app = create_app(models, Metrics(models), Access(), lambda _: None, ui=False)
    asked = {path: scope(path=path, **BROWSER) | {"method": "GET"} for path in ("/", "/ui/app.js")}
    (_, root), (missing, _) = (call(app, each) for each in asked.values())
    assert root["body"] == b"Ollama is running"
    assert missing["status"] == 404


def test_what_is_left_out_is_not_opened() -> None:
    """Told before a model is fetched or an engine started."""
    done = CliRunner().invoke(serve, ["--open", "--no-ui", "org/nothing"])
    assert str(done.exception) == "--open opens the page, which --no-ui leaves out"


def test_what_runs_is_told_to_admins(server: Listener) -> None:
    status, text = server.ask("/v1/requests", authorization="Bearer k")
    assert status == 403 and "admin_key_required" in text
