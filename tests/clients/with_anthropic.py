import json
from typing import Any

import anthropic

from tests.clients import HI, LONG, SCHEMA, SHORT


def _asked(url: str, **given: Any) -> tuple[Any, dict[str, Any]]:
    """What makes messages, and a request."""
    messages = anthropic.Anthropic(base_url=url, api_key="x", max_retries=0).messages
    asked = {"model": "smollm2", "messages": HI, "max_tokens": SHORT["max_tokens"]}
    return messages, {**asked, "extra_body": {"temperature": 0}, **given}


def _create(url: str, **given: Any) -> Any:
    messages, asked = _asked(url, **given)
    (block,) = messages.create(**asked).content
    return block


def chat(url: str) -> str:
    return str(_create(url).text)


def stream(url: str) -> str:
    messages, asked = _asked(url)
    with messages.stream(**asked) as pieces:
        return "".join(pieces.text_stream)


def tool(url: str) -> Any:
    choice = {"type": "any", "disable_parallel_tool_use": True}
    tools = [{"name": "get_weather", "input_schema": SCHEMA}]
    return _create(url, tools=tools, tool_choice=choice, max_tokens=100).input


def structured(url: str) -> Any:
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    return json.loads(_create(url, output_config=form).text)


def error(url: str) -> str:
    try:
        return str(_create(url, model="nobody"))
    except anthropic.NotFoundError as e:
        return str(e)


def abort(url: str) -> None:
    messages, asked = _asked(url, max_tokens=LONG["max_tokens"])
    with messages.stream(**asked) as pieces:
        next(iter(pieces.text_stream))
