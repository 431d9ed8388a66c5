"""A model as it is served: all that turns requests into its replies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from octavo.checkpoint.pooling import Pooling
from octavo.client.base import EngineClient
from octavo.engine.request import SamplingParams
from octavo.errors import RequestError
from octavo.generate.grammar_check import GrammarChecker
from octavo.program import Task
from octavo.text import ChatTemplate, Tokenizer
from octavo.vision.clip import VideoPreprocessor
from octavo.vision.preprocess import Preprocessor

Capability = Literal["generate", "chat", "embed", "rank"]


@dataclass(frozen=True)
class About:
    """What a model's files say of it. quantization: the type that holds most of its bytes."""

    format: str = ""
    architecture: str = ""
    parameters: int = 0
    bytes: int = 0
    quantization: str = ""


@dataclass(frozen=True)
class ServedModel:
    """A model under its public name.

    client: computes its tokens. grammars: checks constraints before that. defaults: sampling
    parameters of requests that name none. context: most tokens of a sequence. images, videos: how
    it takes these, None if it does not. adapter: the LoRA adapter that goes by this name. about:
    what its files say.
    """

    name: str
    aliases: tuple[str, ...]
    tokenizer: Tokenizer
    template: ChatTemplate | None
    client: EngineClient
    grammars: GrammarChecker
    defaults: SamplingParams
    vocabulary: int
    context: int
    created: int
    task: Task
    pooling: Pooling
    images: Preprocessor | None = None
    videos: VideoPreprocessor | None = None
    adapter: str = ""
    about: About = About()

    def require(self, capability: Capability) -> None:
        """Raises RequestError if the model cannot do that."""
        if capability in ("generate", "chat") and self.task != "generate":
            raise RequestError(
                f"{self.name} generates no text; it makes embeddings and scores pairs of texts",
                "model",
                "unsupported_task",
            )
        if capability == "embed" and self.task == "rank":
            raise RequestError(
                f"{self.name} ranks; it makes no embeddings", "model", "unsupported_task"
            )
        if capability == "chat" and self.template is None:
            raise RequestError(
                f"{self.name} has no chat template, so it cannot chat; let it continue texts, or "
                "give it one (--chat-template FILE)",
                "model",
                "no_chat_template",
            )

    @property
    def placeholders(self) -> list[str]:
        """What its chat template writes for a picture and for a video."""
        return [p.placeholder for p in (self.images, self.videos) if p is not None]

    @property
    def chat_template(self) -> ChatTemplate:
        """The template of a model that can chat. Raises RequestError."""
        self.require("chat")
        assert self.template is not None
        return self.template

    async def close(self) -> None:
        """Ends the engine and the processes that check grammars and render templates."""
        await self.client.close()
        self.end_workers()

    def end_workers(self) -> None:
        """Ends the processes that check grammars and render templates."""
        self.grammars.close()
        if self.template is not None:
            self.template.close()
