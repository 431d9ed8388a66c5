"""Files and batches on a real server, over a restart, and the command `octavo batch`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.api.server import Server, serving
from tests.waiting import until

CHAT = "/v1/chat/completions"


def body(i: int, **more: Any) -> dict[str, Any]:
    said = [{"role": "user", "content": f"Count to {i}."}]
    return {"model": "smollm2", "messages": said, "temperature": 0, "max_tokens": 6} | more


def line(i: int, url: str = CHAT, **more: Any) -> str:
    request = {"custom_id": f"r{i}", "method": "POST", "url": url, "body": body(i, **more)}
    return json.dumps(request) + "\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("batches")


@pytest.fixture(scope="module")
def server(smollm2: object, folder: Path) -> Iterator[Server]:
    data = str(folder / "data")
    with serving("smollm2", "--offline", "--data-dir", data, log=folder / "log") as s:
        yield s


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=server.url + "/v1", api_key="x", max_retries=0, _strict_response_validation=True
    )


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with client_of(server) as one:
        yield one


def begin(client: openai.OpenAI, text: str, endpoint: Any = CHAT) -> Any:
    file = client.files.create(file=("in.jsonl", text.encode()), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"a": "b"}
    )


def wait(client: openai.OpenAI, id: str, *states: str) -> Any:
    batch: Any = None

    def there() -> bool:
        nonlocal batch
        batch = client.batches.retrieve(id)
        return batch.status in (*states, "failed")

    until(there)
    assert batch.status in states, batch
    return batch


def results(client: openai.OpenAI, file: str) -> dict[str, Any]:
    lines = [json.loads(text) for text in client.files.content(file).text.splitlines()]
    return {each["custom_id"]: each for each in lines}


def said(reply: Any) -> str:
    return str(reply["choices"][0]["message"]["content"])


def test_a_batch(client: openai.OpenAI, server: Server) -> None:
    bad = line(7, temperature=99) + line(8, stream=True)
    begun = begin(client, "".join(map(line, range(6))) + bad)
    assert begun.status == "validating" and begun.metadata == {"a": "b"}
    done = wait(client, begun.id, "completed")
    assert done.request_counts.to_dict() == {"total": 8, "completed": 6, "failed": 2}
    answers = results(client, done.output_file_id)
    assert answers.keys() == {f"r{i}" for i in range(6)}
    for i in range(6):
        response = answers[f"r{i}"]["response"]
        assert response["status_code"] == 200
        assert said(response["body"]) == said(server.post(CHAT, body(i))[1])
    errors = results(client, done.error_file_id)
    assert errors["r7"]["response"]["body"]["error"]["param"] == "temperature"
    assert (
        errors["r8"]["response"]["status_code"] == 400
        and "stream" in errors["r8"]["error"]["message"]
    )
    assert [b.id for b in client.batches.list()] == [begun.id]
    server.wait_idle()


def answering(i: int, **more: Any) -> str:
    """A line that asks for a response."""
    asked = {"input": f"Count to {i}.", "temperature": 0, "max_output_tokens": 6}
    request = {"custom_id": f"s{i}", "url": "/v1/responses", "body": asked | more}
    return json.dumps(request) + "\n"


def test_a_batch_of_responses(client: openai.OpenAI, server: Server) -> None:
    """They are stored as any others, and may follow others."""
    first = client.responses.create(model="smollm2", input="Hello.", max_output_tokens=6)
    text = answering(1) + answering(2, store=False) + answering(3, previous_response_id=first.id)
    done = wait(client, begin(client, text, "/v1/responses").id, "completed")
    made = {id: r["response"]["body"] for id, r in results(client, done.output_file_id).items()}
    texts = {id: one["output"][0]["content"][0]["text"] for id, one in made.items()}
    assert texts["s1"] == said(server.post(CHAT, body(1))[1])
    assert made["s3"]["usage"]["input_tokens"] > made["s1"]["usage"]["input_tokens"] + 6
    assert client.responses.retrieve(made["s1"]["id"]).output_text == texts["s1"]
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made["s2"]["id"])
    server.wait_idle()


@pytest.mark.parametrize(
    ("text", "number", "words"),
    [
        ("", 0, "empty"), ("{\n", 1, "not a request"), (line(1) + line(1), 2, "comes twice"),
        (line(1) + line(2, url="/v1/embeddings"), 2, "is taken"),
    ],
)  # fmt: skip
def test_what_is_no_batch(client: openai.OpenAI, text: str, number: int, words: str) -> None:
    begun = begin(client, text)
    batch = wait(client, begun.id, "failed")
    assert batch.errors and batch.errors.data
    assert batch.errors.data[0].line == number and words in str(batch.errors.data[0].message)


def test_files(client: openai.OpenAI, server: Server) -> None:
    made = client.files.create(file=("a.jsonl", b"abc"), purpose="batch")
    assert (made.bytes, made.filename, made.status) == (3, "a.jsonl", "processed")
    assert client.files.retrieve(made.id) == made and made in list(client.files.list())
    assert client.files.content(made.id).content == b"abc"
    client.files.delete(made.id)
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(made.id)
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=b"abc", purpose="fine-tune")
    assert server.post("/v1/files", b"{}")[1]["error"]["type"] == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="input_file_id"):
        client.batches.create(input_file_id=made.id, endpoint=CHAT, completion_window="24h")


def test_fields_that_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="expires_after"):
        more: Any = {"anchor": "created_at", "seconds": 3600}
        client.files.create(file=b"abc", purpose="batch", expires_after=more)
    file = client.files.create(file=b"abc", purpose="batch")
    with pytest.raises(openai.BadRequestError, match="output_expires_after"):
        client.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h", output_expires_after=more
        )


def test_lists_have_pages(client: openai.OpenAI) -> None:
    made = [client.files.create(file=b"abc", purpose="batch").id for _ in range(3)]
    first = client.files.list(limit=2)
    assert [file.id for file in first.data] == made[:0:-1] and first.has_more
    assert [file.id for file in first.get_next_page().data][:1] == made[:1]
    assert [file.id for file in client.files.list(limit=1, order="asc", after=made[1])][0] == made[
        2
    ]
    assert not client.files.list(purpose="assistants").data
    batches = [begin(client, line(i)).id for i in range(2)]
    listed = client.batches.list(limit=1)
    assert [batch.id for batch in listed.data] == batches[1:]
    assert listed.get_next_page().data[0].id == batches[0]
    for id in batches:
        wait(client, id, "completed")
    with pytest.raises(openai.BadRequestError, match="limit"):
        client.batches.list(limit=101)
    with pytest.raises(openai.BadRequestError, match="after"):
        client.batches.list(after=made[0])


def test_cancelling(client: openai.OpenAI, server: Server) -> None:
    begun = begin(client, "".join(line(i, max_tokens=3000, ignore_eos=True) for i in range(4)))
    wait(client, begun.id, "in_progress")
    assert client.batches.cancel(begun.id).status == "cancelled"
    server.wait_idle()
    assert client.batches.retrieve(begun.id).status == "cancelled"


def test_a_restart(server: Server, folder: Path, client: openai.OpenAI) -> None:
    """What was answered is not asked again, the rest is answered by the next server."""
    count = 400
    begun = begin(client, "".join(line(i, max_tokens=2) for i in range(count)))
    output = folder / "data" / "batches" / f"{begun.id}.output"
    until(lambda: output.exists() and output.read_bytes().count(b"\n") >= 5)
    server.process.kill()
    server.process.wait(10)
    before = output.read_bytes()
    assert 5 <= before.count(b"\n") < count
    output.write_bytes(before + b'{"id":"batch_req_0')
    data = str(folder / "data")
    with serving("smollm2", "--offline", "--data-dir", data, log=folder / "log2") as again:
        other = client_of(again)
        done = wait(other, begun.id, "completed")
        assert done.request_counts.to_dict() == {"total": count, "completed": count, "failed": 0}
        text = other.files.content(done.output_file_id).text
        assert text.encode().startswith(before)
        assert len(results(other, done.output_file_id)) == count == text.count("\n")
        other.close()


def test_the_command(smollm2: object, tmp_path: Path) -> None:
    """It goes on where it was ended, and leaves what is done as it is."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    wanted = [line(i) for i in range(5)]
    other = {"custom_id": "m", "url": "/v1/messages", "body": body(1)}
    source.write_text(
        "".join(wanted) + json.dumps(other) + "\n" + line(9, temperature=99) + answering(1)
    )

    def run() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "octavo.cli.main", "batch", str(source), str(target)]
        return subprocess.run(
            [*command, "--offline", "--context", "256"], capture_output=True, text=True, timeout=60
        )

    first = run()
    assert first.returncode == 0, first.stderr
    assert "8 requests, 8 answered now, 1 of them with an error" in first.stdout
    made = {r["custom_id"]: r for r in map(json.loads, target.read_text().splitlines())}
    assert len(made) == 8 and made["r9"]["response"]["status_code"] == 400
    text = made["m"]["response"]["body"]["content"][0]["text"]
    assert text == said(made["r1"]["response"]["body"])
    assert text == made["s1"]["response"]["body"]["output"][0]["content"][0]["text"]
    kept = target.read_bytes().splitlines(keepends=True)[:4]
    target.write_bytes(b"".join(kept) + b'{"id":"bat')
    second = run()
    assert "8 requests, 4 answered now" in second.stdout
    lines = target.read_bytes().splitlines(keepends=True)
    assert lines[:4] == kept and len(lines) == 8
    assert {json.loads(each)["custom_id"] for each in lines} == made.keys()
    assert "all answered" in run().stdout
    source.write_text("{")
    wrong = run()
    assert wrong.returncode == 2 and "line 1" in wrong.stderr
