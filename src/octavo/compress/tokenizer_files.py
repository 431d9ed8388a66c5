"""The vocabulary of a GGUF file as the files that transformers reads beside a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as HfTokenizer

from octavo.checkpoint.base import Checkpoint
from octavo.checkpoint.files import MemoryFile
from octavo.checkpoint.sampling import FILE, read_sampling
from octavo.text import gguf_vocabulary
from octavo.text.chat import template_source
from octavo.text.tokenizer import SpecialIds, load_tokenizer

UNLIMITED = int(1e30)  # what transformers writes for a tokenizer without a limit
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def token_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    """The special tokens that a GGUF file names, by the names of config.json: bos_token_id, ..."""
    size = len(metadata.get("tokenizer.ggml.tokens", ()))
    found = {k: metadata.get(f"tokenizer.ggml.{own}_token_id") for k, own in _NAMED.items()}
    return {f"{k}_id": i for k, i in found.items() if isinstance(i, int) and 0 <= i < size}


def tokenizer_files(checkpoint: Checkpoint) -> dict[str, MemoryFile]:
    """tokenizer.json, tokenizer_config.json (with the chat template) and generation_config.json of
    a GGUF file, made when they are read. Empty for a file without a vocabulary."""
    if "tokenizer.ggml.tokens" not in checkpoint.metadata:
        return {}

    @cache
    def special() -> SpecialIds:
        return load_tokenizer(checkpoint).special

    makers = {
        "tokenizer.json": lambda: _tokenizer(checkpoint.metadata, special()).to_str().encode(),
        "tokenizer_config.json": lambda: _json(_settings(checkpoint)),
        FILE: lambda: _json(_generation(checkpoint, special())),
    }
    return {name: MemoryFile(name, make) for name, make in makers.items()}


def _json(value: object) -> bytes:
    return json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n"


def _tokenizer(metadata: Mapping[str, Any], special: SpecialIds) -> HfTokenizer:
    """With control tokens that are recognised in text, as transformers does, and the bos token that
    plain prompts begin with."""
    tokenizer, control = gguf_vocabulary.build(metadata)
    tokens = metadata["tokenizer.ggml.tokens"]
    tokenizer.add_special_tokens([AddedToken(tokens[i], normalized=False) for i in control])
    if special.add_bos and special.bos is not None:
        name = tokens[special.bos]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[name, "$A"], pair=[name, "$A", f"{name}:1", "$B:1"],
            special_tokens=[(name, special.bos)],
        )  # fmt: skip
    return tokenizer


def _settings(checkpoint: Checkpoint) -> dict[str, Any]:
    tokens = checkpoint.metadata["tokenizer.ggml.tokens"]
    ids = token_ids(checkpoint.metadata)
    out: dict[str, Any] = {
        # The class that takes tokenizer.json as it is, in transformers 4 and 5.
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": UNLIMITED,
        "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    out |= {k.removesuffix("_id"): tokens[i] for k, i in ids.items()}
    template = template_source(checkpoint)
    return out | ({"chat_template": template} if template is not None else {})


def _generation(checkpoint: Checkpoint, special: SpecialIds) -> dict[str, Any]:
    ids: dict[str, Any] = token_ids(checkpoint.metadata)
    ids.pop("unk_token_id", None)
    ends = sorted(special.eos)
    if ends:
        ids["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    return ids | read_sampling(checkpoint)
