"""Client libraries that people use, a few lines each: see `run.py`.

Each module has the functions of `ASKED`, of a server's address. A library that has no such thing
has no such function.
"""

from __future__ import annotations

from typing import Any

ASKED = ("chat", "stream", "tool", "structured", "embeddings", "error", "abort")
TEXT = "Tell me a long story about a king."
HI: list[Any] = [{"role": "user", "content": TEXT}]
SCHEMA: dict[str, Any] = {
    "type": "object", "properties": {"city": {"enum": ["Paris", "Rome"], "type": "string"}},
    "required": ["city"], "additionalProperties": False,
}  # fmt: skip
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather.", "parameters": SCHEMA},
}
FORM = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
SHORT: dict[str, Any] = {"max_tokens": 24, "temperature": 0}
LONG: dict[str, Any] = {"max_tokens": 4000, "temperature": 0}
