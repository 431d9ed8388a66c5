"""JSON-Schema-Test-Suite (in jsonschema's source package): what is accepted is accepted rightly.

A schema that cannot be enforced is refused with a reason. Of the others, no invalid instance can be
written under the constraint, and what is written at random under it validates.
"""

from __future__ import annotations

import json
import random
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from octavo.checkpoint import open_checkpoint
from octavo.checkpoint.hub import cache_folder
from octavo.engine.constraint import Constraint, GrammarCompiler
from octavo.errors import RequestError
from octavo.generate.served import token_table
from octavo.text import Tokenizer, load_tokenizer
from octavo.text.grammar import from_schema
from tests.conftest import download

PACKAGE = "jsonschema-4.26.0"
# What these later drafts made of older rules; schemas are read as draft 2020-12 has them.
OLD = ("content.json", "$ref prevents a sibling $id from changing the base uri")


@pytest.fixture(scope="module")
def suite() -> Path:
    folder = cache_folder() / PACKAGE
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        download(folder.parent, "--no-binary", "jsonschema", PACKAGE.replace("-", "=="))
        archive = folder.parent / f"{PACKAGE}.tar.gz"
        with tarfile.open(archive) as tar:
            members = [m for m in tar.getmembers() if "/json/tests/" in m.name]
            tar.extractall(folder.parent, members, filter="data")
        archive.unlink()
    return folder / "json" / "tests"


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return load_tokenizer(open_checkpoint(smollm2))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(token_table(tokenizer), len(tokenizer.bytes))


def groups(suite: Path, draft: str) -> Iterator[tuple[str, Any]]:
    for path in sorted((suite / draft).rglob("*.json")):
        for group in json.loads(path.read_text()):
            if draft == "draft2020-12" or not (path.name in OLD or group["description"] in OLD):
                yield f"{path.name}: {group['description']}", group


def accepts(constraint: Constraint, ids: list[int], eos: int) -> bool:
    for token in ids:
        if not allowed(constraint, token):
            return False
        constraint.push(token)
    return constraint.finished or allowed(constraint, eos)


def allowed(constraint: Constraint, token: int) -> bool:
    return bool(constraint.mask()[token >> 5] >> (token & 31) & 1)


@pytest.mark.parametrize("draft", ["draft2020-12", "draft2019-09", "draft7", "draft6", "draft4"])
def test_no_false_accepts(
    suite: Path, draft: str, tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    (eos,) = tokenizer.special.eos
    kept = refused = right = 0
    wrong = []
    for name, group in groups(suite, draft):
        try:
            start = compiler.constraint(compiler.start(from_schema(group["schema"])))
        except RequestError as e:
            assert e.code == "invalid_grammar" and len(str(e)) > 20
            unknown = re.search(r'Unimplemented keys: \["([^"]+)"', str(e))
            text = json.dumps(group["schema"])  # a $ref may lead to a metaschema
            assert unknown is None or unknown.group(1) in text or "$ref" in text
            refused += 1
            continue
        kept += 1
        for case in group["tests"]:
            text = json.dumps(case["data"], ensure_ascii=False)
            if accepts(start.fork(), tokenizer.encode(text, add_bos=False), eos):
                right += case["valid"]
                wrong += [] if case["valid"] else [(name, case["description"], text)]
    print(f"{draft}: {kept} schemas kept, {refused} refused, {right} valid instances accepted")
    assert not wrong
    assert kept > 90 and right > 250


def write(start: Constraint, tokenizer: Tokenizer, rng: random.Random) -> str | None:
    """A text drawn at random from what the constraint allows, closing things half of the time."""
    closing = np.zeros(len(tokenizer.bytes), bool)
    for i, b in enumerate(tokenizer.bytes):
        closing[i] = b in (b'"', b"}", b"]", b'"}', b'"]', b"", b'",', b"]}", b"}}")
    out = b""
    for _ in range(80):
        if start.finished:
            return out.decode()
        mask = start.mask()
        legal = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(closing)].astype(bool)
        ends = legal & closing
        ids = np.flatnonzero(ends if ends.any() and rng.random() < 0.5 else legal)
        token = int(ids[rng.randrange(len(ids))])
        if token in tokenizer.special.eos:
            return out.decode()
        start.push(token)
        out += tokenizer.bytes[token]
    return None


def test_what_is_written_validates(
    suite: Path, tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    rng = random.Random(7)
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    written = 0
    for name, group in groups(suite, "draft2020-12"):
        schema = group["schema"]
        try:
            start = compiler.constraint(compiler.start(from_schema(schema)))
        except RequestError:
            continue
        validator = jsonschema.Draft202012Validator(
            True if schema is True else schema, format_checker=checker if "format" in name else None
        )
        for _ in range(4):
            text = write(start.fork(), tokenizer, rng)
            if text is not None:
                try:
                    valid = validator.is_valid(json.loads(text))
                except re.error:
                    break  # the validator's own regular expressions know no \\p
                written += 1
                assert valid, (name, schema, text)
    assert written > 300
