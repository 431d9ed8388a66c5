"""Files in YAML, of which JSON is a part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from octavo.errors import UsageError


def parse_yaml(text: str | bytes) -> Any:
    """What a text says. Raises UsageError, with the line of what is wrong."""
    import yaml  # not before there is such a text

    try:
        return yaml.SafeLoader(text).get_single_data()
    except yaml.MarkedYAMLError as e:
        line = "" if e.problem_mark is None else f", line {e.problem_mark.line + 1}"
        raise UsageError(f"it is no YAML: {e.problem}{line}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as e:  # ValueError: of days there are not
        raise UsageError(f"it is no YAML: {e}") from None


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
