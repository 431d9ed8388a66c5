"""Requests to steps to tokens."""

from octavo.engine.engine import Engine
from octavo.engine.request import Finish, Request, SamplingParams, TokenEvent

__all__ = ["Engine", "Finish", "Request", "SamplingParams", "TokenEvent"]
