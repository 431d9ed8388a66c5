"""How many tokens a request may take whose key has a limit, and who ends its text there.

Octavo's servers are told in a header, and count what they compute. Others are sent a body that
names no more than is left, for which the prompt is as long as it looks.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from octavo.gateway.body import RESPONSES, Relayed
from octavo.server.limits import CHUNK, Account, Meter
from octavo.server.parsing import NOT_JSON

COMPLETIONS, OLLAMA, OPTIONS = "/v1/completions", "/api/", "options"
LIMITS = {  # fields that limit a text, by route; the first is written where there is none
    "/v1/chat/completions": ("max_tokens", "max_completion_tokens"), COMPLETIONS: ("max_tokens",),
    RESPONSES: ("max_output_tokens",), "/v1/messages": ("max_tokens",),
    "/api/chat": ("num_predict",), "/api/generate": ("num_predict",),  # among its options
    "/completion": ("n_predict",), "/infill": ("n_predict",),
}  # fmt: skip
CHOICES = ("n", "best_of", "beam_width", "n_cmpl")
COMPLETION_TOKENS = 16  # of a completion that names no limit, as OpenAI's API has it
MODEST = 4096  # tokens that servers give a text which do not tell their context
Fields = dict[str, Any]  # of a body, not decoded


class TokenLimit(msgspec.Struct, frozen=True):
    """total: tokens that are reserved, those of the prompt and of all choices. open: the request
    names no limit of its own."""

    total: int
    prompt: int
    choices: int
    open: bool

    def body(self, asked: Relayed, context: int) -> bytes:
        """What a server is sent that does not count by itself. context: its, 0: it is not known."""
        most = (self.total - self.prompt) // self.choices
        if self.open and context:  # half of what is left: the prompt may be longer than it looks
            most = min(most, max(CHUNK, (context - self.prompt) // 2))
        elif self.open:
            most = min(most, MODEST)
        return naming(asked, max(1, most))


async def take(account: Account, asked: Relayed) -> tuple[Meter, Relayed, TokenLimit | None]:
    """Reserves the tokens of a request whose key has a limit: what is asked for then, and where it
    has to end if it could take more. Raises RateLimited."""
    prompt = asked.ask.tokens
    if asked.path not in LIMITS:
        return await account.take(prompt, 0), asked, None
    fields = msgspec.json.decode(asked.body, type=dict[str, Raw])
    most, choices = _most(asked.path, fields), _choices(fields)
    if most is None and asked.path == COMPLETIONS:  # servers differ in what they take that for
        most = COMPLETION_TOKENS
        asked = msgspec.structs.replace(asked, body=naming(asked, most))
    if most is None:
        meter = await account.take(prompt, None, account.share(prompt))
    else:
        meter = await account.take(prompt, most * choices)
    return meter, asked, limited(asked, meter.reserved)


def limited(asked: Relayed, total: int) -> TokenLimit | None:
    """Where a request has to end that may take so many tokens, if it could take more."""
    if asked.path not in LIMITS:
        return None
    fields = msgspec.json.decode(asked.body, type=dict[str, Raw])
    most, choices = _most(asked.path, fields), _choices(fields)
    if most is None and asked.path == COMPLETIONS:
        most = COMPLETION_TOKENS
    if most is not None and asked.ask.tokens + most * choices <= total:
        return None
    return TokenLimit(total, asked.ask.tokens, choices, most is None)


def most_tokens(asked: Relayed) -> int | None:
    """Tokens of each choice that a request names, if it does."""
    if asked.path not in LIMITS:
        return None
    return _most(asked.path, msgspec.json.decode(asked.body, type=dict[str, Raw]))


def naming(asked: Relayed, most: int) -> bytes:
    """The body with this limit in place of its own. What is not changed is not decoded."""
    fields: Fields = msgspec.json.decode(asked.body, type=dict[str, Raw])
    limits, names = _place(asked.path, fields), LIMITS[asked.path]
    limits |= dict.fromkeys([name for name in names if name in limits] or names[:1], most)
    if limits is not fields:
        fields[OPTIONS] = limits
    return msgspec.json.encode(fields)


def _place(path: str, fields: Fields) -> Fields:
    """Where the fields are that limit a text."""
    if not path.startswith(OLLAMA):
        return fields
    try:
        return msgspec.json.decode(fields.get(OPTIONS, b"{}"), type=dict[str, Raw])
    except NOT_JSON:
        return {}  # null, or what is none


def _most(path: str, fields: Fields) -> int | None:
    """Tokens of each choice that a body names, if it does."""
    limits = _place(path, fields)
    found = [n for name in LIMITS[path] if (n := _number(limits.get(name))) is not None]
    most = min(found, default=None)
    return None if most == 0 and path.startswith(OLLAMA) else most


def _choices(fields: Fields) -> int:
    """How many texts are made for a body."""
    made = max(_number(fields.get(name)) or 1 for name in CHOICES)
    prompts = bytes(fields.get("prompt", b""))
    if prompts[:1] != b"[":
        return made
    listed = msgspec.json.decode(prompts, type=list[Raw])
    several = sum(bytes(one)[:1] in (b'"', b"[") for one in listed)  # others are ids of one
    return made * max(1, several)


def _number(field: Raw | None) -> int | None:
    """A number of tokens or texts; below 0 it stands for none."""
    try:
        found = msgspec.json.decode(field or b"null", type=int | None)
    except NOT_JSON:
        return None
    return None if found is None or found < 0 else found
