"""Replies that thoughts may precede: their grammars, and budgets of thoughts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import llguidance
import pytest

from octavo.engine.request import SamplingParams, Thinking
from octavo.generate.prepare import _bounded
from octavo.text.grammar import after_thoughts, from_grammar

BYTES = llguidance.LLTokenizer("byte")


def taken(grammar: str, text: str) -> bool:
    """Whether a grammar allows a text from end to end."""
    given = llguidance.LLMatcher.grammar_from_lark(grammar)
    matcher = llguidance.LLMatcher(BYTES, given)
    assert not matcher.get_error(), matcher.get_error()
    ids = BYTES.tokenize_str(text)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("own", "text"),
    [
        ('start: "a" answer\nanswer: "b"\n', "ab"),
        ('start: thoughts "b"\nthoughts: "t"\n', "tb"),
        ('start: "a" SPACE closed\nSPACE: " "\nclosed: "c"\n', "a c"),
        ('root ::= "a" answer\nanswer ::= "b" answer | "c"\n', "abbc"),
        ('start: "(" start ")" | "x"\n', "((x))"),
    ],
)
def test_rules_may_have_any_names_and_refer_to_their_start(own: str, text: str) -> None:
    grammar = after_thoughts(from_grammar(own), '"<think>"', '"</think>"', False)
    assert taken(grammar, text) and taken(grammar, f"<think>hm</think>\n{text}")
    assert not taken(grammar, f"({text}") and not taken(grammar, f"(<think>hm</think>{text})")
    opened = after_thoughts(from_grammar(own), '"<think>"', '"</think>"', True)
    assert taken(opened, f"hm</think>{text}") and not taken(opened, text)


def test_a_budget_holds_whoever_opens_the_thoughts() -> None:
    tokenizer = SimpleNamespace(
        vocabulary={"<think>": 6, "</think>": 7}, blank=[3, 4], encode=lambda text, add_bos: [9]
    )
    model: Any = SimpleNamespace(tokenizer=tokenizer, chat_template=SimpleNamespace(reasons=True))
    by_prompt, by_model = (_bounded(SamplingParams(), 5, model, opened) for opened in (True, False))
    assert by_prompt.thinking == Thinking(5, [7, 9])
    assert by_model.thinking == Thinking(5, [7, 9], opening=6, blank=[3, 4])
