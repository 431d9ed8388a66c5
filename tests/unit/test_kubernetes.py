"""Upstreams of a service of Kubernetes, of an API server that says what a test wants, over HTTP."""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trustme
from aiohttp import web

from octavo.errors import UsageError
from octavo.gateway import kubernetes
from octavo.gateway.config import GatewayConfig
from octavo.gateway.discovery import Service, parse_service
from octavo.gateway.kubernetes import Cluster, EndpointSlices, cluster_of
from octavo.gateway.members import sources_of
from octavo.gateway.upstream import Place

PATH = "/apis/discovery.k8s.io/v1/namespaces/llm/endpointslices"
SERVICE = Service("llm", "engines", "http")


def endpoint(host: str, **conditions: bool) -> dict[str, Any]:
    return {"addresses": [host], "conditions": conditions, "targetRef": {"kind": "Pod", "name": host}}  # fmt: skip


def slice_of(
    slice_name: str, version: int, *endpoints: dict[str, Any], **port: Any
) -> dict[str, Any]:
    """As the API has it: metadata that nobody reads, `null` for lists that are empty."""
    ports = [{"name": "http", "port": 8000, "protocol": "TCP", "appProtocol": None} | port]
    labels = {"kubernetes.io/service-name": "engines", "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io"}  # fmt: skip
    return {
        "kind": "EndpointSlice", "apiVersion": "discovery.k8s.io/v1", "addressType": "IPv4",
        "metadata": {"name": slice_name, "namespace": "llm", "resourceVersion": str(version),
                     "labels": labels, "managedFields": [{"manager": "kube-controller-manager"}]},
        "endpoints": list(endpoints) or None, "ports": ports,
    }  # fmt: skip


class ApiServer:
    """items: what a list says. watches: each is one watch, a status or lines that are sent as they
    are put into the queue; None ends it. asked: queries, in order."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self.version = 10
        self.watches: asyncio.Queue[int | asyncio.Queue[dict[str, Any] | None]] = asyncio.Queue()
        self.asked: list[dict[str, str]] = []
        self.keys: list[str | None] = []
        self.status = 200

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(dict(request.query))
        self.keys.append(request.headers.get("authorization"))
        if "watch" not in request.query:
            body = {"kind": "EndpointSliceList", "metadata": {"resourceVersion": str(self.version)}, "items": self.items}  # fmt: skip
            return web.json_response(body, status=self.status)
        watch = await self.watches.get()
        if isinstance(watch, int):
            return web.json_response({"kind": "Status", "code": watch}, status=watch)
        response = web.StreamResponse()
        await response.prepare(request)
        while (event := await watch.get()) is not None:
            await response.write(json.dumps(event).encode() + b"\n")
        return response


class Following:
    """taken: what was told of, one after another."""

    def __init__(self, api: ApiServer, source: EndpointSlices) -> None:
        self.api, self.source = api, source
        self.taken: asyncio.Queue[list[Place]] = asyncio.Queue()

    def watch(self) -> asyncio.Queue[dict[str, Any] | None]:
        """The next watch."""
        made: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self.api.watches.put_nowait(made)
        return made

    async def hosts(self) -> list[str]:
        async with asyncio.timeout(20):
            return [place.url for place in await self.taken.get()]


@asynccontextmanager
async def serving(
    account: Path | None = None, secure: ssl.SSLContext | None = None
) -> AsyncIterator[Following]:
    api, app = ApiServer(), web.Application()
    app.router.add_get(PATH, api.answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=secure)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    url = f"{'http' if secure is None else 'https'}://127.0.0.1:{port}"
    yield Following(api, EndpointSlices(SERVICE, Cluster(url, account), "next", "key"))
    await runner.cleanup()


def in_loop(
    test: Callable[[Following], Any], account: Path | None = None,
    secure: ssl.SSLContext | None = None,
) -> None:  # fmt: skip
    async def run() -> None:
        async with serving(account, secure) as one:
            await test(one)

    asyncio.run(run())


def test_ready_endpoints_are_upstreams() -> None:
    """Once each, though two slices have one; `ready: null` means that it is."""

    async def test(one: Following) -> None:
        one.api.items = [
            slice_of("a", 1, endpoint("10.0.0.1", ready=True), endpoint("10.0.0.2", ready=False)),
            slice_of("b", 2, endpoint("10.0.0.3"), endpoint("10.0.0.1"), port=8001),
            slice_of("c", 3, endpoint("fd00::1"), endpoint("10.0.0.1")),
            slice_of("d", 4), slice_of("e", 5, endpoint("10.0.0.4"), name="metrics"),
        ]  # fmt: skip
        assert await one.source.look() == [
            Place(f"http://{at}", "next", "key")
            for at in ("10.0.0.1:8000", "10.0.0.1:8001", "10.0.0.3:8001", "[fd00::1]:8000")
        ]
        assert one.api.asked == [{"labelSelector": "kubernetes.io/service-name=engines"}]

    in_loop(test)


def test_a_pod_with_two_addresses_is_one_upstream() -> None:
    """Of clusters with IPv4 and IPv6; the slices of each kind come in any order."""

    async def test(one: Following) -> None:
        older = slice_of("a", 1, endpoint("10.0.0.1"), endpoint("10.0.0.2"))
        newer = slice_of("b", 2, *(endpoint(f"fd00::{i}") for i in (1, 2, 3)))
        for i, each in enumerate(newer["endpoints"], 1):
            each["targetRef"]["name"] = f"10.0.0.{i}"
        for one.api.items in ([older, newer], [newer, older]):
            assert [place.url for place in await one.source.look()] == [
                "http://10.0.0.1:8000", "http://10.0.0.2:8000", "http://[fd00::3]:8000"
            ]  # fmt: skip

    in_loop(test)


def test_a_watch_goes_on_where_it_was() -> None:
    """Events of every kind, an end of the watch, a version that is gone, and a server that fails."""

    async def test(one: Following) -> None:
        api = one.api
        api.items = [slice_of("a", 9, endpoint("10.0.0.1", ready=True))]
        await one.source.look()
        watch = one.watch()
        task = asyncio.create_task(one.source.follow(one.taken.put_nowait))
        try:
            watch.put_nowait({"type": "ADDED", "object": slice_of("b", 11, endpoint("10.0.0.2"))})
            assert await one.hosts() == ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]
            changed = slice_of("a", 12, endpoint("10.0.0.1", ready=False, serving=True, terminating=True))  # fmt: skip
            watch.put_nowait({"type": "MODIFIED", "object": changed})
            assert await one.hosts() == ["http://10.0.0.2:8000"]
            bookmark = {"kind": "EndpointSlice", "metadata": {"resourceVersion": "20"}}
            watch.put_nowait({"type": "BOOKMARK", "object": bookmark})
            watch.put_nowait(None)  # the server ends a watch after a while
            watch = one.watch()
            watch.put_nowait({"type": "DELETED", "object": slice_of("b", 21)})
            assert await one.hosts() == []
            assert [q.get("resourceVersion") for q in api.asked] == [None, "10", "20"]

            api.items, api.version = [slice_of("c", 30, endpoint("10.0.0.3"))], 31
            gone = {"kind": "Status", "code": 410, "reason": "Expired"}
            watch.put_nowait({"type": "ERROR", "object": gone})
            assert await one.hosts() == ["http://10.0.0.3:8000"]  # of a new list
            api.watches.put_nowait(410)
            api.items, api.version = [slice_of("c", 40, endpoint("10.0.0.4"))], 41
            assert await one.hosts() == ["http://10.0.0.4:8000"]
            api.watches.put_nowait(500)
            api.items = [slice_of("c", 50, endpoint("10.0.0.5"))]
            assert await one.hosts() == ["http://10.0.0.5:8000"]
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    in_loop(test)


def test_every_outage_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if nothing has changed in between; and the first pause after each is short."""
    monkeypatch.setattr(kubernetes, "PAUSES", (0.01, 30.0))

    async def test(one: Following) -> None:
        task = asyncio.create_task(one.source.follow(one.taken.put_nowait))
        try:
            for _ in range(3):  # lists, before watches that fail, fail, and come to an end
                await one.hosts()
                one.api.watches.put_nowait(500)
                await one.hosts()
                one.api.watches.put_nowait(500)
                await one.hosts()
                one.watch().put_nowait(None)
                one.api.watches.put_nowait(500)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    in_loop(test)
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    name = "k8s://llm/engines: the API server answers 500; the upstreams stay as they are"
    assert said == [name] * 3


def test_an_api_server_of_the_clusters_authority_gets_the_token_as_it_is(tmp_path: Path) -> None:
    """Over TLS, as within a pod; a server that another authority vouches for gets nothing."""
    authority, secure = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(secure)

    async def test(one: Following) -> None:
        one.api.items = [slice_of("a", 1, endpoint("10.0.0.1"))]
        authority.cert_pem.write_to_path(str(tmp_path / "ca.crt"))
        for token in ("one", "two"):
            (tmp_path / "token").write_text(f"{token}\n")
            assert [place.url for place in await one.source.look()] == ["http://10.0.0.1:8000"]
        trustme.CA().cert_pem.write_to_path(str(tmp_path / "ca.crt"))
        with pytest.raises(UsageError, match="has no certificate that the cluster's authority"):
            await one.source.look()
        assert one.api.keys == ["Bearer one", "Bearer two"]

    in_loop(test, tmp_path, secure)


@pytest.mark.parametrize(
    ("status", "says"),
    [(403, "may not list and watch endpointslices"), (500, "answers 500"), (200, "has no port 'http'; ports: grpc")],
)  # fmt: skip
def test_what_is_wrong_is_said_at_the_start(status: int, says: str) -> None:
    async def test(one: Following) -> None:
        one.api.status, one.api.items = (
            status,
            [slice_of("a", 1, endpoint("10.0.0.1"), name="grpc")],
        )
        with pytest.raises(UsageError, match=says):
            await one.source.look()

    in_loop(test)


def test_where_a_cluster_is() -> None:
    env = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
    assert cluster_of(env, Path("/a")) == Cluster("https://[fd00::1]:443", Path("/a"))
    assert cluster_of(env | {"OCTAVO_KUBERNETES": "http://x:1/"}) == Cluster("http://x:1")
    with pytest.raises(UsageError, match="needs a pod of a cluster"):
        cluster_of({})
    assert parse_service("k8s://llm/engines:http") == SERVICE
    for wrong in ("k8s://llm/engines", "k8s://engines:80", "k8s://a/b:80/v1", "k8s://A/b:1"):
        with pytest.raises(UsageError, match="is not k8s://NAMESPACE/SERVICE:PORT"):
            parse_service(wrong)


def test_without_aiohttp_only_kubernetes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    monkeypatch.delitem(sys.modules, "octavo.gateway.kubernetes", raising=False)
    pool = {"upstreams": ["http://127.0.0.1:1"]}
    assert sources_of(msgspec.convert({"pools": {"p": pool}}, GatewayConfig), {}) == {}
    pool = {"upstreams": ["k8s://llm/engines:8000"]}
    with pytest.raises(UsageError, match=r"pip install 'octavo\[kubernetes\]'"):
        sources_of(msgspec.convert({"pools": {"p": pool}}, GatewayConfig), {})
