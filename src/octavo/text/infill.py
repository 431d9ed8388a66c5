"""Filling in the middle: the control tokens with which models are shown a gap in a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.text.tokenizer import Tokenizer

# The names that families give each token: Qwen and Gemma, StarCoder, Granite, DeepSeek, CodeLlama.
PREFIX = (
    "<|fim_prefix|>", "<fim_prefix>", "<fim-prefix>", "<｜fim▁begin｜>", "▁<PRE>", "<PRE>",
    "<|code_prefix|>",
)  # fmt: skip
SUFFIX = (
    "<|fim_suffix|>", "<fim_suffix>", "<fim-suffix>", "<｜fim▁hole｜>", "▁<SUF>", "<SUF>",
    "<|code_suffix|>",
)  # fmt: skip
MIDDLE = (
    "<|fim_middle|>", "<fim_middle>", "<fim-middle>", "<｜fim▁end｜>", "▁<MID>", "<MID>",
    "<|code_middle|>",
)  # fmt: skip
REPOSITORY = ("<|repo_name|>", "<|fim_repo|>", "<fim-repo>", "<repo_name>", "<reponame>")
FILE = ("<|file_sep|>", "<|file_separator|>", "<file_sep>", "<filename>")
PADDING = ("<|fim_pad|>", "<fim_pad>", "<fim-pad>")
ENDS = ("<|endoftext|>", "▁<EOT>", "<EOT>")  # of a filled gap, also where chats end otherwise


@dataclass(frozen=True)
class InfillTokens:
    """Token ids around a gap. repository, file: before the names of other files, if the model has
    them; ends: what ends the text in the gap beside the end of sequence."""

    prefix: int
    suffix: int
    middle: int
    repository: int | None
    file: int | None
    ends: tuple[int, ...]

    def encode(
        self, tokenizer: Tokenizer, before: str, after: str, files: Sequence[tuple[str, str]]
    ) -> list[int]:
        """Ids of a text with a gap, which the model fills next. files: names, texts of others."""
        special = tokenizer.special
        ids = [special.bos] if special.add_bos and special.bos is not None else []

        def plain(text: str) -> list[int]:
            return tokenizer.encode(text, add_bos=False)

        if files:
            ids += [] if self.repository is None else [self.repository, *plain("repository\n")]
            for name, text in (*files, ("file", "")):
                mark = plain("\n\n") if self.file is None else [self.file, *plain(f"{name}\n")]
                ids += mark + plain(text)
        return [*ids, self.prefix, *plain(before), self.suffix, *plain(after), self.middle]


def infill_tokens(tokenizer: Tokenizer) -> InfillTokens | None:
    """The tokens of a vocabulary; None if the model cannot fill in the middle."""
    prefix, suffix, middle = (_first(tokenizer, n) for n in (PREFIX, SUFFIX, MIDDLE))
    if prefix is None or suffix is None or middle is None:
        return None
    repository, file = _first(tokenizer, REPOSITORY), _first(tokenizer, FILE)
    found = [repository, file, _first(tokenizer, PADDING), _first(tokenizer, ENDS)]
    ends = tuple(token for token in found if token is not None)
    return InfillTokens(prefix, suffix, middle, repository, file, ends)


def _first(tokenizer: Tokenizer, names: Sequence[str]) -> int | None:
    known = tokenizer.vocabulary
    return next((known[name] for name in names if name in known), None)
