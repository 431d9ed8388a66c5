"""What gateways keep, in SQLite and in PostgreSQL; several gateways over one database."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import wraps
from pathlib import Path
from threading import Barrier, Thread
from typing import cast

import msgspec
import numpy as np
import psycopg
import pytest

from octavo import database as database_module
from octavo.database import Database, DatabaseError, PostgreSQL, open_database, place
from octavo.errors import UsageError
from octavo.experiments.controller import Experiments
from octavo.experiments.spec import ExperimentSpec, Variant
from octavo.experiments.store import ExperimentEnded, ExperimentStore, NoExperiment
from octavo.experiments.totals import Key, Total
from octavo.gateway.state import TABLES, kept_in
from octavo.release.controller import Assigned, Releases
from octavo.release.events import RequestEvent
from octavo.release.machine import NotNow, start
from octavo.release.spec import Guard, ReleaseSpec
from octavo.release.store import LEASE, AlreadyRuns, NoRelease, ReleaseStore
from octavo.release.tally import CANARY, STABLE
from tests import postgres

SPEC = ReleaseSpec(model="m", stable="old", canary="new", hold=60, warmup=0, min_events=10)


@pytest.fixture(scope="module")
def postgres_url() -> Iterator[str]:
    with postgres.server() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'state.sqlite3'}"
    found: str = request.getfixturevalue("postgres_url")
    with psycopg.connect(found) as db:
        db.execute("drop schema public cascade")
        db.execute("create schema public")
    return found


@pytest.fixture
def database(url: str) -> Iterator[Database]:
    found = open_database(url, TABLES)
    yield found
    found.close()


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """A test that waits."""

    @wraps(test)
    def run(**fixtures: object) -> None:
        asyncio.run(test(**fixtures))  # type: ignore[arg-type]

    return run


class Now:
    now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


def test_a_release_is_kept_with_all_that_happened(database: Database) -> None:
    store = ReleaseStore(database)
    with pytest.raises(NoRelease):
        store.find("m")
    first = store.start(SPEC, start(5.0), "ann")
    assert store.find("m") == first and store.latest() == {"m": first}
    with pytest.raises(AlreadyRuns):
        store.start(SPEC, start(6.0), "bob")
    ended = start(5.0).__class__("rolled_back", 0, 9.0, 5.0, 0, "rollback by bob")
    assert store.change(first, ended, "bob", 9.0)
    assert not store.change(first, ended, "ann", 9.5)
    second = store.start(SPEC, start(10.0), "ann")
    assert store.find("m") == second
    trail = [(r.at, r.who, r.what, r.detail) for r in store.trail(first.id)]
    assert trail[0][:3] == (5.0, "ann", "start") and '"canary":"new"' in trail[0][3]
    assert trail[1:] == [(9.0, "bob", "rolled_back", "rollback by bob")]


def test_a_pause_is_recorded_as_it_is_made(database: Database) -> None:
    now = Now()
    releases = Releases(ReleaseStore(database), now)
    releases.start(SPEC, "ann")
    began = now.now
    for action in ("pause", "resume", "pause"):
        now.now += 30
        releases.act("m", action, "bob")  # type: ignore[arg-type]
    trail = [(r.at - began, r.detail) for r in releases.status("m").trail]
    assert [at for at, _ in trail] == [0, 30, 60, 90]
    assert [detail for _, detail in trail[1:]] == ["pause by bob", "resume by bob", "pause by bob"]


def test_what_another_version_wrote_is_no_traceback(database: Database) -> None:
    ReleaseStore(database).start(SPEC, start(5.0), "ann")
    ExperimentStore(database).start(spec(a=50, b=50), 5.0, "ann")
    with database.transaction() as db:
        for table in ("releases", "experiments"):
            db.execute(f"""update {table} set spec = replace(spec, '"model"', '"of"')""")
    with pytest.raises(
        DatabaseError, match="the release rel_.* this version of Octavo cannot read"
    ):
        Releases(ReleaseStore(database))
    with pytest.raises(DatabaseError, match="the experiment .* this version of Octavo cannot read"):
        Experiments(ExperimentStore(database))


def test_two_who_promote_the_same_step_promote_it_once(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ReleaseStore(database)
    ann, bob = (Releases(store, Now()) for _ in range(2))
    ann.start(SPEC, "ann")
    found = store.find("m")
    with monkeypatch.context() as patch:
        patch.setattr(store, "find", lambda model: found)  # which both have read at once
        ann.act("m", "promote", "ann")
        with pytest.raises(NotNow, match="was changed meanwhile"):
            bob.act("m", "promote", "bob")
    assert store.find("m").state.step == 1
    trail = {(one.who, one.what) for one in store.trail(found.id)}
    assert trail == {("ann", "start"), ("ann", "step 2")}


def test_sums_of_gateways_are_added_and_counted_once(database: Database) -> None:
    store, row = ReleaseStore(database), np.arange(4.0)
    for _ in range(2):  # the second time says the same again
        store.put_sums("r", "one", {(0, 3): row, (1, 4): row})
        store.put_sums("r", "two", {(0, 3): 10 * row})
    store.put_sums("other", "one", {(0, 3): row})
    total = store.sums("r")
    assert total.keys() == {(0, 3), (1, 4)}
    assert (total[0, 3] == 11 * row).all() and (total[1, 4] == row).all()


def test_one_has_the_lease(database: Database) -> None:
    store = ReleaseStore(database)
    assert store.lease("x", "one", 100.0) and store.lease("x", "one", 105.0)
    assert not store.lease("x", "two", 105.0 + LEASE)
    assert store.lease("x", "two", 105.1 + LEASE) and not store.lease("x", "one", 106.0 + LEASE)
    assert store.lease("y", "one", 106.0)
    store.release_lease("x", "two")
    assert store.lease("x", "one", 106.0 + LEASE)


def test_many_begin_at_the_same_time(url: str) -> None:
    """Tables, a release, an experiment and a lease: each is made once."""
    found: list[str] = []
    together = Barrier(8)

    def begin(name: str) -> None:
        database = open_database(url, TABLES)
        store = ReleaseStore(database)
        if store.lease("x", name, 1.0):
            found.append("lease")
        try:
            store.start(SPEC, start(1.0), name)
            found.append("release")
        except AlreadyRuns:
            pass
        together.wait()
        try:
            ExperimentStore(database).start(spec(name=f"e{name}", a=50, b=50), 1.0, name)
            found.append("experiment")
        except AlreadyRuns:
            pass
        database.close()

    threads = [Thread(target=begin, args=(str(i),)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == ["experiment", "lease", "release"]


def test_a_new_file_is_opened_by_many_at_once(tmp_path: Path) -> None:
    """A hundred files by eight threads each: SQLite refuses one of 500 without waiting."""
    opened: list[int] = []

    def begin(number: int, ready: Barrier) -> None:
        ready.wait()
        open_database(str(tmp_path / str(number)), TABLES).close()
        opened.append(number)

    for number in range(100):
        ready = Barrier(8)
        threads = [Thread(target=begin, args=(number, ready)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(opened) == 800


def test_nobody_waits_for_a_server_that_hangs(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backend that is stopped, whose host goes on confirming what it gets; a statement that takes
    too long; a transaction that another does not end."""
    monkeypatch.setattr(database_module, "WAIT", 2)
    monkeypatch.setattr(database_module, "LONGEST", 0.5)
    with closing(open_database(postgres_url, ())) as found:
        with found.transaction() as db:
            ((stopped,),) = db.execute("select pg_backend_pid()")
        os.kill(stopped, signal.SIGSTOP)
        try:
            with pytest.raises(DatabaseError), found.transaction() as db:
                db.execute("select 1")
            monkeypatch.setattr(database_module, "LONGEST", 60)
            with found.transaction() as db:  # over a connection of its own
                ((other,),) = db.execute("select pg_backend_pid()")
            assert other != stopped
        finally:
            os.kill(stopped, signal.SIGCONT)
        with pytest.raises(DatabaseError, match="statement timeout"), found.transaction() as db:
            db.execute("select pg_sleep(60)")
        with found.transaction() as db, ThreadPoolExecutor() as threads:
            waiting = threads.submit(lambda: found.transaction().__enter__())
            assert "others have waited" in str(waiting.exception())


def test_a_server_that_cannot_be_connected_to_is_not_tried_by_everybody(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An address that takes connections and says nothing."""
    monkeypatch.setattr(database_module, "WAIT", 2)
    monkeypatch.setattr(database_module, "AGAIN", 60.0)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        found = cast(PostgreSQL, open_database(postgres_url, ()))
        found.close()
        found._url = f"postgresql://octavo@127.0.0.1:{listening.getsockname()[1]}/postgres"
        said = []
        for _ in range(5):
            with pytest.raises(DatabaseError) as raised, found.transaction():
                pass
            said.append(str(raised.value))
        assert len(set(said)) == 1 and "timeout" in said[0]
        listening.setblocking(False)
        listening.accept()[0].close()
        with pytest.raises(BlockingIOError):
            listening.accept()


def test_a_server_that_hangs_after_the_login_is_left(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_module, "LONGEST", 0.5)

    def login(listening: socket.socket) -> bytes:
        """Lets a client in, and hears the rest of what it says."""
        connection, _ = listening.accept()
        with connection:
            while (asked := connection.recv(4096))[4:6] == b"\x04\xd2":  # encryption
                connection.sendall(b"N")
            assert b"octavo" in asked
            connection.sendall(b"R\0\0\0\x08\0\0\0\0Z\0\0\0\x05I")
            heard = b""
            while data := connection.recv(4096):
                heard += data
            return heard

    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor() as threads:
        found = cast(PostgreSQL, open_database(postgres_url, ()))
        found.close()
        found._url = f"postgresql://octavo@127.0.0.1:{listening.getsockname()[1]}/postgres"
        heard = threads.submit(login, listening)
        with pytest.raises(DatabaseError), found.transaction():
            pass
        assert b"statement_timeout" in heard.result()


def test_a_transaction_takes_no_handle_and_lack_of_threads_is_an_error(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def no_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with closing(open_database(postgres_url, ())) as found:
        with monkeypatch.context() as patch:
            patch.setattr(os, "dup", none)
            with found.transaction() as db:
                assert db.execute("select 1") == [(1,)]
        monkeypatch.setattr(Thread, "start", no_thread)
        with pytest.raises(DatabaseError, match="start new thread"), found.transaction():
            pass


async def serve(
    gateway: Releases, clock: Now, requests: range, errors: float, seed: int = 0
) -> list[Assigned]:
    """Requests of other users, one a second; what was decided of each."""
    rng, out = np.random.default_rng(seed), []
    for number in requests:
        clock.now += 1
        assigned = gateway.assign("m", f"user-{number}")
        assert assigned is not None
        failed = assigned.arm == CANARY and bool(rng.random() < errors)
        event = RequestEvent(assigned.arm, clock.now, assigned.step, failed, ttft=0.1, itl=0.02)
        gateway.observe("m", assigned, event)
        out.append(assigned)
        if number % 3 == 0:
            await gateway.tick()
    await gateway.tick()
    return out


@in_loop
async def test_two_gateways_agree(url: str) -> None:
    """Each serves half; together they have seen enough. One ends, the other goes on, and a third
    knows all of it."""
    clock = Now()
    databases = [open_database(url, TABLES) for _ in range(3)]
    one, two = (Releases(ReleaseStore(d), clock) for d in databases[:2])
    assert one.assign("m", "ann") is None
    one.start(msgspec.structs.replace(SPEC, steps=(50, 100), hold=300.0), "ann")
    await two.tick()
    await one.tick()
    for i in range(0, 400, 40):
        first = await serve(one, clock, range(i, i + 20), 0.0)
        second = await serve(two, clock, range(i + 20, i + 40), 0.0)
        assert {a.release for a in first + second} == {one.status("m").release.id}
        for unit in ("x", "y", "z"):
            await one.tick()
            await two.tick()
            assert one.assign("m", unit) == two.assign("m", unit)
    status = two.status("m")
    assert status.release.state.step >= 1 and status.seen.canary >= 10
    assert status.seen.canary + status.seen.other == 400
    await one.tick()
    await one.close()
    await two.tick()
    three = Releases(ReleaseStore(databases[2]), clock)
    assert three.assign("m", "x") == two.assign("m", "x")
    assert three.status("m").seen == two.status("m").seen
    two.act("m", "rollback", "bob")
    await three.tick()
    ended = three.assign("m", "x")
    assert ended is not None and (ended.arm, ended.pool) == (STABLE, "old")
    for database in databases:
        database.close()


@in_loop
async def test_a_broken_version_is_rolled_back_by_itself(database: Database) -> None:
    clock, changes = Now(), []
    gateway = Releases(ReleaseStore(database), clock)
    gateway.changed = lambda release: changes.append(release.state.phase)
    gateway.start(msgspec.structs.replace(SPEC, steps=(20, 100)), "ann")
    await gateway.tick()
    served = await serve(gateway, clock, range(300), 0.5, seed=1)
    assert changes == ["running", "rolled_back"]
    count = sum(a.arm == CANARY for a in served)
    assert 3 <= count < 20 and served[-1].pool == "old"
    last = gateway.status("m").trail[-1]
    assert (last.who, last.what) == ("octavo", "rolled_back") and "error_rate" in last.detail


@in_loop
async def test_what_shadow_traffic_shows_rolls_back(database: Database) -> None:
    gateway = Releases(ReleaseStore(database), Now())
    with pytest.raises(NoRelease):
        gateway.shadow("m", [0.01])
    gateway.start(
        msgspec.structs.replace(SPEC, guards=(Guard(metric="shadow_kl", max=0.03),)), "ann"
    )
    await gateway.tick()
    gateway.shadow("m", [0.01, 0.02, 0.05] * 30)
    await gateway.tick()
    assert gateway.status("m").release.state.phase == "running"
    gateway.shadow("m", [0.2] * 30)
    await gateway.tick()
    await gateway.tick()
    status = gateway.status("m")
    assert status.release.state.phase == "rolled_back" and status.seen.canary == 0
    assert status.seen.readings[0].figures.count == 120
    with pytest.raises(NoRelease):
        gateway.shadow("m", [0.01])


@in_loop
async def test_what_was_measured_for_a_release_says_nothing_of_the_next(database: Database) -> None:
    gateway = Releases(ReleaseStore(database), Now())
    measured = msgspec.structs.replace(SPEC, guards=(Guard(metric="shadow_kl", max=0.03),))
    first = gateway.start(measured, "ann")
    gateway.act("m", "rollback", "ann")
    second = gateway.start(measured, "ann")
    await gateway.tick()
    with pytest.raises(NoRelease):
        gateway.shadow("m", [9.0] * 200, first.id)
    gateway.shadow("m", [0.01], second.id)
    await gateway.tick()
    assert gateway.status("m").seen.readings[0].figures.count == 1


def test_the_last_release_is_the_one_that_began_last_whatever_the_clock_says(
    database: Database,
) -> None:
    clock = Now()
    gateway = Releases(ReleaseStore(database), clock)
    gateway.start(SPEC, "ann")
    gateway.act("m", "rollback", "ann")
    clock.now -= 3600
    second = gateway.start(SPEC, "ann")
    assert gateway.latest()["m"].id == second.id
    gateway.act("m", "rollback", "ann")
    third = gateway.start(SPEC, "ann")
    assert gateway.latest()["m"].id == third.id and third.created > second.created


def spec(name: str = "e", **weights: float) -> ExperimentSpec:
    variants = {key: Variant(weight=w) for key, w in weights.items()}
    return ExperimentSpec(
        id=name, model="m", variants=variants, control="a", metrics=("thumbs", "ttft")
    )


@in_loop
async def test_experiments_of_two_gateways(url: str) -> None:
    databases = [open_database(url, TABLES) for _ in range(2)]
    one, two = (Experiments(ExperimentStore(d), Now()) for d in databases)
    one.start(spec(a=50, b=10), "ann")
    await one.tick()
    await two.tick()
    dealt = {}
    for number in range(300):
        for gateway in (one, two):
            chosen = gateway.assign("m", {"user": str(number), "request": "x"})
            assert dealt.setdefault(number, chosen) == chosen
            if chosen is not None:
                gateway.observe(chosen, RequestEvent("", 0, ttft=0.1, prompt_tokens=7))
                gateway.feedback("e", "thumbs", number % 2, {"user": str(number)})
    counts = [sum(c is not None and c.name == n for c in dealt.values()) for n in "ab"]
    assert 100 < counts[0] < 200 and 10 < counts[1] < 60
    await one.tick()
    await two.tick()
    _, totals, analysis = two.report("e")
    assert sum(t.count for (_, _, n), t in totals.items() if n == "ttft") == 2 * sum(counts)
    assert all(t.total == 14 for (_, _, n), t in totals.items() if n == "prompt_tokens")
    assert list(analysis.mismatch.counts.values()) == counts
    (thumbs,) = analysis.comparisons
    odd = {n for n, chosen in dealt.items() if chosen is not None and n % 2}
    named = {n for n in odd if dealt[n].name == "b"}
    assert thumbs.metric == "thumbs" and thumbs.value == pytest.approx(len(named) / counts[1])
    assert thumbs.control == pytest.approx(len(odd - named) / counts[0])
    assert analysis.waiting == ("ttft of b",)  # which is the same for all
    with pytest.raises(UsageError, match="e has no variant 'c', but a, b"):
        one.change_shares("e", {"c": 0.5}, "ann")
    one.change_shares("e", {"b": 0.5}, "ann")
    await two.tick()
    for number, chosen in dealt.items():
        after = two.assign("m", {"user": str(number)})
        assert after is not None and (chosen is None or after.name == chosen.name)
        two.observe(after, RequestEvent("", 0, ttft=0.1, prompt_tokens=7))
    await two.tick()
    _, totals, analysis = two.report("e")  # all who came new are of b, which has grown
    assert sum(t.count for (_, _, n), t in totals.items() if n == "@1") == 300
    assert sum(analysis.mismatch.counts.values()) == 300 and not analysis.mismatch.found
    one.change_shares("e", {"a": 0.9, "b": 0.1}, "ann")
    await two.tick()
    for number in range(300):
        two.observe(two.assign("m", {"user": str(number)}), RequestEvent("", 0))
    await two.tick()
    *_, analysis = two.report("e")
    assert sum(analysis.mismatch.counts.values()) == 300 and not analysis.mismatch.found
    assert analysis.moved > 50
    one.stop("e", "ann")
    await two.tick()
    assert two.assign("m", {"user": "1"}) is None
    with pytest.raises(NoExperiment):
        two.report("f")
    for change in (lambda: two.stop("e", "bob"), lambda: two.change_shares("e", {"b": 0.2}, "bob")):
        with pytest.raises(ExperimentEnded, match="has ended already"):
            change()
    one.start(spec("f", a=50, b=50), "ann")
    with pytest.raises(AlreadyRuns, match="'m' has an experiment that has not ended: f"):
        two.start(spec("g", a=50, b=50), "bob")
    for database in databases:
        database.close()


def test_gateways_that_add_to_the_same_units_do_not_wait_for_each_other(url: str) -> None:
    databases = [open_database(url, TABLES) for _ in range(2)]
    totals = {("a", f"u{i}", "ttft"): Total(1, 1.0) for i in range(2000)}
    backwards = dict(reversed(totals.items()))

    def write(database: Database, totals: dict[Key, Total]) -> None:
        for _ in range(4):
            ExperimentStore(database).add("e", totals)

    with ThreadPoolExecutor(2) as pool:
        writing = [
            pool.submit(write, *one) for one in zip(databases, (totals, backwards), strict=True)
        ]
        for one in writing:
            one.result()
    assert all(one == Total(8, 8.0) for one in ExperimentStore(databases[0]).totals("e").values())
    for database in databases:
        database.close()


class Short(ExperimentStore):
    """One whose transactions are broken off if they are long, and that is away at times."""

    written = 0

    def add(self, id: str, totals: Mapping[Key, Total]) -> None:
        self.written += 1
        if len(totals) > 10_000 or self.written == 3:
            raise DatabaseError("it took too long")
        super().add(id, totals)


@in_loop
async def test_what_many_units_did_is_written_in_parts(database: Database) -> None:
    store = Short(database)
    experiments = Experiments(store, Now())
    experiments.start(spec(a=50, b=50), "ann")
    await experiments.tick()
    for number in range(8000):
        chosen = experiments.assign("m", {"user": str(number)})
        assert chosen is not None
        experiments.observe(chosen, RequestEvent("", 0, ttft=0.1, prompt_tokens=7))
    with pytest.raises(DatabaseError):
        await experiments.tick()
    experiments.observe(chosen, RequestEvent("", 0, ttft=0.1, prompt_tokens=7))
    await experiments.tick()
    found = store.totals("e")
    assert sum(t.count for (_, _, n), t in found.items() if n == "ttft") == 8001
    assert store.written == 4


@in_loop
async def test_a_database_that_is_away_costs_nothing(tmp_path: Path) -> None:
    """Requests go on, nothing that was seen is lost, and the next look catches up."""
    database = open_database(str(tmp_path / "state.sqlite3"), TABLES)
    gateway, clock = Releases(ReleaseStore(database), Now()), Now()
    gateway.start(SPEC, "ann")
    await gateway.tick()
    with database.transaction() as db:
        db.execute("alter table sums rename to away")
    for number in range(50):
        assigned = gateway.assign("m", str(number))
        assert assigned is not None
        gateway.observe("m", assigned, RequestEvent(assigned.arm, clock.now, ttft=0.1))
    with pytest.raises(DatabaseError, match="no such table"):
        await gateway.tick()
    with database.transaction() as db:
        db.execute("alter table away rename to sums")
    await gateway.tick()
    seen = gateway.status("m").seen
    assert seen.canary + seen.other == 50
    database.close()


@in_loop
async def test_all_that_was_seen_is_there_after_the_end(tmp_path: Path) -> None:
    """What a gateway saw last is written at its end, once."""
    url = str(tmp_path / "state.sqlite3")
    for _ in range(2):
        async with kept_in(url) as state:
            releases, experiments = state.releases, state.experiments
            if not experiments.all():
                experiments.start(spec(a=50, b=50), "ann")
                releases.start(SPEC, "ann")
                await experiments.tick()
                await releases.tick()
            for number in range(100):
                chosen = experiments.assign("m", {"user": str(number)})
                assigned = releases.assign("m", str(number))
                assert chosen is not None and assigned is not None
                event = RequestEvent(assigned.arm, time.time(), ttft=0.1)
                experiments.observe(chosen, event)
                releases.observe("m", assigned, event)
    database = open_database(url, TABLES)
    totals = ExperimentStore(database).totals("e")
    assert sum(one.count for key, one in totals.items() if key[2] == "ttft") == 200
    seen = Releases(ReleaseStore(database)).status("m").seen
    assert seen.canary + seen.other == 200
    database.close()


def test_addresses(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="mysql://host/db is neither SQLite nor PostgreSQL"):
        open_database("mysql://root:secret@host/db", ())
    with pytest.raises(DatabaseError, match="cannot be used"):
        open_database(str(tmp_path), ())
    with pytest.raises(
        DatabaseError, match=r"^postgresql://127.0.0.1:1/x cannot be used"
    ) as caught:
        open_database("postgresql://ann:secret@127.0.0.1:1/x", ())
    assert "secret" not in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.suggestions == ("pg_isready -d postgresql://127.0.0.1:1/x",)


@pytest.mark.parametrize(
    "who", ["zoe:secret", "z@oe:se/cret", "z/oe:secret", "zoe:s#ecret", "zoe:sec?ret", "zoe:s@cret"]
)
def test_no_password_is_told(who: str) -> None:
    url = f"postgresql://{who}@h:99999/db"
    assert place(url) == "postgresql://" + "h:99999/db" * (who == "zoe:secret")
    with pytest.raises((UsageError, DatabaseError)) as caught:
        open_database(url, ())
    told = " ".join((str(caught.value), *caught.value.suggestions))
    assert not [part for part in ("secret", "cret", "ecret", "sec?", "oe") if part in told]


@pytest.mark.parametrize("url", ["postgresql://a:secret%zz@h/db", "postgresql://a:secret@[bad/x"])
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(UsageError, match="no URL that PostgreSQL knows") as caught:
        open_database(url, ())
    assert "secret" not in str(caught.value)


def test_a_file_is_the_one_that_was_opened(tmp_path: Path) -> None:
    """What another process would not see is not written, nor what it wrote missed."""
    first, second = (open_database(str(tmp_path / name), ()) for name in "ab")
    second.close()
    (tmp_path / "b").replace(tmp_path / "a")
    with pytest.raises(DatabaseError, match="a is not the file"), first.transaction():
        pass
    (tmp_path / "a").unlink()
    with pytest.raises(DatabaseError, match="No such file"), first.transaction():
        pass
    first.close()
