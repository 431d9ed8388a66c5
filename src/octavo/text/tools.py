"""How models of a style are told of tools, write calls, and are made to write valid ones."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from octavo.text.grammar import HEADER, json_text
from octavo.text.tokenizer import Tokenizer

# Markers that are control tokens in some vocabularies; their text is needed to find calls.
THINK, THOUGHT = "<think>", "</think>"
MARKERS = (
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", THINK, THOUGHT,
)  # fmt: skip


@dataclass(frozen=True)
class ToolFormat:
    """openings, closings: markers around calls. bare: a reply may begin with a call's object,
    no marker before it. named: the name may stand before it. key: what arguments are called."""

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


def format_of(template: str) -> ToolFormat:
    """The style of a chat template; models without one are asked to write Hermes'."""
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if "<tool_call>" in template:
        return HERMES
    if "<|python_tag|>" in template or "<|start_header_id|>" in template:
        return LLAMA3
    if "<start_of_turn>" in template:
        return GEMMA
    return HERMES


def instructions(tools: list[dict[str, Any]], style: ToolFormat) -> str:
    """What a model whose template knows no tools is told of them.

    The wordings follow the Hermes function-calling prompt and Google's for Gemma.
    """
    functions = [t["function"] for t in tools]
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
    messages: list[dict[str, Any]], tools: list[dict[str, Any]], style: ToolFormat
) -> list[dict[str, Any]]:
    """A conversation for a template that knows no tools: calls and results become text."""
    out: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            content = f"<tool_response>\n{message['content']}\n</tool_response>"
            if out and out[-1]["role"] == "user" and out[-1].get("results"):
                out[-1]["content"] += "\n" + content
            else:
                out.append({"role": "user", "content": content, "results": True})
        elif calls := message.get("tool_calls"):
            texts = [message["content"]] if message["content"] else []
            texts += [written(c["function"], style) for c in calls]
            out.append({"role": "assistant", "content": "\n".join(texts)})
        else:
            out.append(dict(message))
    for message in out:
        message.pop("results", None)
    if not tools:
        return out
    told = instructions(tools, style)
    if out and out[0]["role"] == "system":
        return [{**out[0], "content": f"{out[0]['content']}\n\n{told}"}, *out[1:]]
    return [{"role": "system", "content": told}, *out]


def written(function: dict[str, Any], style: ToolFormat) -> str:
    """A call as a model of this style writes it."""
    body = json.dumps(
        {"name": function["name"], style.key: function["arguments"]}, ensure_ascii=False
    )
    return body if style.bare else f"<tool_call>\n{body}\n</tool_call>"


def terminal(text: str, tokenizer: Tokenizer) -> str:
    """A marker in a grammar: the control token of that name where there is one."""
    token = tokenizer.vocabulary.get(text)
    if token is not None and token in tokenizer.special.control:
        return f"<[{token}]>"
    return json.dumps(text)


def grammar(
    tools: list[dict[str, Any]], style: ToolFormat, tokenizer: Tokenizer, *,
    required: bool, parallel: bool,
) -> str:  # fmt: skip
    """A grammar of replies whose calls are valid: calls only if `required`, else text or calls.

    parallel: more than one call may be made. Raises RequestError for parameters that are no schema.
    """
    rules = []
    for i, tool in enumerate(tools):
        function = tool["function"]
        schema = {
            "type": "object",
            "properties": {
                "name": {"const": function["name"]},
                style.key: function.get("parameters") or {"type": "object", "properties": {}},
            },
            "required": ["name", style.key],
            "additionalProperties": False,
        }
        rules.append(f"object_{i}: {json_text(schema, 'tools')}")
    rules.append("object: " + " | ".join(f"object_{i}" for i in range(len(tools))))
    if style is MISTRAL:
        more = '(", " object)*' if parallel else ""
        opening, body = terminal("[TOOL_CALLS]", tokenizer), f'"[" object {more} "]"'
        calls = f"{opening} {body}"
    elif style is HERMES:
        opening, closing = (terminal(m, tokenizer) for m in ("<tool_call>", "</tool_call>"))
        body = f'"\\n" object "\\n" {closing}'
        calls = f'{opening} {body} ("\\n" {opening} {body})*' if parallel else f"{opening} {body}"
    else:
        opening = body = ""
        calls = 'object ("; " object)*' if parallel and style is LLAMA3 else "object"
    rules.append(f"calls: {calls}")
    if required:
        rules.append("start: calls")
    elif style.bare:
        rules += ["start: calls | TEXT?", r"TEXT: /[^{\s](.|\n)*/"]
    elif opening.startswith("<["):
        rest = f"({opening} {body})*" if parallel and style is HERMES else ""
        rules += [f"start: TEXT? ({opening} {body} {rest})?", r"TEXT: /(.|\n)+/"]
    else:
        repeat = "*" if parallel else "?"
        rules += [
            f"start: (text_to_call {body}){repeat} TEXT?",
            f"text_to_call[lazy]: /(.|\\n)*/ {opening}",
            r"TEXT: /(.|\n)+/",
        ]
    return HEADER + "\n".join(rules)
