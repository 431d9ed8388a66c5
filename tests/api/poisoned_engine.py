"""An engine process that dies of certain requests, as one with a fault in its native code would.

`POISON=WAY:TOKENS`: WAY is a signal's number, `raise` or `hang`; TOKENS is how many tokens a poisoned request is given.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from octavo.client.engine_process import main
from octavo.engine import engine
from octavo.engine.scheduler import ScheduledSpan

POISON = [11, 12, 13]  # what the prompt of such a request begins with


def poisoned(compute: Callable[..., Any]) -> Callable[..., Any]:
    way, tokens = os.environ["POISON"].split(":")

    def inner(executable: object, spans: list[ScheduledSpan], *rest: Any) -> Any:
        out = compute(executable, spans, *rest)
        deadly = [o for o in out if o.span.sequence.kv.tokens[:3] == POISON]
        if any(o.span.sequence.sampling.generated + len(o.tokens) > int(tokens) for o in deadly):
            if way == "raise":
                raise RuntimeError("this sequence cannot be computed")
            if way != "hang":
                os.kill(os.getpid(), int(way))
            time.sleep(600)
        return out

    return inner


if __name__ == "__main__":
    signal.signal(signal.SIGABRT, signal.SIG_DFL)
    engine.run, engine.decode = poisoned(engine.run), poisoned(engine.decode)
    main()
