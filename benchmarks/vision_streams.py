"""What text streams feel of requests with images that come at once.

    python benchmarks/vision_streams.py [MODEL] [--images 16] [--streams 2] [--rounds 3] [-- OPTION ...]

Without MODEL: CLIP-L/14-336 before a language model of SmolLM2-135M's shape, random weights in bf16.
Options behind `--` are those of `octavo serve`. Needs torch and transformers, and httpx.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import shutil
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from fairness import Felt, User, free_port, octavo
from vision import SIDE, TEXT, TOKENIZER, picture, save, vocabulary

PROMPT, TOKENS = 20, 150  # of a stream


def random_model(folder: Path) -> str:
    """A LLaVA folder that can be served."""
    save(folder, 24, TEXT | {"vocab_size": vocabulary()})
    for file in [*TOKENIZER.glob("*token*"), *TOKENIZER.glob("*template*")]:
        shutil.copy(file, folder)
    return str(folder)


def question(model: str, number: int) -> dict[str, Any]:
    """About a picture that no other question shows."""
    file = io.BytesIO()
    picture(SIDE, SIDE).rotate(number).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    content = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "What is this?"},
    ]
    return {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 1}


async def measured(port: int, model: str, images: int, streams: int, rounds: int) -> str:
    users = [User(port, "none", model, seed) for seed in range(streams)]
    quiet, crowded, took = Felt(), Felt(), []

    async def texts() -> list[list[float]]:
        return await asyncio.gather(*(u.ask(PROMPT, TOKENS, stream=True) for u in users))

    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=600) as client:

        async def ask(number: int) -> None:
            reply = await client.post("/v1/chat/completions", json=question(model, number))
            assert reply.status_code == 200, reply.text

        await texts()
        for turn in range(rounds):
            for times in await texts():
                quiet.add(times)
            began = time.perf_counter()
            asked = asyncio.gather(*(ask(turn * images + i) for i in range(images)))
            while not asked.done():
                for times in await texts():
                    crowded.add([0.0, *times[1:]])
            await asked
            took.append(time.perf_counter() - began)
    felt = crowded.against(quiet).partition("; ")[2]
    return f"{felt}; {images} images in {min(took):.1f} to {max(took):.1f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)  # fmt: skip
    parser.add_argument("model", nargs="?")
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--streams", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("options", nargs="*")
    given = parser.parse_args()
    port = free_port()
    with TemporaryDirectory() as name, ExitStack() as stack:
        model = given.model or random_model(Path(name) / "llava")
        command = octavo("serve", model, "--name", "m", "--port", str(port), "--log-level", "error")
        server = subprocess.Popen([*command, *given.options], stdout=subprocess.DEVNULL)
        stack.callback(server.wait, 60)
        stack.callback(server.terminate)
        while True:
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health/ready").status_code == 200:
                    break
            except httpx.ConnectError:
                assert server.poll() is None, "the server has ended"
            time.sleep(0.2)
        print(asyncio.run(measured(port, "m", given.images, given.streams, given.rounds)))


if __name__ == "__main__":
    main()
