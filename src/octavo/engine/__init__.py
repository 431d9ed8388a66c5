"""Requests to steps to tokens."""

from octavo.engine.engine import Engine
from octavo.engine.events import Finish, TokenEvent, ends
from octavo.engine.request import Request, SamplingParams

__all__ = ["Engine", "Finish", "Request", "SamplingParams", "TokenEvent", "ends"]
