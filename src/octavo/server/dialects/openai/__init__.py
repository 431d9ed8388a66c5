"""OpenAI's API, with what vLLM and llama.cpp add to it."""

from octavo.server.dialects.openai.routes import DIALECT, RESPONSES

__all__ = ["DIALECT", "RESPONSES"]
