"""Ollama's API."""

from octavo.server.dialects.ollama.routes import DIALECT

__all__ = ["DIALECT"]
