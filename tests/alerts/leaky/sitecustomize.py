"""Python imports this at its start: an engine, from when the file LEAK is there on, keeps 10 MB more each second."""

import os
import sys
import threading
import time


def leak(kept: list[bytearray]) -> None:
    while True:
        time.sleep(1)
        if os.path.exists(os.environ["LEAK"]):
            kept.append(bytearray(b"x" * 10_000_000))


if "octavo.client.engine_process" in sys.orig_argv:
    threading.Thread(target=leak, args=([],), daemon=True).start()
