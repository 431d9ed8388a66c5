"""Request bodies of Ollama's API. Every field is obeyed, ignored, or refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Raw

from octavo.server.bounds import sampling
from octavo.server.dialects.openai.messages import MAX_MESSAGES, Tool
from octavo.server.dialects.openai.schemas import Int
from octavo.server.parsing import Fields
from octavo.server.sizes import AtMost, Entries, Texts

KIB = 1 << 10
MAX_INPUTS = 2048

FIELDS = Fields(
    ignored=frozenset({"keep_alive", "truncate", "shift"}),
    unsupported={"images": ([],), "context": ([],), "template": ("",), "suffix": ("",)},
)


class Options(msgspec.Struct, forbid_unknown_fields=True):
    """Parameters of one request. Those of type Raw are settings of a server here: no effect."""

    num_predict: Int | None = None
    temperature: Annotated[float | None, sampling("temperature")] = None
    top_k: Int | None = None
    top_p: Annotated[float | None, sampling("top_p")] = None
    min_p: Annotated[float | None, sampling("min_p")] = None
    typical_p: Annotated[float | None, sampling("typical_p")] = None
    seed: Int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: Annotated[float | None, sampling("presence_penalty")] = None
    frequency_penalty: Annotated[float | None, sampling("frequency_penalty")] = None
    repeat_last_n: Literal[0, -1] | None = None
    mirostat: Literal[0] | None = None
    tfs_z: Literal[1] | None = None
    penalize_newline: Literal[True] | None = None
    num_ctx: Raw = Raw()
    num_keep: Raw = Raw()
    num_batch: Raw = Raw()
    num_gpu: Raw = Raw()
    main_gpu: Raw = Raw()
    low_vram: Raw = Raw()
    f16_kv: Raw = Raw()
    vocab_only: Raw = Raw()
    use_mmap: Raw = Raw()
    use_mlock: Raw = Raw()
    num_thread: Raw = Raw()
    numa: Raw = Raw()
    logits_all: Raw = Raw()
    embedding_only: Raw = Raw()


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    arguments: dict[str, Any] = {}
    index: Raw = Raw()
    description: Raw = Raw()


class ToolCall(msgspec.Struct, forbid_unknown_fields=True):
    function: CalledFunction
    id: str | None = None
    type: Raw = Raw()


class Message(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class Common(msgspec.Struct, kw_only=True):
    """Fields of both endpoints that generate text. None stands for the default."""

    model: str | None = None
    stream: bool | None = None
    format: Annotated[dict[str, Any] | Literal["json", ""] | None, AtMost(1024 * KIB)] = None
    options: Annotated[Options | None, AtMost(64 * KIB)] = None
    think: bool | Literal["low", "medium", "high"] | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None


class ChatBody(Common, kw_only=True):
    messages: Annotated[list[Message] | None, Entries(b"role", MAX_MESSAGES)] = None
    tools: Annotated[list[Tool] | None, AtMost(1024 * KIB)] = None


class GenerateBody(Common, kw_only=True):
    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None


class EmbedBody(msgspec.Struct, kw_only=True):
    input: Annotated[str | list[str], Texts(MAX_INPUTS)]
    model: str | None = None
    dimensions: Int | None = None
    options: Annotated[Options | None, AtMost(64 * KIB)] = None


class EmbeddingsBody(msgspec.Struct, kw_only=True):
    prompt: str
    model: str | None = None
    options: Annotated[Options | None, AtMost(64 * KIB)] = None


class ShowBody(msgspec.Struct, kw_only=True):
    """name: of older clients. verbose has no effect: all that is known is told."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None

    def __post_init__(self) -> None:
        self.model = self.model or self.name


class PullBody(msgspec.Struct, kw_only=True):
    """name: of older clients. insecure has no effect: what is fetched is always checked."""

    model: str | None = None
    name: str | None = None
    stream: bool | None = None
    insecure: Raw = Raw()

    def __post_init__(self) -> None:
        self.model = self.model or self.name
        if not self.model:
            raise ValueError("model is missing")
