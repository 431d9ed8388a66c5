import asyncio
from contextlib import suppress
from typing import Any, Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients import LONG, SHORT, TEXT


class Place(BaseModel):
    city: Literal["Paris", "Rome"]


def _agent(url: str, model: str = "smollm2", **given: Any) -> Any:
    provider = OpenAIProvider(base_url=url + "/v1", api_key="x")
    settings = given.pop("settings", SHORT)
    return Agent(OpenAIChatModel(model, provider=provider), model_settings=settings, **given)


def chat(url: str) -> str:
    return str(_agent(url).run_sync(TEXT).output)


class Left(Exception):
    """Leaving without an error waits for the rest of the stream."""


async def _pieces(agent: Any, leave: bool) -> str:
    text = ""
    async with agent.run_stream(TEXT) as result:
        async for piece in result.stream_text(delta=True, debounce_by=None):
            text += piece
            if leave:
                raise Left
    return text


def stream(url: str) -> str:
    return asyncio.run(_pieces(_agent(url), False))


def tool(url: str) -> Any:
    return _agent(url, output_type=ToolOutput(Place)).run_sync(TEXT).output.model_dump()


def structured(url: str) -> Any:
    return _agent(url, output_type=NativeOutput(Place)).run_sync(TEXT).output.model_dump()


def error(url: str) -> str:
    try:
        return str(_agent(url, "nobody").run_sync(TEXT))
    except ModelHTTPError as e:
        return str(e)


def abort(url: str) -> None:
    with suppress(Left):
        asyncio.run(_pieces(_agent(url, settings=LONG), True))
