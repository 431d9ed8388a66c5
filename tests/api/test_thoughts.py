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
    """A constraint is that of the answer, which follows thoughts that are free."""

    def tokens(text: str) -> list[int]:
        return list(thinker.post("/tokenize", {"prompt": text})[1]["tokens"])

    # "hm" until the penalty outweighs its bias, then what closes thoughts.
    (hm,) = tokens("hm")
    biases = {str(hm): 100} | {str(token): 80 for token in tokens("</think>")}
    digits = {"regex": "[0-9]{1,5}"}
    choice = ask(
        thinker, structured_outputs=digits, temperature=0, logit_bias=biases, frequency_penalty=2
    )
    assert choice["finish_reason"] == "stop"
    assert re.fullmatch("[0-9]{1,5}", choice["message"]["content"])
    assert re.fullmatch("(hm)+", choice["message"]["reasoning_content"])
    text = "I add them.\n</think>\n\nThe answer is 4."
    plain = ask(
        thinker,
        structured_outputs={"choice": [text]},
        chat_template_kwargs={"enable_thinking": False},
    )
    assert plain["message"]["content"] == text and "reasoning_content" not in plain["message"]


def test_streamed_alike(thinker: Server) -> None:
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "2 + 2?"}],
        "max_tokens": 40,
    }
    (stream,) = streamed(thinker, body)
    message = ask(thinker, max_tokens=40)["message"]
    assert stream["content"] == (message["content"] or "")
    assert stream["reasoning"] == message["reasoning_content"] != ""


def test_without_the_token_there_is_no_budget(thinker: Server) -> None:
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "x"}],
        "thinking_token_budget": 5,
    }
    status, reply = thinker.post("/v1/chat/completions", body)
    assert (status, reply["error"]["param"]) == (400, "thinking_token_budget")
