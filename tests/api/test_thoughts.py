"""Models that think: thoughts apart from the answer, and constraints on the answer only."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.server import Server, serving
from tests.api.test_forced import streamed
from tests.api.test_structured import chat

TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
{% if enable_thinking is not defined or enable_thinking %}<think>
{% endif %}{# replies may hold </think> #}"""


@pytest.fixture(scope="module")
def thinker(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The demo model under a template that opens thoughts."""
    folder = tmp_path_factory.mktemp("thinker")
    (folder / "template.jinja").write_text(TEMPLATE)
    options = ("--offline", "--chat-template", str(folder / "template.jinja"))
    with serving("smollm2", *options, log=folder / "log") as server:
        yield server


def ask(server: Server, **changes: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "2 + 2?"}]
    return chat(server, messages=messages, **{"max_tokens": 60} | changes)  # type: ignore[no-any-return]


def test_thoughts_come_apart(thinker: Server) -> None:
    text = "I add them.\n</think>\n\nThe answer is 4."
    outputs = {"grammar": f'start: "{text}"'.replace("\n", "\\n")}
    # The grammar is that of the answer, which follows thoughts that are free.
    closing = thinker.post("/tokenize", {"prompt": "</think>"})[1]["tokens"]
    choice = ask(
        thinker, structured_outputs={"regex": "[0-9]{1,5}"}, max_tokens=200, temperature=1, seed=0,
        logit_bias={str(token): 100 for token in closing},
    )  # fmt: skip
    assert choice["finish_reason"] == "stop"
    assert re.fullmatch("[0-9]{1,5}", choice["message"]["content"])
    thoughts = choice["message"].get("reasoning_content", "")
    assert not re.search("</think>", thoughts)
    plain = ask(
        thinker, structured_outputs=outputs, chat_template_kwargs={"enable_thinking": False}
    )
    assert plain["message"]["content"].startswith("I add them.")


def test_streamed_alike(thinker: Server) -> None:
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "2 + 2?"}],
        "max_tokens": 40,
    }
    (stream,) = streamed(thinker, body)
    assert stream["content"] == (ask(thinker, max_tokens=40)["message"]["content"] or "")


def test_without_the_token_there_is_no_budget(thinker: Server) -> None:
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "x"}],
        "thinking_token_budget": 5,
    }
    status, reply = thinker.post("/v1/chat/completions", body)
    assert (status, reply["error"]["param"]) == (400, "thinking_token_budget")
