"""Files in YAML, of which JSON is a part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from octavo.errors import UsageError


def parse_yaml(text: str | bytes) -> Any:
    """What a text says. Raises UsageError, with the line of what is wrong: a key that is there
    twice, too, of which one would be lost."""
    import yaml  # not before there is such a text

    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        _check_keys(node)
        return None if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as e:
        line = "" if e.problem_mark is None else f", line {e.problem_mark.line + 1}"
        raise UsageError(f"it is no YAML: {e.problem}{line}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as e:  # ValueError: of days there are not
        raise UsageError(f"it is no YAML: {e}") from None


def _check_keys(root: Any) -> None:
    """Raises UsageError if a mapping in a node has a key twice."""
    unread, seen = [root], set[int]()
    while unread:
        node = unread.pop()
        if node is None or isinstance(node.value, str) or id(node) in seen:
            continue
        seen.add(id(node))  # others may refer to it, and it to itself
        keys = set[tuple[str, str]]()
        for part in node.value:
            if not isinstance(part, tuple):
                unread.append(part)
                continue
            key, _ = part
            unread += part
            if not isinstance(key.value, str) or key.tag.endswith(":merge"):
                continue
            if (key.tag, key.value) in keys:
                line = key.start_mark.line + 1
                raise UsageError(f"line {line} has the key {key.value[:64]!r} once more")
            keys.add((key.tag, key.value))


def read_yaml(file: Path) -> Any:
    """What a file says. Raises UsageError, which names it."""
    with reading(str(file)):
        return parse_yaml(file.read_bytes())


@contextmanager
def reading(name: str) -> Iterator[None]:
    """A context in which a file is read: raises UsageError with its name for what is wrong."""
    try:
        yield
    except OSError as e:
        raise UsageError(f"{name} cannot be read: {e.strerror}") from None
    except UsageError as e:
        raise UsageError(f"{name}: {e}") from None
