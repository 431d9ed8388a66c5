"""Anthropic's Messages API."""

from octavo.server.dialects.anthropic.routes import DIALECT

__all__ = ["DIALECT"]
