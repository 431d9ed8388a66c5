"""Text to token ids. User text never becomes a control token; only chat templates write those."""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Encoding
from tokenizers import Tokenizer as HfTokenizer
from tokenizers.models import BPE

from octavo.checkpoint import Checkpoint
from octavo.checkpoint.files import MemoryFile, check_size, read_file, read_json
from octavo.errors import CheckpointError, OctavoError
from octavo.text import gguf_vocabulary
from octavo.text.detokenizer import token_bytes

MAX_FILE = 64 << 20  # bytes of a tokenizer.json
MAX_TOKENS = 4 << 20
MAX_CONTROL = 1 << 16

# Control tokens that end a turn even when the file does not list them as end of sequence.
TURN_ENDS = ("<|im_end|>", "<end_of_turn>", "<|eot_id|>", "<|eom_id|>", "<|end|>")

Made = TypeVar("Made")


LARGE = 1 << 20  # characters
SPACES = "  a \n\n\t b  \r\n c "  # which some tokenizers drop


def give_back() -> None:
    """Returns free memory to the system. Encoding 8 MiB of text allocates about 1 GiB."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


@dataclass(frozen=True)
class SpecialIds:
    """bos is None when the model has none; `add_bos`: plain prompts begin with it. eos: all that
    end a reply; end: the one that templates know as `eos_token`."""

    bos: int | None
    eos: frozenset[int]
    end: int | None
    add_bos: bool
    control: frozenset[int]


class Tokenizer:
    """Encodes and decodes text. Thread-safe."""

    def __init__(self, tokenizer: HfTokenizer, special: SpecialIds) -> None:
        """Raises CheckpointError for ids or control tokens beyond any model's."""
        self.vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        largest = max(self.vocabulary.values(), default=0)
        if largest >= MAX_TOKENS or len(special.control) > MAX_CONTROL:
            raise CheckpointError(
                f"the tokenizer has ids up to {largest} and {len(special.control)} control tokens; "
                f"{MAX_TOKENS - 1} and {MAX_CONTROL} at most"
            )
        tokenizer.encode_special_tokens = True  # control tokens in plain text stay text
        self._tokenizer = tokenizer
        self.special = special
        self.bytes = token_bytes(json_of(tokenizer), self.vocabulary, special.control)
        names = {i: t for t, i in self.vocabulary.items()}
        self._control = {names[i]: i for i in special.control if i in names}
        longest_first = sorted(self._control, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._names = names

    def encode(self, text: str, add_bos: bool | None = None) -> list[int]:
        """Ids of plain text; begins with bos when the model wants it (or as `add_bos` says)."""
        want = self.special.add_bos if add_bos is None else add_bos
        ids = self._plain(text)
        return [self.special.bos, *ids] if want and self.special.bos is not None else ids

    def encode_segments(self, text: str, second: str | None = None) -> tuple[list[int], list[int]]:
        """Ids and segment numbers of a text, or of a pair, as an encoder wants them: with the
        tokens that its tokenizer puts around them."""
        encoding = _encode(self._tokenizer, text, second, add_special_tokens=True)
        ids, types = list(encoding.ids), list(encoding.type_ids)
        bos = self.special.bos
        if self.special.add_bos and bos is not None and ids[:1] != [bos]:
            return [bos, *ids], [0, *types]
        return ids, types

    def _plain(self, text: str) -> list[int]:
        if not text:
            return []
        encoding = _encode(self._tokenizer, text)
        ids = list(encoding.ids)
        if len(text) > LARGE:
            del encoding
            give_back()
        return ids

    @cached_property
    def _bounds(self) -> tuple[int, bytes] | None:
        """(most bytes of a token, bytes that have none and are dropped), where every byte of a text
        comes to be in a token or is dropped."""
        model = self._tokenizer.model
        plain = self._tokenizer.normalizer is None and isinstance(model, BPE)
        if not plain or model.unk_token is not None or self.decode(self._plain(SPACES)) != SPACES:
            return None
        known = {b for b in self.bytes if len(b) == 1}
        return max(map(len, self.bytes)), bytes(i for i in range(256) if bytes([i]) not in known)

    @cached_property
    def blank(self) -> list[int]:
        """The tokens that are white space."""
        texts = enumerate(b.decode("utf-8", "replace") for b in self.bytes)
        return [i for i, text in texts if text.isspace()]

    def least_tokens(self, text: str) -> int:
        """A lower bound of the number of tokens, without tokenizing, which may take seconds."""
        if self._bounds is None:
            return 0
        longest, dropped = self._bounds
        return len(text.encode("utf-8", "replace").translate(None, dropped)) // longest

    def encode_rendered(self, text: str, escape: str = "") -> list[int]:
        """Ids of a rendered template: control tokens are recognised unless broken by `escape`.

        `escape` is a character that occurs nowhere else; it is removed before encoding.
        """
        ids: list[int] = []
        at = 0
        for match in self._pattern.finditer(text):
            ids += self._plain(text[at : match.start()].replace(escape, ""))
            ids.append(self._control[match.group()])
            at = match.end()
        return ids + self._plain(text[at:].replace(escape, ""))

    def without_control(self, text: str) -> str:
        """A text without what `encode_rendered` takes for control tokens."""
        return self._pattern.sub("", text)

    def shield(self, text: str, escape: str) -> str:
        """User text with `escape` inserted into everything that looks like a control token."""
        return self._pattern.sub(lambda m: m.group()[0] + escape + m.group()[1:], text)

    def bytes_saying(self, names: tuple[str, ...]) -> list[bytes]:
        """Like `bytes`, but these control tokens have their names as text."""
        spoken = {self._control[n]: n.encode() for n in names if n in self._control}
        return [spoken.get(i, b) for i, b in enumerate(self.bytes)] if spoken else self.bytes

    def grammar_bytes(self) -> list[bytes]:
        """Like `bytes`, but every control token has its name as text."""
        return self.bytes_saying(tuple(self._control))

    def decode(self, ids: list[int]) -> str:
        """Text of token ids. Control tokens are dropped, and those that only the model has; invalid
        UTF-8 becomes U+FFFD."""
        known = len(self.bytes)
        return b"".join(self.bytes[i] for i in ids if i < known).decode("utf-8", "replace")

    def spelled(self, token: int) -> bytes:
        """The bytes of a token, of a control token its name; none of one that only the model has:
        embeddings may have more rows than there are tokens."""
        known = self.bytes[token] if token < len(self.bytes) else b""
        return known or self.name(token).encode()

    def save(self, path: Path) -> None:
        """Writes a tokenizer.json."""
        self._tokenizer.save(str(path))

    @property
    def backend(self) -> HfTokenizer:
        """The tokenizers library's object."""
        return self._tokenizer

    def name(self, token: int) -> str:
        """The token as the vocabulary spells it."""
        return self._names.get(token, "")


def json_of(tokenizer: HfTokenizer) -> dict[str, Any]:
    """The sections of a tokenizer's JSON that describe decoding."""
    return {
        "decoder": json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else None,
        "pre_tokenizer": json.loads(tokenizer.pre_tokenizer.__getstate__())
        if tokenizer.pre_tokenizer
        else None,
    }


def _as_ids(value: Any, size: int) -> set[int]:
    values = value if isinstance(value, list) else [value]
    return {v for v in values if isinstance(v, int) and not isinstance(v, bool) and 0 <= v < size}


def _from_gguf(checkpoint: Checkpoint) -> Tokenizer:
    m = checkpoint.metadata
    tokenizer, control = _from_library("the vocabulary", lambda: gguf_vocabulary.build(m))
    size = len(m["tokenizer.ggml.tokens"])
    bos = _as_ids(m.get("tokenizer.ggml.bos_token_id"), size)
    eos: set[int] = set()
    for key in ("eos", "eot", "eom"):
        eos |= _as_ids(m.get(f"tokenizer.ggml.{key}_token_id"), size)
    names = m["tokenizer.ggml.tokens"]
    eos |= {i for i in control if names[i] in TURN_ENDS}
    end = min(_as_ids(m.get("tokenizer.ggml.eos_token_id"), size), default=None)
    special = SpecialIds(
        min(bos, default=None),
        frozenset(eos),
        end,
        gguf_vocabulary.adds_bos(m),
        frozenset(control),
    )
    return Tokenizer(tokenizer, special)


def _adds_bos(tokenizer: HfTokenizer, bos: int | None) -> bool:
    ids = _encode(tokenizer, "a", add_special_tokens=True).ids
    return bos is not None and ids[:1] == [bos]


def _named_token(config: dict[str, Any], key: str) -> str | None:
    value = config.get(key)
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def _from_library(what: str, call: Callable[[], Made]) -> Made:
    """Calls the tokenizers library, whose errors are bare Exceptions and whose panics are not even
    those. Raises CheckpointError for either."""
    try:
        return call()
    except (OctavoError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as e:
        raise CheckpointError(f"{what}: {' '.join(str(e).split())[:160]}") from None


def _encode(
    tokenizer: HfTokenizer, text: str, second: str | None = None, add_special_tokens: bool = False
) -> Encoding:
    def call() -> Encoding:
        # Unlike `encode`, which lets no other thread run: 7 seconds for 8 MiB.
        given = text if second is None else (text, second)
        (encoding,) = tokenizer.encode_batch_fast([given], add_special_tokens=add_special_tokens)
        return encoding

    return _from_library("the tokenizer cannot encode this text", call)


def _read_tokenizer(path: Path | MemoryFile) -> HfTokenizer:
    data = read_file(path, MAX_FILE)
    check_size(data, path.name)
    tokenizer = _from_library(f"{path.name} cannot be read", lambda: HfTokenizer.from_buffer(data))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if isinstance(tokenizer.model, BPE):
        tokenizer.model.dropout = None  # the same text has the same ids
    return tokenizer


def _from_folder(checkpoint: Checkpoint) -> Tokenizer:
    path = checkpoint.files.get("tokenizer.json")
    if path is None:
        raise CheckpointError(f"{checkpoint.path.name} has no tokenizer.json")
    tokenizer = _read_tokenizer(path)
    config = (
        read_json(checkpoint.files["tokenizer_config.json"])
        if "tokenizer_config.json" in checkpoint.files
        else {}
    )
    control = {i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special}
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    name = _named_token(config, "bos_token")
    bos = tokenizer.token_to_id(name) if name else None
    eos = _as_ids(checkpoint.metadata.get("eos_token_id"), size)
    if "generation_config.json" in checkpoint.files:
        eos |= _as_ids(
            read_json(checkpoint.files["generation_config.json"]).get("eos_token_id"), size
        )
    for token in (*TURN_ENDS, _named_token(config, "eos_token")):
        if token and (i := tokenizer.token_to_id(token)) is not None:
            eos.add(i)
    control |= eos
    add_bos = _adds_bos(tokenizer, bos)
    last = _named_token(config, "eos_token")
    end = tokenizer.token_to_id(last) if last else min(eos, default=None)
    special = SpecialIds(bos, frozenset(eos), end, add_bos, frozenset(control))
    return Tokenizer(tokenizer, special)


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer of a checkpoint. Raises CheckpointError or Unsupported."""
    return _from_gguf(checkpoint) if checkpoint.format == "gguf" else _from_folder(checkpoint)
