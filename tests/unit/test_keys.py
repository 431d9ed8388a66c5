"""Keys of users: kept in SQLite and in PostgreSQL, changed while they are read; limits that hold to
the token; usage."""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import time
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from threading import Event, Thread
from typing import Any, cast

import psycopg
import pytest

from octavo.checkpoint import open_checkpoint
from octavo.database import DatabaseError
from octavo.engine.events import Progress, Token, TokenEvent
from octavo.engine.request import Request
from octavo.errors import UsageError
from octavo.generate.choices import generate_whole
from octavo.generate.prepare import prepare
from octavo.generate.reply import Usage
from octavo.generate.request import GenerationRequest, Sampling
from octavo.server import keyring as keyring_module
from octavo.server.exchange import Exchange
from octavo.server.guard import Access, guarded
from octavo.server.keyring import Keyring
from octavo.server.keys import Key, KeyLimits, KeyStore, digest, today
from octavo.server.limits import CHUNK, Account, RateLimited
from octavo.text import Tokenizer, load_tokenizer
from tests import postgres
from tests.unit.asgi import call, scope
from tests.unit.fake_models import Listener, ScriptedClient, fake_model, listening
from tests.waiting import until


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return load_tokenizer(open_checkpoint(smollm2))


@pytest.fixture
def file(tmp_path: Path) -> Iterator[KeyStore]:
    with closing(KeyStore(str(tmp_path / "keys.db"))) as found:
        yield found


@pytest.fixture(scope="module")
def postgres_url() -> Iterator[str]:
    with postgres.server() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return str(tmp_path / "keys.db")
    found: str = request.getfixturevalue("postgres_url")
    with psycopg.connect(found) as db:
        db.execute("drop table if exists keys, usage, key_changes")
    return found


@pytest.fixture
def store(url: str) -> Iterator[KeyStore]:
    with closing(KeyStore(url)) as found:
        yield found


class Now:
    """A clock that is set."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_no_secret_is_kept(store: KeyStore, url: str, tmp_path: Path) -> None:
    limits = KeyLimits(60, 1000, 5_000_000_000, 2)
    secret = store.create(Key("ann", "admin", limits, ("a", "org/b")))
    other = store.create(Key("bob"))
    ann, bob = store.keys()[digest(secret.encode())], store.keys()[digest(other.encode())]
    assert (ann.name, ann.role, ann.limits, ann.models) == ("ann", "admin", limits, ("a", "org/b"))
    assert (bob.limits, bob.models) == (KeyLimits(), ())
    with pytest.raises(UsageError, match="there is a key called 'ann'"):
        store.create(Key("ann"))
    if url.startswith("postgresql"):
        with psycopg.connect(url) as db:
            written = repr(db.execute("select * from keys").fetchall()).encode()
    else:
        written = b"".join(f.read_bytes() for f in tmp_path.iterdir())
    assert b"ann" in written and secret.encode() not in written
    assert secret[3:].encode() not in written
    store.revoke("ann")
    assert [k.name for k in store.keys().values()] == ["bob"]
    with pytest.raises(UsageError, match="no key is called 'ann'"):
        store.revoke("ann")


def test_the_file_is_its_owners(file: KeyStore, tmp_path: Path) -> None:
    assert (tmp_path / "keys.db").stat().st_mode & 0o777 == 0o600


def test_changes_are_noticed(store: KeyStore, url: str) -> None:
    """By a server, when a command of another process changes them."""
    first = store.create(Key("ann"))
    ring = Keyring(store)
    account = ring.find(digest(first.encode()))
    assert account is not None and account.key.name == "ann"
    with closing(KeyStore(url)) as command:
        second = command.create(Key("bob"))
        assert ring.find(digest(second.encode())) is None
        ring.save()
        assert ring.find(digest(second.encode())) is not None
        assert ring.find(digest(first.encode())) is account  # with all it has used
        command.revoke("ann")
    ring.save()
    assert ring.find(digest(first.encode())) is None


def test_tokens_of_a_minute_are_exact() -> None:
    """A client that asks for all it can get, in requests of many sizes: over ten minutes it gets the
    limit to less than a hundredth, and in no minute more than that."""
    clock, rng, limit = Now(), random.Random(5), 6000
    account = Account(Key("ann", limits=KeyLimits(tokens_per_minute=limit)), clock=clock)
    spent: list[tuple[float, int]] = []
    end = clock.now + 600
    while clock.now < end:
        prompt, wanted = rng.randrange(1, 40), rng.randrange(1, 20)
        account.begin()
        try:
            meter = account.reserve(prompt, wanted)
        except RateLimited as e:
            assert 0 < e.retry_after <= 60
            clock.now += e.retry_after
        else:
            used = prompt + rng.randrange(1, wanted + 1)
            meter.settle(used)
            spent.append((clock.now, used))
            clock.now += 0.01
        account.end()
    assert account.held == 0
    got = sum(n for _, n in spent)
    assert abs(got / (10 * limit) - 1) < 0.01, got
    for start, _ in spent:
        assert sum(n for t, n in spent if start <= t < start + 60) <= limit


def test_a_refused_client_may_come_when_it_was_told() -> None:
    clock = Now()
    account = Account(Key("ann", limits=KeyLimits(requests_per_minute=3)), clock=clock)
    for _ in range(3):
        account.begin()
        clock.now += 1
    with pytest.raises(RateLimited, match="3 requests a minute") as refused:
        account.begin()
    assert (refused.value.status, refused.value.code) == (429, "rate_limit_exceeded")
    clock.now += refused.value.retry_after - 0.2
    with pytest.raises(RateLimited):
        account.begin()
    clock.now += 0.2
    account.begin()
    assert dict(account.headers())[b"x-ratelimit-remaining-requests"] == b"0"


def test_a_text_without_a_limit_ends_where_the_tokens_end() -> None:
    """No token more than the limit, however many run."""
    account = Account(Key("ann", limits=KeyLimits(tokens_per_minute=500)), clock=Now())
    meters = [account.reserve(30, None) for _ in range(3)]
    used = [30, 30, 30]
    running = {0, 1, 2}
    while running:
        for i in sorted(running):
            used[i] += 1
            if not meters[i].covers(used[i]):
                running.discard(i)
    assert sum(used) == 500 and account.held == 500
    for meter, tokens in zip(meters, used, strict=True):
        meter.settle(tokens)
    assert account.held == 0 and account.room(CHUNK) == 0
    with pytest.raises(RateLimited, match="500 tokens a minute"):
        account.reserve(1, None)


class AtOnce(ScriptedClient):
    """Has computed all before anybody asks for it."""

    async def submit(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        for token in self.tokens:
            yield Token(request.id, token)


def test_choices_are_counted_no_further_than_they_are_given(tokenizer: Tokenizer) -> None:
    """However fast they come: what waits to be given has been used."""
    said = tokenizer.encode("a" + " b" * 200, add_bos=False)
    model = fake_model(tokenizer, "m", client=AtOnce(said), context=4096)
    sampling = Sampling(max_tokens=len(said), ignore_eos=True)
    asked = GenerationRequest(prompts=["hi"], sampling=sampling, n=3)
    usage = Usage()
    usage.covers = lambda used: used < 60
    asyncio.run(generate_whole(prepare(asked, model), usage))
    assert 60 <= usage.computed <= 60 + 2 * 3


def test_tokens_of_a_day_and_requests_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    account = Account(Key("ann", limits=KeyLimits(tokens_per_day=100, concurrent=2)), 60)
    account.begin()
    account.begin()
    with pytest.raises(RateLimited, match="2 requests are running"):
        account.begin()
    meter = account.reserve(10, 100)  # more than is left of the day: as many as there are
    assert meter.reserved == 40
    meter.settle(40)
    with pytest.raises(RateLimited, match="100 tokens a day") as refused:
        account.reserve(1, 1)
    assert 0 < refused.value.retry_after <= 86_400
    monkeypatch.setattr("octavo.server.limits.today", lambda: today() + 1)
    assert account.reserve(1, 1).reserved == 2


def test_usage_is_recorded(store: KeyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.create(Key("ann"))
    store.count([(today(), "ann", "m", 1, 10, 4, 5), (today() - 40, "ann", "m", 1, 1, 0, 1)])
    store.count([(today(), "ann", "m", 2, 20, 0, 5), (today(), "bob", "m", 1, 1, 0, 0)])
    ann, bob = store.usage()
    assert (ann.key, ann.requests, ann.prompt, ann.cached, ann.completion) == ("ann", 3, 30, 4, 10)
    assert (bob.key, bob.prompt) == ("bob", 1) and store.usage(30, "bob") == [bob]
    assert len(store.usage(60)) == 3
    assert store.tokens_today() == {"ann": 36, "bob": 1}
    ring = Keyring(store)
    assert [a._day_used for a in ring._known.values()] == [36]


def test_what_is_counted_while_it_is_saved_is_not_lost(file: KeyStore) -> None:
    """A save that comes in the middle of a count waits for its end."""
    file.create(Key("ann"))
    ring = Keyring(file)
    saving = Thread(target=ring.save)

    class Saved(Usage):
        @property
        def cached(self) -> int:
            if not saving.ident:
                saving.start()
                saving.join(0.2)  # without waiting it is at its end long before
            return 0

    used = Saved(completion=5)
    used.reached[0] = 10
    ring.count(Exchange(key="ann", model="m", usage=used))
    saving.join()
    ring.save()
    assert [(u.requests, u.prompt, u.completion) for u in file.usage()] == [(1, 10, 5)]


def test_a_ring_that_is_closed_while_it_is_saved_loses_nothing(tmp_path: Path) -> None:
    path, saving, going = str(tmp_path / "keys.db"), Event(), Event()

    class Slow(KeyStore):
        def count(self, used: Iterable[tuple[Any, ...]]) -> None:
            saving.set()
            going.wait(0.2)  # until the ring is closed, which waits for this
            super().count(used)

    ring = Keyring(Slow(path))
    ring.store.create(Key("ann"))
    ring.count(Exchange(key="ann", model="m", usage=Usage(completion=5)))
    saver = Thread(target=ring.save)
    saver.start()
    saving.wait()
    asyncio.run(ring.close())
    going.set()
    saver.join()
    with closing(KeyStore(path)) as store:
        assert [(u.requests, u.completion) for u in store.usage()] == [(1, 5)]


def test_servers_count_together(url: str) -> None:
    """Each row is what all have counted, however they meet."""
    stores = [KeyStore(url) for _ in range(4)]
    names = [f"k{n}" for n in range(20)]

    def count(store: KeyStore, order: list[str]) -> None:
        for _ in range(10):
            store.count([(today(), name, "m", 1, 3, 1, 2) for name in order])

    threads = [
        Thread(target=count, args=(store, names[n:] + names[:n])) for n, store in enumerate(stores)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {(u.requests, u.prompt, u.completion) for u in stores[0].usage()} == {(40, 120, 80)}
    assert stores[0].tokens_today() == dict.fromkeys(names, 160)
    for store in stores:
        store.close()


def test_ten_thousand_keys_cost_no_request_more(file: KeyStore) -> None:
    secret = file.create(Key("ann"))
    few = Keyring(file)
    rows = [(digest(b"%d" % i), f"k{i}", "user", 0, *[None] * 4, "") for i in range(10_000)]
    with file._database.transaction() as db:
        db.many("insert into keys values (?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
    many = Keyring(file)
    assert len(many._known) == 10_001

    def best(ring: Keyring) -> float:
        async def passed(*_: object) -> None:
            pass

        app = guarded(passed, Access(keyring=ring))
        times = []
        for _ in range(20):
            asked = scope(authorization=f"Bearer {secret}")
            began = time.perf_counter()
            call(app, asked)
            times.append(time.perf_counter() - began)
            assert asked["principal"].account.key.name == "ann"
        return min(times)

    best(few)
    assert best(many) < 2 * best(few)


@pytest.fixture
def one(tokenizer: Tokenizer, file: KeyStore) -> Iterator[tuple[Listener, KeyStore, Keyring]]:
    for name, limits in (
        ("plain", KeyLimits()), ("few", KeyLimits(requests_per_minute=2)),
        ("tokens", KeyLimits(tokens_per_minute=20)),
    ):  # fmt: skip
        secrets[name] = file.create(Key(name, limits=limits))
    secrets["root"] = file.create(Key("root", "admin"))
    secrets["red"] = file.create(Key("red", models=("red",)))
    ring = Keyring(file)
    models = fake_model(tokenizer, "red", "I am red and so on."), fake_model(tokenizer, "blue")
    with listening(*models, access=Access(keyring=ring)) as listener:
        yield listener, file, ring


secrets: dict[str, str] = {}


def headers(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secrets[name]}"}


def test_a_server_with_keys(one: tuple[Listener, KeyStore, Keyring]) -> None:
    server, file, ring = one
    body = {"model": "red", "prompt": "hi", "max_tokens": 4}

    def post(name: str, **more: object) -> tuple[int, str | None]:
        status, reply = server.json("/v1/completions", body | more, **headers(name))
        return status, reply.get("error", {}).get("code")

    assert server.json("/v1/completions", body)[0] == 401
    assert [post("few") for _ in range(3)] == [
        (200, None), (200, None), (429, "rate_limit_exceeded"),
    ]  # fmt: skip
    assert post("plain") == (200, None)
    assert post("red") == (200, None)
    assert post("red", model="blue") == (403, "model_not_allowed")
    assert post("tokens", max_tokens=12) == (200, None)
    assert post("tokens", max_tokens=12) == (429, "rate_limit_exceeded")
    load = {"model": "red"}
    assert server.json("/v1/models/unload", load, **headers("plain"))[0] == 403
    assert server.json("/v1/models/load", load, **headers("root"))[1]["state"] == "ready"
    for one_exchange in server.exchanges:
        ring.count(one_exchange)
    own = server.json("/v1/usage", **headers("plain"))[1]["data"]
    assert [(u["key"], u["model"], u["requests"]) for u in own] == [("plain", "red", 1)]
    assert {u["key"] for u in server.json("/v1/usage", **headers("root"))[1]["data"]} == {
        "few", "plain", "red", "tokens",
    }  # fmt: skip
    file.revoke("plain")
    ring.save()
    assert post("plain") == (401, "invalid_api_key")
    client = cast(ScriptedClient, server.models.entry("red").client)
    assert client.running == 0
    assert all(a.running == 0 and a.held == 0 for a in ring._accounts.values())
    log = json.dumps([vars(e) for e in server.exchanges], default=str)
    assert not [s for s in secrets.values() if s in log]


def test_what_is_left_is_told(one: tuple[Listener, KeyStore, Keyring]) -> None:
    server, _, _ = one
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    for left in ("19", "18"):
        data = json.dumps({"model": "blue", "prompt": [5], "max_tokens": 1, "stream": True})
        connection.request("POST", "/v1/completions", data, headers("tokens"))
        response = connection.getresponse()
        response.read()
        assert response.headers["x-ratelimit-limit-tokens"] == "20"
        assert int(response.headers["x-ratelimit-remaining-tokens"]) <= int(left)
    data = json.dumps({"model": "blue", "prompt": [5] * 19, "max_tokens": 9})
    connection.request("POST", "/v1/completions", data, headers("tokens"))
    response = connection.getresponse()
    response.read()
    assert response.status == 429 and 55 <= int(response.headers["retry-after"]) <= 60
    connection.close()


def test_a_stream_ends_with_the_tokens(one: tuple[Listener, KeyStore, Keyring]) -> None:
    """A request that names no limit takes what there is, and says that it was cut."""
    server, _, ring = one
    client = cast(ScriptedClient, server.models.entry("red").client)
    client.tokens = list(client.tokens) * 20
    body = {"model": "red", "prompt": "hi"}
    status, reply = server.json("/v1/completions", body | {"max_tokens": 999}, **headers("tokens"))
    assert status == 400  # more than the context
    account = next(a for a in ring._accounts.values() if a.key.name == "tokens")
    status, reply = server.json("/v1/completions", body | {"max_tokens": 60}, **headers("tokens"))
    usage = reply["usage"]
    assert status == 200 and reply["choices"][0]["finish_reason"] == "length"
    assert usage["total_tokens"] == 20 and account.room(1) == 0 and account.held == 0


def test_what_cannot_be_written_is_not_lost(
    file: KeyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.create(Key("ann"))
    ring = Keyring(file)
    ring._used[(today(), "ann", "m")] = keyring_module.Counter(requests=1, prompt=2)

    def broken(rows: object) -> None:
        raise DatabaseError("full")

    with monkeypatch.context() as patch:
        patch.setattr(file, "count", broken)
        ring.save()
    assert file.usage() == []
    ring.save()
    assert [u.prompt for u in file.usage()] == [2]


class Part(ScriptedClient):
    """Computes 40 tokens of a prompt, of which 8 were known, and no more."""

    async def submit(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        self.running += 1
        try:
            yield Progress(request.id, 40, 8)
            await asyncio.Event().wait()
        finally:
            self.running -= 1


@pytest.mark.parametrize(
    ("path", "field"), [("/v1/completions", "prompt"), ("/v1/embeddings", "input")]
)
def test_a_prompt_that_is_given_up_is_charged_what_was_computed(
    tokenizer: Tokenizer, file: KeyStore, path: str, field: str
) -> None:
    secret = file.create(Key("ann", limits=KeyLimits(tokens_per_minute=100)))
    ring = Keyring(file)
    client = Part([])
    (account,) = ring._accounts.values()
    with listening(
        fake_model(tokenizer, "m", client=client), access=Access(keyring=ring)
    ) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        data = json.dumps({"model": "m", field: [5] * 44})
        connection.request("POST", path, data, {"Authorization": f"Bearer {secret}"})
        until(lambda: client.running)
        time.sleep(0.05)
        assert account.held >= 44
        connection.close()
        until(lambda: server.exchanges)
        (one_exchange,) = server.exchanges
    assert account.held == 0 and account.room(100) == 100 - 32
    ring.count(one_exchange)
    ring.save()
    (used,) = file.usage()
    assert (used.prompt, used.cached, used.completion) == (40, 8, 0)
