"""From starting `octavo serve` to the first streamed token, with the model in the cache.

python benchmarks/startup.py [MODEL] [--runs 5]
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def first_token(model: str, python: str = sys.executable) -> float:
    """Seconds; asks again every 10 ms until the server of `python`'s octavo answers."""
    port = free_port()
    began = time.perf_counter()
    command = [python, "-m", "octavo.cli.main", "serve", model, "--offline", "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    body = {"model": model, "prompt": "The capital of France is", "max_tokens": 1, "stream": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode()
    )
    try:
        while process.poll() is None:
            try:
                with urllib.request.urlopen(request, timeout=30) as response:
                    assert response.readline().startswith(b"data: {")
                    return time.perf_counter() - began
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.01)
        raise RuntimeError("the server ended")
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--runs", type=int, default=5)
    a = parser.parse_args()
    times = [first_token(a.model) for _ in range(a.runs)]
    print(
        f"{statistics.median(times):.2f} s to the first token (median of {a.runs}: {min(times):.2f} to {max(times):.2f})"
    )


if __name__ == "__main__":
    main()
