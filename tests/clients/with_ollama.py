import json
from typing import Any

import ollama

from tests.clients import HI, LONG, SCHEMA, SHORT


def _chat(url: str, **given: Any) -> Any:
    options = {"num_predict": SHORT["max_tokens"], "temperature": 0}
    asked = {"model": "smollm2", "messages": HI, "options": options}
    return ollama.Client(host=url).chat(**{**asked, **given})


def chat(url: str) -> str:
    return str(_chat(url).message.content)


def stream(url: str) -> str:
    return "".join(piece.message.content or "" for piece in _chat(url, stream=True))


def structured(url: str) -> Any:
    return json.loads(_chat(url, format=SCHEMA).message.content)


def embeddings(url: str) -> list[float]:
    return list(ollama.Client(host=url).embed("smollm2", "a king").embeddings[0])


def error(url: str) -> str:
    try:
        return str(_chat(url, model="nobody"))
    except ollama.ResponseError as e:
        return str(e)


def abort(url: str) -> None:
    pieces = _chat(url, stream=True, options={"num_predict": LONG["max_tokens"]})
    next(pieces)
    pieces.close()
