"""A server that the gateway sends requests to, and what is known of it."""

from __future__ import annotations

from asyncio import TimerHandle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal
from urllib.parse import SplitResult, urlsplit

from octavo.balance.breaker import Breaker
from octavo.balance.replica import Replica, ReplicaTimes, State
from octavo.errors import UsageError
from octavo.gateway.upstream_cache import UpstreamCache

Cut = Callable[[str], None]  # ends a request or an answer; is told why
UpstreamState = Literal["starting", "up", "draining", "down"]
DEFAULT, FALLBACK = "default", "fallback"  # pools
ANY = "*"  # among the models of an upstream: it may have others than it says
WEIGHT = 0.1  # of the latest measurement in what is known


@dataclass(frozen=True)
class Place:
    """Where an upstream is. pool: upstreams that requests are spread over. key: it wants to see.
    name: host and port as it is called, where the URL has an address that was found of it."""

    url: str
    pool: str = DEFAULT
    key: str | None = None
    name: str = ""

    @cached_property
    def id(self) -> str:
        """Host and port, and the path if there is one; before that the name, as one address may
        have several, each of another server."""
        at = self.url.partition("://")[2]
        return f"{self.name}@{at}" if self.name else at


def split_pool(text: str, pool: str = DEFAULT) -> tuple[str, str]:
    """Pool and URL of `[POOL=]URL`."""
    named, found, url = text.rpartition("=")
    return (named, url) if found and "://" not in named else (pool, text)


def parse_place(text: str, pool: str = DEFAULT, key: str | None = None) -> Place:
    """The place that `[POOL=]URL` names; a URL may end in /v1. Raises UsageError."""
    pool, url = split_pool(text, pool)
    url = url.strip().rstrip("/").removesuffix("/v1")
    parts = _split(url)
    if parts.username or parts.password:
        raise UsageError(
            "--upstream takes no password in its URL, but --upstream-key does",
            f"--upstream {parts.scheme}://{parts.netloc.rpartition('@')[2]}",
        )
    if not (pool and _is_address(url)):
        meant = f"http://{url}" if "://" not in text else ""
        like = meant if _is_address(meant) else "http://127.0.0.1:8001"
        raise UsageError(f"--upstream {text!r} is no address of a server", f"--upstream {like}")
    return Place(url, pool, key)


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError:  # an address in brackets that is none
        return urlsplit("")


def _is_address(url: str) -> bool:
    """Whether a server can be at a URL."""
    parts = _split(url)
    try:
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    plain = url.isascii() and url.isprintable() and " " not in url  # it is sent in headers
    return sound and plain and not (parts.query or parts.fragment)


@dataclass(frozen=True)
class ModelFigures:
    """What an upstream says of one of its models. cache_tokens: that its prefix cache has room for;
    times: that it measures; context: tokens. 0 where it says nothing."""

    cache_tokens: int = 0
    times: ReplicaTimes = ReplicaTimes()
    context: int = 0


@dataclass(eq=False)
class Upstream:
    """own: it is Octavo, whose streams can go on elsewhere. running: requests that have their first
    token; waiting: those that have none, with so many tokens of prompts. prompt_token, step:
    seconds, as the gateway has measured them; times, contexts: as it says itself, by model. misses:
    probes that failed since the last good one. rests: models that it has refused as busy, until
    these timers end. cut: ends the answers that it is giving."""

    place: Place
    breaker: Breaker
    state: UpstreamState = "starting"
    models: tuple[str, ...] = ()
    own: bool = False
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    prompt_token: float = 0.0
    step: float = 0.0
    times: Mapping[str, ReplicaTimes] = field(default_factory=dict)
    contexts: Mapping[str, int] = field(default_factory=dict)
    misses: int = 0
    reason: str = ""  # why it is down
    rests: dict[str, TimerHandle] = field(default_factory=dict)
    cut: set[Cut] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.cache = UpstreamCache(self.id)

    @property
    def id(self) -> str:
        return self.place.id

    @property
    def requests(self) -> int:
        return self.running + self.waiting

    def serves(self, model: str | None) -> bool:
        """Whether it may be asked for a model."""
        return model in self.models or ANY in self.models

    def called(self, model: str) -> str:
        """What is counted under the name of a model: clients may make up others than it says."""
        return model if model in self.models or ANY not in self.models else ANY

    def figures(self, places: int, model: str) -> Replica:
        """What routing has to know."""
        told = self.times.get(model, ReplicaTimes())
        state: State = "down" if self.state == "starting" else self.state
        if state == "up" and (self.requests >= places or model in self.rests):
            state = "full"
        return Replica(
            self.id, state, self.running, self.waiting, self.waiting_tokens, places,
            told.prompt_token or self.prompt_token, told.step or self.step, told.image,
        )  # fmt: skip

    def measured_prompt(self, tokens: int, seconds: float) -> None:
        """A prompt that nothing waited with took so long."""
        if tokens:
            self.prompt_token = _mean(self.prompt_token, seconds / tokens)

    def measured_step(self, seconds: float) -> None:
        self.step = _mean(self.step, seconds)


def _mean(before: float, now: float) -> float:
    return now if not before else before + WEIGHT * (now - before)
