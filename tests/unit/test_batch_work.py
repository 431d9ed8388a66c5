"""Batches whose requests a script answers: how many at once, and how each of them ends."""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import FileResponse

from octavo.errors import InvalidValue, Overloaded, UsageError
from octavo.server import batches as batches_module
from octavo.server import files as files_module
from octavo.server.batch import AT_ONCE, Fault, encode, finished_ids, read_lines
from octavo.server.batches import Batches
from octavo.server.bodies import Bodies, TooLarge
from octavo.server.guard import Principal
from octavo.server.loopback import Loopback
from octavo.server.store import NotStored, Object, Store
from tests.unit.asgi import scope

URL = "/v1/completions"
Answer = Callable[[bytes], Awaitable[tuple[int, bytes]]]


class Scripted(Loopback):
    """Answers with what a function says. most: requests that were answered at once."""

    def __init__(self) -> None:
        self.running = self.most = 0
        self.answer: Answer | None = None

    async def whole(self, path: str, body: bytes, sender: Principal) -> tuple[int, bytes]:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(0.05)
            return (200, b"{}") if self.answer is None else await self.answer(body)
        finally:
            self.running -= 1


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    one = Store(tmp_path / "data")
    yield one
    one.close()


def lines(count: int) -> str:
    one = {"url": URL, "body": {}}
    return "".join(json.dumps(one | {"custom_id": f"{i}"}) + "\n" for i in range(count))


def begin(batches: Batches, tmp_path: Path, name: str, count: int) -> asyncio.Task[None]:
    source = tmp_path / "in"
    source.write_text(lines(count))
    file = batches.files.add("", source, "in", "batch")
    batch: Object = {
        "id": name, "object": "batch", "status": "validating", "endpoint": URL, "created_at": 1,
        "input_file_id": file["id"], "request_counts": {}, "output_file_id": None,
    }  # fmt: skip
    batches._store.put_object("", batch)
    batches._start("", batch)
    return batches._running[name]


def made(store: Store) -> tuple[Batches, Scripted]:
    batches = Batches(store)
    batches.loopback, batches.endpoints = Scripted(), frozenset([URL])
    batches.sender = lambda salt: Principal(salt)
    return batches, batches.loopback


def test_all_batches_together_leave_room_for_others(store: Store, tmp_path: Path) -> None:
    async def test() -> None:
        batches, loopback = made(store)
        await asyncio.gather(*(begin(batches, tmp_path, name, 100) for name in "abc"))
        assert loopback.most == AT_ONCE
        for name in "abc":
            batch = store.get_object("", "batch", name)
            assert batch["status"] == "completed"
            assert batch["request_counts"] == {"total": 100, "completed": 100, "failed": 0}

    asyncio.run(test())


def test_a_batch_that_cannot_go_on_has_failed(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        batches, loopback = made(store)
        left = [200, 200]

        async def answer(body: bytes) -> tuple[int, bytes]:
            if not left:
                raise OSError("a secret")
            return left.pop(), b"{}"

        loopback.answer = answer
        await begin(batches, tmp_path, "a", 5)
        batch = store.get_object("", "batch", "a")
        assert batch["status"] == "failed" and batch["failed_at"] > 0
        assert [e["code"] for e in batch["errors"]["data"]] == ["internal_error"]
        answers = batches.files.path(batch["output_file_id"]).read_text()
        assert len(answers.splitlines()) == 2
        assert "secret" not in caplog.text + json.dumps(batch) and "OSError" in caplog.text

    asyncio.run(test())


def test_a_batch_that_has_lost_its_input_keeps_what_is_done(store: Store, tmp_path: Path) -> None:
    async def test() -> None:
        batches, _ = made(store)
        done = encode({"id": "batch_req_1", "custom_id": "0"}) + b"\n"
        (tmp_path / "data/batches/a.output").write_bytes(done)
        task = begin(batches, tmp_path, "a", 5)
        batches.files.path(store.get_object("", "batch", "a")["input_file_id"]).unlink()
        await task
        batch = store.get_object("", "batch", "a")
        assert batch["status"] == "failed" and batch["failed_at"] > 0
        assert [e["message"] for e in batch["errors"]["data"]] == ["the input file is gone"]
        assert batches.files.path(batch["output_file_id"]).read_bytes() == done
        assert not list((tmp_path / "data/batches").iterdir())

    asyncio.run(test())


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("my notes\n", 1), ("precious", 1), ('{"a": 1}\n', 1), ("[]\n", 1), ("\n", 1),
        ('{"id":"batch_req_1","custom_id":"0"}\n{"id":"x', 2), (lines(1), 1),
        ('{"id": "batch_req_1", "custom_id": "0"}', 1),
    ],
)  # fmt: skip
def test_what_holds_no_results_stays_as_it_is(tmp_path: Path, text: str, line: int) -> None:
    file = tmp_path / "out.jsonl"
    file.write_text(text)
    with pytest.raises(UsageError, match=f"line {line} of out.jsonl is no result of a batch"):
        finished_ids(file)
    assert file.read_text() == text


@pytest.mark.parametrize("cut", ["", "{", '{"id":"batch_req_', '{"id":"batch_req_1","custom'])
def test_a_result_that_was_cut_off_is_asked_again(tmp_path: Path, cut: str) -> None:
    file = tmp_path / "out.jsonl"
    whole = '{"id":"batch_req_1","custom_id":"0"}\n'
    file.write_text(whole + cut)
    assert finished_ids(file) == {"0"} and file.read_text() == whole


def test_a_batch_that_ends_as_it_is_cancelled_has_one_end(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        batches, _ = made(store)
        close, closed = batches._close, list[str]()

        def slowly(owner: str, batch: Object, status: str) -> None:
            closed.append(status)
            time.sleep(0.1)
            close(owner, batch, status)

        monkeypatch.setattr(batches, "_close", slowly)
        begin(batches, tmp_path, "a", 3)
        while not closed:
            await asyncio.sleep(0.05)
        asked: Any = {
            "type": "http", "headers": [], "path_params": {"id": "a"}, "principal": Principal(),
        }  # fmt: skip
        told = [json.loads((await batches._cancel(Request(asked))).body) for _ in range(2)]
        assert closed == ["completed"] and [t["status"] for t in told] == 2 * ["completed"]
        answers = batches.files.path(told[0]["output_file_id"]).read_text()
        assert len(answers.splitlines()) == 3

    asyncio.run(test())


def test_a_line_that_nests_deeply_is_no_request(tmp_path: Path) -> None:
    source, deep = tmp_path / "in", 100_000
    source.write_text('{"custom_id": "a", "url": "b", "body": ' + deep * "[" + deep * "]" + "}")
    (fault,) = read_lines(source, [URL])
    assert isinstance(fault, Fault) and fault.line == 1


def test_the_files_of_one_owner_are_limited(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_module, "MOST_BYTES", 3 * files_module.LEAST)
    files = files_module.Files(store)

    def give(owner: str, data: bytes) -> Object:
        return files._take(owner, UploadFile(io.BytesIO(data), size=len(data), filename="a"))

    first = give("ann", b"a")
    give("ann", b"")
    for data in (b"a" * (files_module.LEAST + 1), b"a" * (2 * files_module.LEAST)):
        with pytest.raises(TooLarge, match="delete some first"):
            give("ann", data)
    give("ann", b"c")
    with pytest.raises(TooLarge):
        give("ann", b"d")
    assert len(list((store.folder / "files").iterdir())) == 3
    give("bob", b"d")
    store.delete_object(first["id"])
    give("ann", b"d")


def test_a_file_whose_content_is_gone_is_not_found(store: Store) -> None:
    files = files_module.Files(store)
    made = files._take("", UploadFile(io.BytesIO(b"a"), size=1, filename="a"))
    asked = scope() | {"principal": Principal(), "path_params": {"id": made["id"]}}
    kept = asyncio.run(files.content(Request(asked)))
    assert isinstance(kept, FileResponse) and Path(kept.path).read_bytes() == b"a"
    files.path(made["id"]).unlink()
    with pytest.raises(NotStored, match="gone"):
        asyncio.run(files.content(Request(asked)))


def test_the_batches_that_are_worked_on_are_limited(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"input_file_id": "a", "endpoint": URL, "completion_window": "24h"}

    async def body() -> Any:
        return {"type": "http.request", "body": json.dumps(asked).encode()}

    async def test() -> None:
        batches, _ = made(store)
        request = Request(scope() | {"principal": Principal()}, body)
        with pytest.raises(InvalidValue, match="input_file_id"):
            await batches._create(request, Bodies())
        monkeypatch.setattr(batches_module, "MOST_BATCHES", 0)
        request = Request(scope() | {"principal": Principal()}, body)
        with pytest.raises(Overloaded, match="0 batches are worked on"):
            await batches._create(request, Bodies())

    asyncio.run(test())
