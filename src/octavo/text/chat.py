"""Chat templates: Jinja from the model file, so run in a sandbox with bounded work."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from octavo.checkpoint import Checkpoint
from octavo.checkpoint.safetensors import read_json
from octavo.errors import RequestError
from octavo.text.tokenizer import Tokenizer
from octavo.text.tools import THINK, THOUGHT, format_of, without_tools

MAX_SOURCE = 256 << 10
MAX_TEXT = 16 << 20  # characters of any string the template makes
MAX_NUMBER = 1 << 20  # of any number a call or operator is given
MAX_TICKS = 1_000_000  # loop turns and calls
MAX_SECONDS = 1.0
ESCAPES = [chr(c) for c in range(0xFDD0, 0xFDF0)]  # noncharacters: never in exchanged text
FILTERS = (
    "abs capitalize default d dictsort first float groupby int items join last length count list "
    "lower map max min reject rejectattr replace reverse round safe select selectattr sort string "
    "sum title trim unique upper"
).split()


class _Budget:
    """Counts what a rendering does, and stops it."""

    def __init__(self) -> None:
        self.ticks = 0
        self.deadline = time.monotonic() + MAX_SECONDS

    def tick(self) -> None:
        self.ticks += 1
        if self.ticks > MAX_TICKS or (self.ticks % 256 == 0 and time.monotonic() > self.deadline):
            raise SecurityError("the chat template does too much work")

    def loop(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self.tick()
            yield value


def _small(value: Any) -> Any:
    if isinstance(value, str) and len(value) > MAX_TEXT:
        raise SecurityError("the chat template makes a string that is too long")
    return value


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None,
    separators: tuple[str, str] | None = None, sort_keys: bool = False,
) -> str:  # fmt: skip
    """With the parameters and defaults that transformers gives it."""
    if isinstance(indent, int) and not 0 <= indent <= 16:
        raise SecurityError("indentation is too deep")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _Generation(Extension):
    """`{% generation %}` marks what the assistant said, for training; here it is just its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox whose loops, calls, products and concatenations are counted or measured."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", "jinja2.ext.do", _Generation],
        )
        self.budget = _Budget()
        self.filters = {k: v for k, v in self.filters.items() if k in FILTERS}
        self.filters["tojson"] = _tojson
        self.filters["_loop"] = lambda values: self.budget.loop(values)
        self.filters["_small"] = _small
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(str(form)[:64])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.budget.tick()
        if operator != "+":
            sizes = [x for x in (left, right) if isinstance(x, int | float)]
            if any(abs(x) > MAX_NUMBER for x in sizes) or (
                operator == "%" and isinstance(left, str)
            ):
                raise SecurityError(f"operator {operator} in a chat template")
            if operator == "*" and isinstance(left, str | list) and len(left) * right > MAX_TEXT:
                raise SecurityError("the chat template makes a value that is too long")
            if operator == "**" and any(abs(x) > 64 for x in sizes):
                raise SecurityError("operator ** in a chat template")
        return _small(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self.budget.tick()
        if any(isinstance(a, int) and abs(a) > MAX_NUMBER for a in (*args, *kwargs.values())):
            raise SecurityError("a chat template passes a number that is too large")
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str) and getattr(__obj, "__name__", "") in ("format", "format_map"):
            raise SecurityError("str.format in a chat template")
        return _small(super().call(__context, __obj, *args, **kwargs))

    def bounded(self, source: str) -> nodes.Template:
        """The template's syntax tree with every loop and concatenation under the budget."""
        tree = self.parse(source)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "_loop", [], [], None, None, lineno=loop.lineno)
        for parent in list(tree.find_all(nodes.Node)):
            for name, child in list(parent.iter_fields()):
                if isinstance(child, nodes.Concat):
                    wrapped = nodes.Filter(child, "_small", [], [], None, None, lineno=child.lineno)
                    setattr(parent, name, wrapped)
        return tree


class ChatTemplate:
    """Renders conversations. Raises RequestError when the template is at fault.

    style: how the model writes tool calls. reasons: whether its replies may hold thoughts.
    """

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        if len(source) > MAX_SOURCE:
            raise RequestError(
                f"the chat template has {len(source)} characters; {MAX_SOURCE} at most"
            )
        self._tokenizer = tokenizer
        self.style = format_of(source)
        self.reasons = THOUGHT in source
        self._lock = threading.Lock()  # a rendering has the environment's budget to itself
        self._environment = _Environment()
        try:
            tree = self._environment.bounded(source)
            self._template = self._environment.from_string(tree)
            self._takes_tools = "tools" in find_undeclared_variables(tree)
        except (TemplateError, RecursionError) as e:
            reason = str(e)[:200] or "it nests too deeply"
            raise RequestError(f"the chat template cannot be compiled: {reason}") from None

    def render(self, messages: list[dict[str, Any]], options: dict[str, Any] | None = None) -> str:
        """The conversation as text; options: further values for the template."""
        special = self._tokenizer.special
        # Templates handle a key that is missing better than one that is None; so does transformers.
        messages = [{k: v for k, v in m.items() if v is not None} for m in messages]
        try:
            with self._lock:
                self._environment.budget = _Budget()
                values = {"add_generation_prompt": True, **(options or {}), "messages": messages}
                for name, token in (("bos_token", special.bos), ("eos_token", special.end)):
                    values[name] = self._tokenizer.name(token) if token is not None else ""
                text = self._template.render(values)  # as a dict: any name may come from a client
        except TemplateError as e:
            raise RequestError(f"the chat template refused: {str(e)[:200]}", "messages") from None
        except (RecursionError, MemoryError, OverflowError):
            raise RequestError("the chat template does too much work", "messages") from None
        except (TypeError, ValueError, KeyError, AttributeError, IndexError) as e:
            why = type(e).__name__
            raise RequestError(f"the chat template fails on this ({why})", "messages") from None
        if len(text) > MAX_TEXT:
            raise RequestError("the rendered conversation is too long", "messages")
        return text

    def encode(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        options: dict[str, Any] | None = None,
        *,
        generation: bool = True,
        continued: bool = False,
    ) -> list[int]:
        """Ids of a conversation up to where the assistant speaks, as `generation` says.

        options: further values for the template. continued: the end of the last message is left
        open. Raises RequestError.
        Control tokens written by the template count; the same characters in a message stay text.
        Tools, calls and their results are written as text where the template knows nothing of them.
        """
        extra = {**(options or {}), "add_generation_prompt": generation}
        if self._takes_tools:
            extra["tools"] = tools or None
        else:
            messages = without_tools(messages, tools or [], self.style)
        everything = json.dumps([messages, extra], ensure_ascii=False)
        escape = next((c for c in ESCAPES if c not in everything), None)
        if escape is None:
            raise RequestError("the messages use every Unicode noncharacter", "messages")
        shielded, extra = _map_text([messages, extra], lambda s: self._tokenizer.shield(s, escape))
        text = self.render(shielded, extra)
        if continued:
            text = _left_open(text, shielded[-1]["content"])
        return self._tokenizer.encode_rendered(text, escape)

    def thinking(self, ids: list[int]) -> bool:
        """Whether a rendered conversation leaves the model inside its thoughts."""
        saying = self._tokenizer.bytes_saying((THINK, THOUGHT))
        end = b"".join(saying[i] for i in ids[-8:]).decode("utf-8", "replace")
        return self.reasons and end.rstrip().endswith(THINK)


def _left_open(text: str, last: str) -> str:
    """A rendered conversation up to the end of what its last message says."""
    at = text.rfind(last.strip())
    if at < 0 or not last.strip():
        raise RequestError("the last message leaves nothing to continue", "continue_final_message")
    kept = last.lstrip() if text.startswith(last.lstrip(), at) else last.strip()
    return text[: at + len(kept)]


def _map_text(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_map_text(v, change) for v in value]
    if isinstance(value, dict):
        return {k: _map_text(v, change) for k, v in value.items()}
    return value


def template_source(checkpoint: Checkpoint) -> str | None:
    """The chat template a checkpoint carries, if it does."""
    if checkpoint.format == "gguf":
        value = checkpoint.metadata.get("tokenizer.chat_template")
        return value if isinstance(value, str) else None
    if path := checkpoint.files.get("chat_template.jinja"):
        return path.read_text("utf-8", "replace") if path.stat().st_size <= 4 * MAX_SOURCE else None
    if path := checkpoint.files.get("tokenizer_config.json"):
        value = read_json(path).get("chat_template")
        if isinstance(value, list):  # named templates
            named = {t.get("name"): t.get("template") for t in value if isinstance(t, dict)}
            value = named.get("default")
        return value if isinstance(value, str) else None
    return None
