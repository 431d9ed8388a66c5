"""`octavo serve --device cuda` with random weights on disk: start, first tokens, tokens a second.

    python benchmarks/gpu_serve.py llama-1b [--streams 64] [--prompt 1024] [--output 128]

The folder is written once and read from memory then. The server is started twice: kernels are compiled
when they are first needed, so the second start finds them. Prints a JSON line for each thing found;
`same` says whether a request drew the same tokens alone and among all others.
"""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.gpu_model import SHAPES, Shape, checkpoint_of

Line = dict[str, Any]


def save_model(shape: Shape, folder: Path) -> None:
    """Writes a llama in bf16 and a tokenizer of its vocabulary."""
    found, tensors = checkpoint_of(shape, "bf16"), {}
    for name, tensor in found.tensors.items():
        made = torch.ones(tensor.shape, dtype=torch.bfloat16)
        tensors[name] = made if len(tensor.shape) == 1 else made.normal_(0, tensor.shape[1] ** -0.5)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = dict(found.metadata) | {"bos_token_id": 1, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config))
    letters = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    letters += [f"<{i}>" for i in range(shape.vocabulary - len(letters))]
    vocabulary = {letter: i for i, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


class Server:
    """A server that answers. ready: seconds from its start until it says so."""

    def __init__(self, port: int, ready: float) -> None:
        self.port, self.ready = port, ready

    def tokens(self, prompt: list[int], output: int) -> tuple[list[float], str]:
        """When each piece of an answer came, in seconds from the request, and the text."""
        body = {"prompt": prompt, "max_tokens": output, "temperature": 0, "ignore_eos": True}
        begin, times, text = time.perf_counter(), [], ""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        sent = json.dumps(body | {"stream": True})
        connection.request("POST", "/v1/completions", sent, {"Content-Type": "application/json"})
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                times.append(time.perf_counter() - begin)
                text += json.loads(line[6:])["choices"][0]["text"]
        connection.close()
        return times, text


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """`octavo serve` on a free port. Raises RuntimeError with what it printed if it ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", "from octavo.cli.main import main; main()"]
    command += ["serve", str(folder), "--device", "cuda", "--port", str(port), "--no-ui"]
    begin = time.perf_counter()
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as p,
    ):
        try:
            while not healthy(port):
                if p.poll() is not None:
                    log.seek(0)
                    raise RuntimeError(log.read()[-2000:])
                time.sleep(0.02)
            yield Server(port, time.perf_counter() - begin)
        finally:
            p.terminate()


def healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def together(server: Server, prompts: list[list[int]], output: int) -> tuple[Line, list[str]]:
    """All prompts at once: tokens a second while all of them decode, and the texts."""
    with ThreadPoolExecutor(len(prompts)) as threads:
        found = list(threads.map(lambda ids: server.tokens(ids, output), prompts))
    begin, end = max(t[0] for t, _ in found), min(t[-1] for t, _ in found)
    count = sum(begin < at <= end for times, _ in found for at in times)
    line = {"item": "streams", "streams": len(prompts), "last_first_token": begin}
    speed = count / (end - begin) if end > begin else None
    return line | {"tokens_per_second": speed}, [text for _, text in found]


def measured(folder: Path, shape: Shape, a: argparse.Namespace) -> Iterator[Line]:
    """Lines of two starts, of one stream, and of many."""
    made = torch.Generator().manual_seed(1)
    prompts = torch.randint(300, shape.vocabulary, (a.streams, a.prompt), generator=made).tolist()
    for start in (1, 2):
        with serving(folder) as server:
            first, _ = server.tokens(prompts[0][:8], 1)
            yield {"item": "start", "number": start, "ready": server.ready, "first_token": first[0]}
            if start == 1:
                continue
            server.tokens(prompts[0], a.output)  # compiles what is missing
            times, alone = server.tokens(prompts[1], a.output)
            gaps = [y - x for x, y in zip(times, times[1:], strict=False)]
            yield {"item": "stream", "first_token": times[0], "between": statistics.median(gaps)}
            together(server, prompts, a.output)
            line, texts = together(server, prompts, a.output)
            yield line | {"same": texts[1] == alone and bool(alone)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--output", type=int, default=128)
    a = parser.parse_args()
    if a.shape == "tiny":
        a.streams, a.prompt, a.output = 3, 40, 12
    with tempfile.TemporaryDirectory() as folder:
        save_model(SHAPES[a.shape], Path(folder))
        for line in measured(Path(folder), SHAPES[a.shape], a):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
