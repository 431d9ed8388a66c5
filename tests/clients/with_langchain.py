from typing import Any

import openai
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

from tests.clients import HI, LONG, SCHEMA, SHORT, TOOL


def _model(url: str, **given: Any) -> Any:
    where = {"base_url": url + "/v1", "api_key": "x", "max_retries": 0}
    return ChatOpenAI(**{"model": "smollm2", **where, **SHORT, **given})


def chat(url: str) -> str:
    return str(_model(url).invoke(HI).content)


def stream(url: str) -> str:
    return "".join(str(piece.content) for piece in _model(url).stream(HI))


def tool(url: str) -> Any:
    bound = _model(url).bind_tools([TOOL], tool_choice="required", parallel_tool_calls=False)
    return bound.invoke(HI).tool_calls[0]["args"]


def structured(url: str) -> Any:
    return (
        _model(url)
        .with_structured_output({"title": "place", **SCHEMA}, method="json_schema")
        .invoke(HI)
    )


def embeddings(url: str) -> list[float]:
    made = OpenAIEmbeddings(
        model="smollm2", base_url=url + "/v1", api_key="x", check_embedding_ctx_length=False
    )  # type: ignore[arg-type]
    return made.embed_query("a king")


def error(url: str) -> str:
    try:
        return str(_model(url, model="nobody").invoke(HI))
    except openai.NotFoundError as e:
        return str(e)


def abort(url: str) -> None:
    pieces = _model(url, **LONG).stream(HI)
    next(pieces)
    pieces.close()
