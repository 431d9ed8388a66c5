"""Tool calls: how prompts describe tools, how models write calls, and grammars of valid calls."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from octavo.text.grammar import HEADER
from octavo.text.json_schema import IN_PLACE, json_term, refuse
from octavo.text.messages import (
    JsonObject,
    Message,
    TextPart,
    Tool,
    ToolCall,
    message,
    tool_variables,
)
from octavo.text.tokenizer import Tokenizer

# Markers that are control tokens in some vocabularies; their text is needed to find calls.
THINK, THOUGHT = "<think>", "</think>"
MARKERS = (
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<|python_tag|>", THINK,
    THOUGHT,
)  # fmt: skip


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes tool calls.

    openings, closings: markers around calls. bare: a reply may begin with a call's JSON object,
    without a marker. named: the function's name may precede the object. key: the member that holds
    the arguments.
    """

    name: str
    openings: tuple[str, ...]
    closings: tuple[str, ...]
    bare: bool
    named: bool
    key: str


HERMES = ToolFormat("hermes", ("<tool_call>",), ("</tool_call>",), False, False, "arguments")
LLAMA3 = ToolFormat("llama3", ("<|python_tag|>",), (), True, False, "parameters")
MISTRAL = ToolFormat("mistral", ("[TOOL_CALLS]",), (), False, True, "arguments")
GEMMA = ToolFormat(
    "gemma", ("```tool_call\n", "```tool_code\n", "```json\n"), ("```",), True, False, "parameters"
)
NO_PARAMETERS: JsonObject = {"type": "object", "properties": {}}
STYLES = {style.name: style for style in (HERMES, LLAMA3, MISTRAL, GEMMA)}


def format_of(template: str) -> ToolFormat:
    """The tool format of a chat template; Hermes' if it has none of its own."""
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if "<tool_call>" in template:
        return HERMES
    if "<|python_tag|>" in template or "<|start_header_id|>" in template:
        return LLAMA3
    if "<start_of_turn>" in template:
        return GEMMA
    return HERMES


def instructions(tools: Sequence[Tool], style: ToolFormat) -> str:
    """A system prompt that describes tools, for templates without support for them.

    The wordings follow the Hermes function-calling prompt and Google's for Gemma.
    """
    functions = [tool_variables(t)["function"] for t in tools]
    listed = "\n".join(json.dumps(f, ensure_ascii=False) for f in functions)
    if style.bare:
        how = (
            'To call a function, answer with nothing but {"name": function name, "parameters": '
            "dictionary of argument names and their values}."
        )
    else:
        how = (
            "To call a function, answer with a JSON object inside <tool_call></tool_call> tags:\n"
            '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
        )
    return f"You have access to these functions:\n<tools>\n{listed}\n</tools>\n\n{how}"


def without_tools(
    messages: Sequence[Message], tools: Sequence[Tool], style: ToolFormat
) -> list[Message]:
    """Messages for a template without support for tools: calls and results become text."""
    out: list[Message] = []
    for is_result, group in itertools.groupby(messages, lambda m: m.role == "tool"):
        if is_result:
            results = (f"<tool_response>\n{m.text}\n</tool_response>" for m in group)
            out.append(message("user", "\n".join(results)))
        else:
            out += (_calls_as_text(m, style) if m.tool_calls else m for m in group)
    if not tools:
        return out
    told = instructions(tools, style)
    if out and out[0].role == "system":
        content = (*(out[0].content or ()), TextPart(f"\n\n{told}"))
        return [msgspec.structs.replace(out[0], content=content), *out[1:]]
    return [message("system", told), *out]


def _calls_as_text(given: Message, style: ToolFormat) -> Message:
    texts = [given.text] if given.text else []
    return message("assistant", "\n".join([*texts, *(written(c, style) for c in given.tool_calls)]))


def written(call: ToolCall, style: ToolFormat) -> str:
    """A call as text, in this format."""
    body = json.dumps({"name": call.name, style.key: call.arguments}, ensure_ascii=False)
    return body if style.bare else f"<tool_call>\n{body}\n</tool_call>"


def terminal(text: str, tokenizer: Tokenizer) -> str:
    """A marker as a grammar's terminal: the control token of that name if there is one."""
    token = tokenizer.vocabulary.get(text)
    if token is not None and token in tokenizer.special.control:
        return f"<[{token}]>"
    return json.dumps(text)


class ToolGrammar(msgspec.Struct, frozen=True, tag=True):
    """A constraint: every tool call of the reply is valid.

    functions: (name, JSON Schema of the arguments). markers: the terms of the style's markers.
    required: nothing but calls; else text or calls. parallel: more than one call may be made.

    Where another call may follow, the text may also end within what leads to it, so that whoever
    decodes can leave it to the model whether there is one (`SamplingParams.grammar_exit`).
    """

    functions: list[tuple[str, JsonObject]]
    style: str
    markers: dict[str, str]
    required: bool
    parallel: bool

    @property
    def exits(self) -> bool:
        """True if the model decides whether another call follows."""
        return self.parallel and (self.required or not STYLES[self.style].bare)

    def lark(self) -> str:
        """As a Lark grammar. Raises RequestError for parameters that are no schema of an object."""
        style = STYLES[self.style]
        rules = []
        for i, (name, parameters) in enumerate(self.functions):
            head, tail = json.dumps(f'{{"name": "{name}", "{style.key}": '), json.dumps("}")
            rules.append(f"object_{i}: {head} arguments_{i} {tail}")
            rules.append(f"arguments_{i}: {json_term(_arguments(name, parameters), 'tools')}")
        rules.append("object: " + " | ".join(f"object_{i}" for i in range(len(self.functions))))
        return HEADER + "\n".join(rules + self._replies(style))

    def _replies(self, style: ToolFormat) -> list[str]:
        calls, opening, body = self._calls(style)
        rules = [f"calls: {calls}"]
        if self.required:
            return [*rules, "start: calls"]
        if style.bare:
            return [*rules, "start: calls | TEXT?", r"TEXT: /[^{\s](.|\n)*/"]
        if opening.startswith("<["):
            return [*rules, "start: TEXT? calls?", r"TEXT: /(.|\n)+/"]
        return [
            *rules,
            f"start: (text_to_call {body}){'*' if self.parallel else '?'} TEXT?",
            f"text_to_call[lazy]: /(.|\\n)*/ {opening}",
            r"TEXT: /(.|\n)+/",
        ]

    def _calls(self, style: ToolFormat) -> tuple[str, str, str]:
        """Terms of the grammar: (all calls, what begins a call, the rest of a call)."""
        if style is MISTRAL:
            opening = self.markers["[TOOL_CALLS]"]
            more = '(", " object)* ("]" | "," | ", ")?' if self.parallel else '"]"'
            return f'{opening} "[" object {more}', opening, f'"[" object {more}'
        if style is HERMES:
            opening, closing = self.markers["<tool_call>"], self.markers["</tool_call>"]
            body = f'"\\n" object "\\n" {closing}'
            more = f"(NEXT {body})* LEFT?" if self.parallel else ""
            if opening.startswith("<["):
                more = more.replace("NEXT", f'"\\n" {opening}').replace("LEFT", '"\\n"')
            else:
                whole = "\n" + json.loads(opening)
                left = " | ".join(json.dumps(whole[:n]) for n in range(1, len(whole)))
                more = more.replace("NEXT", json.dumps(whole)).replace("LEFT", f"({left})")
            return f"{opening} {body} {more}", opening, body
        if self.parallel and style is LLAMA3:
            return 'object ("; " object)* ("; " | ";")?', "", ""
        return "object", "", ""


def _arguments(name: str, parameters: JsonObject) -> JsonObject:
    """A tool's parameters as a JSON Schema of an object."""
    kind = parameters.get("type")
    if kind == "object" or (kind is None and IN_PLACE & parameters.keys()):
        return parameters
    if kind is None or (isinstance(kind, list) and "object" in kind):
        return {**parameters, "type": "object"}
    raise refuse(f"the parameters of {name} are a schema of type {kind!r:.40}, not object", "tools")


def tool_grammar(
    tools: Sequence[Tool], style: ToolFormat, tokenizer: Tokenizer, *,
    required: bool, parallel: bool,
) -> ToolGrammar:  # fmt: skip
    """The constraint for replies that may call these tools."""
    functions = [(t.name, NO_PARAMETERS if t.parameters is None else t.parameters) for t in tools]
    return ToolGrammar(
        functions, style.name,
        {m: terminal(m, tokenizer) for m in MARKERS}, required, parallel,
    )  # fmt: skip
