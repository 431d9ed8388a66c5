"""What a server that is told to end still does: sockets and responses in the background are answered."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from websockets.sync.client import connect

from octavo.server.store import Store
from tests.api.server import serving

TOKENS = 150


def test_the_end_waits_for_sockets_and_the_background(smollm2: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    chat = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": TOKENS,
            "ignore_eos": True, "stream": True}  # fmt: skip
    with serving("smollm2", "--offline", "--data-dir", str(data), log=tmp_path / "log") as s:
        background = {"model": "smollm2", "input": "A story of a king.", "background": True,
                      "max_output_tokens": TOKENS}  # fmt: skip
        status, queued = s.post("/v1/responses", background)
        assert (status, queued["status"]) == (200, "queued")
        with connect(f"ws://127.0.0.1:{s.port}/v1/ws", proxy=None) as socket:
            socket.send(json.dumps({"id": "a", "path": "/v1/chat/completions", "body": chat}))
            chunks = [json.loads(socket.recv(20))]
            os.kill(s.process.pid, signal.SIGTERM)
            socket.send(json.dumps({"id": "b", "path": "/v1/chat/completions", "body": chat}))
            late = {}
            while chunks[-1] != {"id": "a", "done": True}:
                message = json.loads(socket.recv(20))
                if message["id"] == "b":
                    late |= message
                else:
                    chunks.append(message)
        assert s.process.wait(20) == 0
    said = [c["chunk"] for c in chunks[:-1]]
    assert [c["choices"][0]["finish_reason"] for c in said if c["choices"]][-1] == "length"
    assert (late["status"], late["body"]["error"]["code"]) == (503, "shutting_down")
    store = Store(data)
    kept = store.get("", queued["id"]).fields
    store.close()
    assert kept["status"] in ("completed", "incomplete") and kept["output"]
