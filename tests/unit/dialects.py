"""Scripted models behind every dialect, and their replies in one form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from tokenizers import Tokenizer as HfTokenizer

from octavo.engine.events import Ended
from octavo.generate.grammar_check import GrammarChecker
from octavo.generate.model import ServedModel
from octavo.generate.served import token_table
from octavo.text import ChatTemplate, Tokenizer
from tests.unit.fake_models import Listener, ScriptedClient, fake_model, listening

# Shows all that it is given. It reads the marker "</think>", so the model may think.
TEMPLATE = """{# </think> #}{% if tools %}Tools: {{ tools | tojson }}
{% endif %}{% if reasoning_effort is defined %}Effort: {{ reasoning_effort }}
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content is defined %}Thought: {{ m.reasoning_content }}
{% endif %}{{ m.content }}{% if m.tool_calls is defined %}Calls: {{ m.tool_calls | tojson }}{% endif %}{% if m.tool_call_id is defined %}For: {{ m.tool_call_id }}{% endif %}{% if not loop.last or add_generation_prompt %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking %}Think.{% endif %}{% endif %}"""


def scripted(
    tokenizer: Tokenizer,
    name: str,
    says: str,
    finish: str = "stop",
    context: int = 4096,
    shows: str = TEMPLATE,
) -> ServedModel:
    """A model that says a text, whatever it is asked, and can compile constraints."""
    ended = Ended("", finish)  # type: ignore[arg-type]
    client = ScriptedClient(tokenizer.encode(says, add_bos=False), ended)
    template = ChatTemplate(shows, tokenizer)
    model = fake_model(tokenizer, name, client=client, template=template, context=context)
    return replace(model, grammars=GrammarChecker(token_table(tokenizer), len(tokenizer.bytes)))


def filling(tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer with StarCoder's tokens for filling in the middle."""
    names = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<fim_pad>"]
    backend = HfTokenizer.from_str(tokenizer.backend.to_str())
    backend.add_special_tokens(names)
    added = frozenset(backend.token_to_id(name) for name in names)
    special = replace(tokenizer.special, control=tokenizer.special.control | added)
    return Tokenizer(backend, special)


@contextmanager
def speaking(*models: ServedModel, **options: Any) -> Iterator[Listener]:
    try:
        with listening(*models, **options) as one:
            yield one
    finally:
        for model in models:
            model.end_workers()


@dataclass
class Reply:
    """What a reply says, in any dialect. finish: stop, length or calls."""

    text: str = ""
    thoughts: str = ""
    calls: list[Any] = field(default_factory=list)
    finish: str | None = None


def events(text: str) -> list[tuple[str, Any]]:
    """The named events of a stream."""
    out = []
    for block in text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        out.append((value["type"], value))
    return out
