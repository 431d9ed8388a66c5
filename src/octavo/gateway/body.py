"""What the gateway reads of a request's body, in one pass; the rest is not decoded."""

from __future__ import annotations

import secrets
import time
from functools import cached_property
from typing import NamedTuple

import msgspec
from msgspec import Raw

from octavo.balance.chain import chain_sums, text_sums
from octavo.balance.cost import Ask
from octavo.engine.request import MAX_TIMEOUT, MIN_TIMEOUT
from octavo.errors import InvalidValue
from octavo.gateway.media import read_media
from octavo.gateway.prompt_names import name_prompt
from octavo.server.parsing import NOT_JSON
from octavo.server.resume import Resume

PREFIX_BYTES = 512  # bytes of text that prefixes are compared by
TOKEN = 4  # bytes of text, about
IMAGE_TOKENS = 576  # of an image, about: a CLIP of 336 pixels in patches of 14
BLOCK_TOKENS = PREFIX_BYTES // TOKEN  # of a prompt, that prefixes are compared by, about
RESPONSES = "/v1/responses"
OPERATIONS = {  # of routes, as the server calls them
    "chat": ("/v1/chat/completions", "/v1/messages", RESPONSES, "/api/chat"),
    "text_completion": ("/v1/completions", "/api/generate", "/completion", "/infill"),
    "embeddings": ("/v1/embeddings", "/api/embed", "/api/embeddings"),
    "rerank": ("/v1/rerank", "/v1/score"),
}
RESUMABLE = {"/v1/chat/completions": "chatcmpl-", "/v1/completions": "cmpl-"}


class Measured(NamedTuple):
    """What routing looks at of a prompt. tokens: about; sums: of each block; images: by content."""

    tokens: int
    sums: tuple[int, ...]
    images: tuple[int, ...]


class Outline(msgspec.Struct, dict=True):
    """Fields of any dialect that matter here."""

    model: str | None = None
    name: str | None = None
    stream: bool | None = None
    user: Raw = Raw()
    priority: Raw = Raw()
    timeout: Raw = Raw()
    n: Raw = Raw()
    best_of: Raw = Raw()
    echo: Raw = Raw()
    use_beam_search: Raw = Raw()
    beam_width: Raw = Raw()
    resume: Raw = Raw()
    previous_response_id: Raw = Raw()
    messages: Raw = Raw()
    prompt: Raw = Raw()
    input: Raw = Raw()
    images: Raw = Raw()  # Ollama's, beside a prompt

    @cached_property
    def measured(self) -> Measured:
        """How long the prompt is, and what it is made of; its text is not kept."""
        images = b'"images":' + bytes(self.images) if bytes(self.images) else b""
        read = read_media(images + bytes(self.messages or self.prompt or self.input))
        tokens = len(read.text) // TOKEN + 1 + IMAGE_TOKENS * len(read.images)
        return Measured(tokens, text_sums(read.text, PREFIX_BYTES), read.images)

    @property
    def tokens(self) -> int:
        """Tokens of the prompt, about."""
        return self.measured.tokens

    @property
    def previous(self) -> str | None:
        """The id of the response that it follows. Raises InvalidValue."""
        if bytes(self.previous_response_id) in (b"", b"null"):
            return None
        try:
            return msgspec.json.decode(self.previous_response_id, type=str)
        except NOT_JSON:
            raise InvalidValue("previous_response_id is a string", "previous_response_id") from None


class Relayed(msgspec.Struct, frozen=True, dict=True):
    """A request as it is passed on. path: the route's; target: with what it was asked for. salt:
    keeps what is cached of it apart. keeper: the only upstream that can answer it, "" for any.
    tenant: whose turn in the line it takes. begun: its client has the beginning of the answer, with
    which only Octavo's servers can go on."""

    path: str
    target: str
    body: bytes
    outline: Outline
    salt: str = ""
    session: str = ""
    keeper: str = ""
    tenant: str = ""
    begun: bool = False

    @property
    def stream(self) -> bool:
        return bool(self.outline.stream)

    @property
    def priority(self) -> int:
        try:
            return msgspec.json.decode(bytes(self.outline.priority) or b"0", type=int)
        except NOT_JSON:
            return 0  # a server says what is wrong with it

    @property
    def timeout(self) -> float | None:
        """Seconds from its arrival after which it is of no use, if it says so and servers know it;
        others than these they refuse."""
        if self.path not in RESUMABLE or not bytes(self.outline.timeout):
            return None
        try:
            found = msgspec.json.decode(self.outline.timeout, type=float)
        except NOT_JSON:
            return None
        return found if MIN_TIMEOUT <= found <= MAX_TIMEOUT else None

    @property
    def operation(self) -> str:
        """As OpenTelemetry's conventions for generative AI call it."""
        return next((name for name, paths in OPERATIONS.items() if self.path in paths), "other")

    @cached_property
    def ask(self) -> Ask:
        """What routing has to know of it."""
        prompt = self.outline.measured
        blocks = chain_sums(prompt.sums, self.salt)
        return Ask(prompt.tokens, blocks, BLOCK_TOKENS, prompt.images, self.session)

    @cached_property
    def prompt_name(self) -> str:
        """What upstreams are to call its prompt, "" for nothing."""
        return name_prompt(self.outline.model or "", self.ask.blocks)

    def resume(self) -> Resume | None:
        """How its stream begins at a server that can go on with another's; None: it cannot."""
        outline = self.outline
        single = bytes(outline.n) in (b"", b"1", b"null") and not any(
            bytes(raw) not in (b"", b"null", b"false")
            for raw in (outline.best_of, outline.echo, outline.use_beam_search, outline.beam_width)
        )
        if not self.stream or not single or self.path not in RESUMABLE:
            return None
        if bytes(outline.resume):
            return None  # even null would count in place of the gateway's own, which comes first
        if self.path == "/v1/completions" and bytes(outline.prompt)[:1] != b'"':
            return None  # several prompts, or token ids, of which there may be lists
        name = RESUMABLE[self.path] + secrets.token_hex(12)
        return Resume(id=name, created=int(time.time()), seed=secrets.randbits(62))


def read_outline(body: bytes) -> Outline:
    """The fields of a body. Raises InvalidValue."""
    try:
        return msgspec.json.decode(body, type=Outline)
    except msgspec.ValidationError as e:
        what = str(e) if body.lstrip()[:1] == b"{" else "the body must be a JSON object"
        raise InvalidValue(what[:200]) from None
    except NOT_JSON:
        raise InvalidValue("the body is not valid JSON in UTF-8") from None
