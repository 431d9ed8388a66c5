"""Asks a gateway that runs, as an admin."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from octavo.cli.http import HttpRefusal, NoAnswer, send
from octavo.cli.options import together
from octavo.cli.remote import admin_key_option, server_option
from octavo.errors import OctavoError, UsageError

WAIT = 30.0  # seconds for an answer


class GatewayRefused(OctavoError):
    """The gateway said no, and why."""


@dataclass(frozen=True)
class Gateway:
    """Where it is, and the key that lets one change it."""

    url: str
    key: str | None

    def ask(self, method: str, path: str, body: Any = None, seconds: float = WAIT) -> bytes:
        """What it answers. Raises Refused, UsageError."""
        data = None if body is None else msgspec.json.encode(body)
        try:
            return send(self.url.rstrip("/") + path, self.key, data, seconds, method)
        except HttpRefusal as e:
            raise GatewayRefused(e.message or f"the gateway answers {e.status}") from None
        except NoAnswer as e:
            raise UsageError(
                f"no gateway answers at {self.url}: {e}", "--server http://127.0.0.1:8080"
            ) from None

    def object(
        self, method: str, path: str, body: Any = None, seconds: float = WAIT
    ) -> dict[str, Any]:
        """The same, decoded."""
        try:
            return msgspec.json.decode(self.ask(method, path, body, seconds), type=dict[str, Any])
        except msgspec.MsgspecError:
            raise UsageError(
                f"{self.url} is no gateway: it answers {path} with no JSON object",
                "--server http://127.0.0.1:8080",
            ) from None


def read_yaml(file: Path) -> Any:
    """What a file in YAML says. Raises UsageError."""
    import yaml

    try:
        return yaml.SafeLoader(file.read_bytes()).get_single_data()
    except (yaml.YAMLError, ValueError, OSError) as e:  # ValueError: of days that there are not
        raise UsageError(f"{file} is no YAML: {e}", "octavo release start --help") from None


gateway_options = together(
    server_option(
        "Address of the gateway.", default="http://127.0.0.1:8080", show_default=True,
        envvar="OCTAVO_SERVER",
    ),
    admin_key_option,
)  # fmt: skip
