from typing import Any, Literal

import instructor
import openai
from pydantic import BaseModel

from tests.clients import HI


class Place(BaseModel):
    city: Literal["Paris", "Rome"]


def _made(url: str, mode: Any, model: str = "smollm2") -> Any:
    api = openai.OpenAI(base_url=url + "/v1", api_key="x", max_retries=0)
    ask = instructor.from_openai(api, mode=mode).chat.completions.create
    return ask(
        model=model, messages=HI, response_model=Place, max_retries=1, temperature=0
    ).model_dump()


def tool(url: str) -> Any:
    return _made(url, instructor.Mode.TOOLS)


def structured(url: str) -> Any:
    return _made(url, instructor.Mode.JSON_SCHEMA)


def error(url: str) -> str:
    try:
        return str(_made(url, instructor.Mode.TOOLS, "nobody"))
    except Exception as e:  # of its own kind, with the reason in its text
        return str(e)
