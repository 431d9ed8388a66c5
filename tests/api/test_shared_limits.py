"""Two real servers that count the limits of a key in one place."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from gguf import GGMLQuantizationType

from octavo.server.keys import Key, KeyLimits, KeyStore
from tests.api.server import free_port, serving
from tests.small_models import Small, save_gguf
from tests.unit.test_shared_limits import counter


def test_two_servers_are_one_to_a_key(tmp_path: Path) -> None:
    """Ten requests a minute and 1,500 tokens, to 2 %, are for both together."""
    save_gguf(Small(), tmp_path / "m.gguf", GGMLQuantizationType.Q8_0)
    file = KeyStore(str(tmp_path / "keys.db"))
    few = {"Authorization": "Bearer " + file.create(Key("few", limits=KeyLimits(10)))}
    little = file.create(Key("little", limits=KeyLimits(tokens_per_minute=1500)))
    little = {"Authorization": "Bearer " + little}
    process = counter(port := free_port())
    options = [
        "--keys",
        str(tmp_path / "keys.db"),
        "--limits-url",
        f"redis://127.0.0.1:{port}",
        "--memory",
        "150MiB",
    ]
    body = {"model": "m", "prompt": [5, 6, 7, 8], "max_tokens": 6, "ignore_eos": True}
    try:
        with (
            serving(str(tmp_path / "m.gguf"), *options, log=tmp_path / "one") as one,
            serving(str(tmp_path / "m.gguf"), *options, log=tmp_path / "two") as two,
        ):
            got = [s.post("/v1/completions", body, few)[0] for s in (one, two) * 8]
            assert got == [200] * 10 + [429] * 6
            spent = 0
            for number in range(30):
                for server in (one, two):
                    asked = body | {
                        "prompt": [number, *([server.port % 200] * 9)],
                        "max_tokens": 20,
                    }
                    status, reply = server.post("/v1/completions", asked, little)
                    if status == 200:
                        usage = reply["usage"]
                        spent += (
                            usage["total_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
                        )
            assert 0.98 * 1500 <= spent <= 1500
    finally:
        process.terminate()
        process.communicate()
    assert "limits are not shared" not in (tmp_path / "one").read_text()


def test_limits_are_those_of_keys() -> None:
    command = [sys.executable, "-m", "octavo.cli.main", "serve", "m", "--limits-url", "valkey://h"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "--keys FILE" in done.stderr
