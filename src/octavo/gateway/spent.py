"""The tokens that an answer says it took."""

from __future__ import annotations

import msgspec

from octavo.gateway.errors import UpstreamFailed
from octavo.generate.reply import Usage
from octavo.server.resume import Spent


class _Whole(msgspec.Struct):
    usage: Spent | None = None


def spent_of(body: bytes, who: str) -> Spent:
    """The tokens that an answer says it took. Raises UpstreamFailed for what is no JSON."""
    try:
        return msgspec.json.decode(body, type=_Whole).usage or Spent()
    except msgspec.ValidationError:
        return Spent()  # of another dialect
    except msgspec.DecodeError:
        raise UpstreamFailed(f"upstream {who} answers with broken JSON") from None


def count(usage: Usage, spent: Spent) -> None:
    """Notes them."""
    usage.prompt, usage.completion = spent.prompt_tokens, spent.completion_tokens
    usage.reached, usage.reused = {0: spent.prompt_tokens}, {0: spent.cached_tokens}
