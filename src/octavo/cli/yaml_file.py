"""Files of commands in YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from octavo.errors import UsageError


def read_yaml(file: Path) -> Any:
    """What a file in YAML says. Raises UsageError."""
    import yaml

    try:
        return yaml.SafeLoader(file.read_bytes()).get_single_data()
    except (yaml.YAMLError, ValueError, OSError) as e:  # ValueError: of days that there are not
        raise UsageError(f"{file} is no YAML: {e}", "octavo release start --help") from None
