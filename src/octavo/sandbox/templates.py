"""Renders a chat template: Jinja, from a model file, with what clients send.

Run as `python -m octavo.sandbox.templates`; see octavo.sandbox.worker for what keeps it within
bounds. Jinja's own sandbox keeps it from everything but its arguments.
"""

from __future__ import annotations

import json
import re
from datetime import datetime
from typing import Any, NoReturn

import jinja2.debug  # noqa: F401  (before memory is short)
import msgspec
from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from octavo.sandbox.rendered import Rendered
from octavo.sandbox.worker import Handler, serve

MAX_TEXT = 16 << 20  # characters of a rendered conversation


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None,
    separators: tuple[str, str] | None = None, sort_keys: bool = False,
) -> str:  # fmt: skip
    """The tojson filter, with the parameters and defaults of transformers."""
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


class _Renderer:
    """One template. Compiled with the first task, so that compiling counts against its limits."""

    def __init__(self, source: bytes) -> None:
        self._source = source.decode()
        self._template: Template | None = None
        self._variables: list[str] = []

    def _compiled(self) -> Template:
        if self._template is None:
            environment = ImmutableSandboxedEnvironment(
                trim_blocks=True,
                lstrip_blocks=True,
                extensions=["jinja2.ext.loopcontrols", "jinja2.ext.do", _Generation],
            )
            environment.filters["tojson"] = _tojson
            environment.globals["raise_exception"] = _raise_exception
            environment.globals["strftime_now"] = lambda form: datetime.now().strftime(str(form))
            self._variables = sorted(find_undeclared_variables(environment.parse(self._source)))
            self._template = environment.from_string(self._source)
        return self._template

    def render(self, task: bytes) -> Rendered:
        """Renders with the variables of a task (JSON), if it has any."""
        try:
            template = self._compiled()
        except TemplateError as e:
            return Rendered(invalid=str(e)[:200] or type(e).__name__)
        except (RecursionError, SyntaxError):  # the second: Python's own, for its own limits
            return Rendered(invalid="it nests too deeply")
        if not task:
            return Rendered(variables=self._variables)
        try:
            text = template.render(json.loads(task))
        except TemplateError as e:
            return Rendered(refused=str(e)[:200] or type(e).__name__)
        except MemoryError:
            raise
        except Exception as e:  # whatever a template runs into is its own fault
            return Rendered(failed=type(e).__name__)
        if len(text) > MAX_TEXT:
            return Rendered(failed="the text is too long")
        try:
            text.encode()
        except UnicodeEncodeError:  # halves of characters, from JSON escapes
            text = re.sub("[\ud800-\udfff]", "\ufffd", text)
        return Rendered(text)


def prepare(about: bytes) -> Handler:
    renderer = _Renderer(about)
    return lambda task: msgspec.msgpack.encode(renderer.render(task))


if __name__ == "__main__":
    serve(prepare)
