"""Upstreams that are the ready endpoints of a service of Kubernetes: its EndpointSlices, watched.

Two requests of the API are all of it, so they are made with what the gateway has. The ordinary
client, `kubernetes` 37, is 74 MB of models for every kind of object; each of its watches blocks a
thread.
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec

from octavo.errors import UsageError
from octavo.gateway.discovery import Service, Take
from octavo.gateway.upstream import Place

LOG = logging.getLogger("octavo.gateway")
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
PROXY = "OCTAVO_KUBERNETES"  # where an API server is that wants no token, as of `kubectl proxy`
WAIT = 10.0  # seconds for a list, and for a watch to begin
WATCH = 240  # seconds until a watch is begun anew
AGAIN = 0.1  # seconds after a watch that has ended
PAUSES = (1.0, 30.0)  # seconds after a failure, twice as many each time
LARGEST = 1 << 22  # bytes of an event, of which a slice has at most 1,000 endpoints
FAULTS = (aiohttp.ClientError, OSError, TimeoutError, msgspec.MsgspecError, ValueError)


@dataclass(frozen=True)
class Cluster:
    """Where its API is. account: a folder with a token, which changes, and the authority that its
    certificate is of; None: neither is wanted."""

    url: str
    account: Path | None = None


def cluster_of(environ: Mapping[str, str], account: Path = ACCOUNT) -> Cluster:
    """The cluster that this process runs in, or that a variable names. Raises UsageError."""
    if url := environ.get(PROXY):
        return Cluster(url.rstrip("/"))
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT")
    if not host or not port:
        raise UsageError(
            "k8s:// needs a pod of a cluster, or kubectl proxy", f"{PROXY}=http://127.0.0.1:8001"
        )
    return Cluster(f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}", account)


class _Conditions(msgspec.Struct, frozen=True):
    ready: bool | None = None  # which means that it is


class _Target(msgspec.Struct, frozen=True):
    """What an endpoint is of: a pod."""

    kind: str = ""
    name: str = ""


class _Endpoint(msgspec.Struct, rename="camel"):
    addresses: list[str] = []
    conditions: _Conditions = _Conditions()
    target_ref: _Target | None = None


class _Port(msgspec.Struct):
    name: str | None = None
    port: int | None = None


class _Meta(msgspec.Struct, frozen=True, rename="camel"):
    name: str = ""
    resource_version: str = ""


class _Slice(msgspec.Struct, frozen=True):
    """code: of what is a status instead, which says what went wrong."""

    metadata: _Meta = _Meta()
    endpoints: list[_Endpoint] | None = None
    ports: list[_Port] | None = None
    code: int = 0


class _List(msgspec.Struct):
    metadata: _Meta
    items: list[_Slice] | None = None


class _Event(msgspec.Struct):
    type: str
    object: _Slice


class _Outdated(Exception):
    """The watch cannot go on from where it was; a list begins a new one."""


class EndpointSlices:
    """The source of a service's upstreams. key: that they want to see."""

    def __init__(self, service: Service, cluster: Cluster, pool: str, key: str | None) -> None:
        self._service, self._cluster = service, cluster
        self._pool, self._key = pool, key
        self._slices: dict[str, _Slice] = {}
        self._version = ""  # of all of them, from which a watch goes on
        self._path = f"/apis/discovery.k8s.io/v1/namespaces/{service.namespace}/endpointslices"

    async def look(self) -> list[Place]:
        try:
            async with self._session() as session, asyncio.timeout(WAIT):
                await self._list(session)
        except FAULTS as e:
            raise self._failed(e) from None
        ports = {str(p.name or p.port) for one in self._slices.values() for p in one.ports or []}
        places = self._places()
        if ports and not places and not any(map(self._port, self._slices.values())):
            known = ", ".join(sorted(ports))
            raise UsageError(f"{self._name} has no port {self._service.port!r}; ports: {known}")
        return places

    async def follow(self, take: Take) -> None:
        said, pause = "", PAUSES[0]
        while True:
            try:
                async with self._session() as session:
                    if not self._version:
                        async with asyncio.timeout(WAIT):
                            await self._list(session)
                        take(self._places())
                    async for changed in self._watch(session):
                        said, pause = "", PAUSES[0]
                        if changed:
                            take(self._places())
                await asyncio.sleep(AGAIN)
            except _Outdated:
                self._version = ""
                await asyncio.sleep(AGAIN)
            except (UsageError, *FAULTS) as e:
                error = e if isinstance(e, UsageError) else self._failed(e)
                if str(error) != said:
                    LOG.warning("%s; the upstreams stay as they are", error)
                said, self._version = str(error), ""
                await asyncio.sleep(pause * random.uniform(0.5, 1))
                pause = min(2 * pause, PAUSES[1])

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[aiohttp.ClientSession]:
        account, headers, secure = self._cluster.account, {}, None
        if account is not None:
            token = (account / "token").read_text().strip()
            headers["authorization"] = f"Bearer {token}"
            secure = ssl.create_default_context(cafile=account / "ca.crt")
        async with aiohttp.ClientSession(
            self._cluster.url, headers=headers, read_bufsize=LARGEST,
            connector=aiohttp.TCPConnector(ssl=True if secure is None else secure),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=WAIT, sock_read=WATCH + WAIT),
        ) as session:  # fmt: skip
            yield session

    def _query(self, **more: str) -> dict[str, str]:
        return {"labelSelector": f"kubernetes.io/service-name={self._service.name}", **more}

    async def _list(self, session: aiohttp.ClientSession) -> None:
        """All slices as they are now."""
        async with session.get(self._path, params=self._query()) as response:
            self._check(response)
            found = msgspec.json.decode(await response.read(), type=_List)
        self._slices = {one.metadata.name: one for one in found.items or []}
        self._version = found.metadata.resource_version

    async def _watch(self, session: aiohttp.ClientSession) -> AsyncIterator[bool]:
        """Waits until it is answered, and then for slices that change, which are True. Raises
        _Outdated."""
        query = self._query(
            watch="true", resourceVersion=self._version, allowWatchBookmarks="true",
            timeoutSeconds=str(WATCH),
        )  # fmt: skip
        async with session.get(self._path, params=query) as response:
            if response.status == 410:
                raise _Outdated
            self._check(response)
            yield False
            while line := await response.content.readline():
                event = msgspec.json.decode(line, type=_Event)
                if event.type == "ERROR":
                    if event.object.code == 410:
                        raise _Outdated
                    raise UsageError(f"{self._name}: its watch ended with {event.object.code}")
                meta = event.object.metadata
                self._version = meta.resource_version or self._version
                if event.type == "DELETED":
                    self._slices.pop(meta.name, None)
                elif event.type != "BOOKMARK":
                    self._slices[meta.name] = event.object
                if event.type != "BOOKMARK":
                    yield True

    def _places(self) -> list[Place]:
        """Each ready endpoint once, which several slices may have: of a pod with addresses of both
        kinds there is one for each, and the older kind counts."""
        found: dict[tuple[_Target | str, int], str] = {}
        for one in self._slices.values():
            port = self._port(one)
            for endpoint in one.endpoints or []:
                if port and endpoint.addresses and endpoint.conditions.ready is not False:
                    host = endpoint.addresses[0]  # the others are the same pod's
                    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
                    named = endpoint.target_ref
                    pod = named if named is not None and named.name else host
                    found[pod, port] = min(url, found.get((pod, port), url))  # 1 is before [
        return [Place(url, self._pool, self._key) for url in sorted(set(found.values()))]

    def _port(self, one: _Slice) -> int | None:
        """The port that is asked for, if a slice has it."""
        wanted = self._service.port
        found = [p.port for p in one.ports or [] if wanted in (p.name, str(p.port))]
        return found[0] if found else None

    @property
    def _name(self) -> str:
        return f"k8s://{self._service.namespace}/{self._service.name}"

    def _check(self, response: aiohttp.ClientResponse) -> None:
        """Raises UsageError for what is no answer."""
        if response.status in (401, 403):
            raise UsageError(
                f"{self._name}: the service account may not list and watch endpointslices of "
                f"discovery.k8s.io there ({response.status})"
            )
        if response.status != 200:
            raise UsageError(f"{self._name}: the API server answers {response.status}")

    def _failed(self, error: BaseException) -> UsageError:
        if isinstance(error, msgspec.MsgspecError):
            return UsageError(f"{self._name}: the API server sends no EndpointSlices")
        if isinstance(error, aiohttp.ClientConnectorCertificateError):
            return UsageError(
                f"{self._name}: the API server at {self._cluster.url} has no certificate that the "
                "cluster's authority vouches for"
            )
        return UsageError(
            f"{self._name}: the API server at {self._cluster.url} does not answer "
            f"({type(error).__name__})"
        )
