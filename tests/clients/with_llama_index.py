from typing import Any, Literal

import openai
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

from tests.clients import SHORT, TEXT

SAID = [ChatMessage(role="user", content=TEXT)]


class Place(BaseModel):
    """A place."""

    city: Literal["Paris", "Rome"]


def _model(url: str, **given: Any) -> Any:
    kind = {"is_chat_model": True, "is_function_calling_model": True, "max_retries": 0}
    return OpenAILike(
        **{"model": "smollm2", "api_base": url + "/v1", "api_key": "x", **kind, **SHORT, **given}
    )


def chat(url: str) -> str:
    return str(_model(url).chat(SAID).message.content)


def stream(url: str) -> str:
    return "".join(piece.delta or "" for piece in _model(url).stream_chat(SAID))


def tool(url: str) -> Any:
    return _model(url).structured_predict(Place, PromptTemplate(TEXT)).model_dump()


def structured(url: str) -> Any:
    model = _model(url, should_use_structured_outputs=True)
    return model.structured_predict(Place, PromptTemplate(TEXT)).model_dump()


def error(url: str) -> str:
    try:
        return str(_model(url, model="nobody").chat(SAID))
    except openai.NotFoundError as e:
        return str(e)
