"""Text on the caller's side: tokenizer, detokenizer, chat templates, stop strings."""

from octavo.text.chat import ChatTemplate
from octavo.text.detokenizer import Detokenizer, TextStream
from octavo.text.reply_parser import CallDelta, Delta, ReplyParser
from octavo.text.stop_strings import StopStrings
from octavo.text.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "CallDelta",
    "ChatTemplate",
    "Delta",
    "Detokenizer",
    "ReplyParser",
    "StopStrings",
    "TextStream",
    "Tokenizer",
    "load_tokenizer",
]
