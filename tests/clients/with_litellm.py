import json
import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks a host on the internet

import litellm

from tests.clients import FORM, HI, LONG, SHORT, TOOL


def _create(url: str, **given: Any) -> Any:
    where = {"model": "openai/smollm2", "api_base": url + "/v1", "api_key": "x", "num_retries": 0}
    return litellm.completion(**{"messages": HI, **where, **SHORT, **given})


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
    made = litellm.embedding(
        model="openai/smollm2",
        input=["a king"],
        api_base=url + "/v1",
        api_key="x",
        encoding_format="float",
    )
    return list(made.data[0]["embedding"])


def error(url: str) -> str:
    try:
        return str(_create(url, model="openai/nobody"))
    except litellm.NotFoundError as e:
        return str(e)


def abort(url: str) -> None:
    pieces = _create(url, stream=True, **LONG)
    next(iter(pieces))
    pieces.completion_stream.close()
