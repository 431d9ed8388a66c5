"""llama.cpp's own API: completions of plain prompts, gaps in code, and what clients ask about."""

from octavo.server.dialects.llama_cpp.routes import DIALECT

__all__ = ["DIALECT"]
