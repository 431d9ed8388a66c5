import json
from typing import Any

import openai

from tests.clients import FORM, HI, LONG, SHORT, TOOL


def _create(url: str, **given: Any) -> Any:
    api = openai.OpenAI(base_url=url + "/v1", api_key="x", max_retries=0)
    return api.chat.completions.create(**{"model": "smollm2", "messages": HI, **SHORT, **given})


def chat(url: str) -> str:
    return str(_create(url).choices[0].message.content)


def stream(url: str) -> str:
    return "".join(c.choices[0].delta.content or "" for c in _create(url, stream=True))


def tool(url: str) -> Any:
    made = _create(url, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    return json.loads(made.choices[0].message.tool_calls[0].function.arguments)


def structured(url: str) -> Any:
    return json.loads(_create(url, response_format=FORM).choices[0].message.content)


def embeddings(url: str) -> list[float]:
    api = openai.OpenAI(base_url=url + "/v1", api_key="x")
    return api.embeddings.create(model="smollm2", input="a king").data[0].embedding


def error(url: str) -> str:
    try:
        return str(_create(url, model="nobody"))
    except openai.NotFoundError as e:
        return str(e)


def abort(url: str) -> None:
    with _create(url, stream=True, **LONG) as pieces:
        next(iter(pieces))
