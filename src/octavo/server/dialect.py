"""What a dialect of the API consists of. A dialect translates; it runs nothing."""

from __future__ import annotations

from collections.abc import Callable

from octavo.errors import RequestError

ErrorBody = Callable[[RequestError], bytes]  # the JSON of an error response
