"""What images cost: preparing them, encoding them, and the way to the first token.

    python benchmarks/vision.py preprocessing
    python benchmarks/vision.py encoder --threads 2 [--llama-cpp PYTHON]
    python benchmarks/vision.py first-token --threads 2
    python benchmarks/vision.py answers --llama-cpp PYTHON

By turns in one process: octavo, then transformers (its processors with Pillow, its models with torch
in bf16), and again; medians, and the median of each turn's ratio. Preparing is counted in time of its
thread, so that others on the machine disturb it little. The encoder has the shape of
CLIP-L/14-336 and random weights. Needs torch and transformers; for llama.cpp, a Python that has
llama-cpp-python, whose turns are in a process of its own.
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import click
import numpy as np
from peers import llava_in_llama_cpp
from PIL import Image

import octavo
from octavo import _native
from octavo.backends.base import BLOCK, Span, StepInput
from octavo.engine.encoder import ImageEncoder
from octavo.engine.loader import load_executable
from octavo.engine.open import open_model
from octavo.engine.plan import make_plan
from octavo.models.vision import VisionModel
from octavo.vision.decode import decode_image
from octavo.vision.image import ImageInput
from octavo.vision.llava import LlavaPreprocessor
from octavo.vision.normalize import Normalization, processor_settings
from octavo.vision.resize import Framing

SIDE, PATCH, TOKENS = 336, 14, 576
SIZES = ((336, 336), (640, 480), (1280, 720), (1920, 1080), (3000, 2000))
TOWER = {
    "model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096,
    "num_attention_heads": 16, "image_size": SIDE, "patch_size": PATCH, "projection_dim": 768,
}  # fmt: skip
# SmolLM2-135M's shape: a language model small enough to leave the encoder most of the time.
TEXT = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
    "tie_word_embeddings": True, "max_position_embeddings": 2048,
}  # fmt: skip
IMAGE_TOKEN = 3  # as in the vocabulary that is borrowed from the model that ships with octavo
TOKENIZER = Path(octavo.__file__).parent / "assets" / "tiny_vlm"
SHIPPED_SIDE = 96  # of the pictures that its model sees
PROMPT = 32  # tokens of text beside the image


def picture(width: int, height: int) -> Image.Image:
    """Noise over a gradient, as a photograph has."""
    rng = np.random.default_rng(width)
    slope = np.linspace(0, 200, width, dtype=np.float32)[None, :, None]
    return Image.fromarray((slope + rng.integers(0, 55, (height, width, 3))).astype(np.uint8))


def by_turns(
    rounds: int, *runs: Callable[[], object], clock: Callable[[], float] = time.perf_counter
) -> list[list[float]]:
    """Milliseconds of each, one after the other, `rounds` times after one that does not count."""
    out: list[list[float]] = [[] for _ in runs]
    for turn in range(rounds + 1):
        for times, run in zip(out, runs, strict=True):
            began = clock()
            run()
            if turn:
                times.append(1e3 * (clock() - began))
    return out


def ratio(ours: list[float], theirs: list[float]) -> float:
    return median(b / a for a, b in zip(ours, theirs, strict=True))


def save(folder: Path, layers: int, text: dict[str, Any]) -> Any:
    """A LLaVA folder with random weights in bf16; the same model in torch."""
    import torch
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    torch.manual_seed(1)
    config = LlavaConfig(
        vision_config=TOWER | {"num_hidden_layers": layers}, text_config=text,
        image_token_index=IMAGE_TOKEN, image_seq_length=TOKENS,
    )  # fmt: skip
    model = LlavaForConditionalGeneration._from_config(config, dtype=torch.bfloat16).eval()
    model.save_pretrained(folder)
    settings = {
        "image_mean": [0.48145466, 0.4578275, 0.40821073], "do_normalize": True,
        "image_std": [0.26862954, 0.26130258, 0.27577711], "do_rescale": True,
        "rescale_factor": 1 / 255, "size": {"shortest_edge": SIDE}, "crop_size": SIDE,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return model


def preprocessor(vision: VisionModel, settings: Any) -> LlavaPreprocessor:
    return LlavaPreprocessor("<image>", IMAGE_TOKEN, vision.tokens, Framing.of(settings))


def load(path: Path, threads: int, dtype: str) -> tuple[ImageEncoder, Any]:
    opened = open_model(path, vision_dtype=dtype)
    assert opened.encoder is not None
    return opened.encoder.load(opened.checkpoint, threads, lambda _: None), opened


@click.group()
def main() -> None:
    """Ratios above 1: octavo is faster."""


@main.command()
@click.option("--rounds", default=15, show_default=True)
def preprocessing(rounds: int) -> None:
    """From a picture in RGB to the encoder's rows, beside transformers' CLIP processor (with Pillow,
    whose pixels ours equal by ==), which leaves cutting rows out of its pixels to its model."""
    from transformers import CLIPImageProcessorPil

    theirs = CLIPImageProcessorPil(
        size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}
    )
    settings, side = theirs.to_dict(), SIDE // PATCH
    framing, normalization = Framing.of(settings), Normalization.of(settings, "")
    row, column = np.ogrid[:side, :side]
    first = ((row * SIDE + column) * PATCH).astype(np.int32).ravel()

    def ours(image: Image.Image) -> np.ndarray:
        made = framing.tile(image, TOKENS, "image")
        return normalization.patches(made.array, first, PATCH)

    click.echo("picture        octavo ms  transformers ms  ratio")
    for size in SIZES:
        image = picture(*size)
        wanted = theirs(image, return_tensors="np")["pixel_values"][0]
        found = ours(image).reshape(side, side, 3, PATCH, PATCH).transpose(2, 0, 3, 1, 4)
        assert np.array_equal(found.reshape(wanted.shape), wanted)
        a, b = by_turns(
            rounds, partial(ours, image), partial(theirs, image, return_tensors="np"),
            clock=time.thread_time,
        )  # fmt: skip
        width, height = size
        name = f"{width} x {height}"
        click.echo(f"{name:13} {median(a):10.2f} {median(b):16.2f} {ratio(a, b):6.2f}")


@main.command()
@click.option("--threads", default=2, show_default=True)
@click.option("--layers", default=24, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--llama-cpp", metavar="PYTHON", help="Beside llama-cpp-python, too.")
def encoder(threads: int, layers: int, rounds: int, llama_cpp: str | None) -> None:
    """CLIP-L/14-336 with its projector, beside transformers and torch in bf16."""
    import torch

    torch.set_num_threads(threads)
    small = TEXT | {"num_hidden_layers": 1, "vocab_size": vocabulary()}
    with TemporaryDirectory() as name, ExitStack() as peers:
        folder = Path(name) / "folder"
        model = save(folder, layers, small)
        others = [peers.enter_context(peer(llama_cpp, folder, threads))] if llama_cpp else []
        ours = {dtype: load(folder, threads, dtype)[0] for dtype in ("auto", "int8")}
        for each in ours.values():
            while each.pack_pending():
                pass
        vision = ours["auto"].vision
        pixels = np.random.default_rng(1).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
        given = ImageInput.of(pixels[None], (SIDE, SIDE), TOKENS)
        values = vision.normalization.table[np.arange(3), pixels].transpose(2, 0, 1)
        tensor = torch.from_numpy(np.ascontiguousarray(values))[None].bfloat16()

        def run(each: ImageEncoder) -> np.ndarray:
            each.begin([given])
            (found,) = each.run(3600.0) or []
            return found

        def theirs() -> torch.Tensor:
            with torch.inference_mode():
                return model.get_image_features(pixel_values=tensor).pooler_output[0]

        runs = [partial(run, each) for each in ours.values()]
        *mine, torchs = by_turns(rounds, *runs, *others, theirs)
        wide = model.float()
        with torch.inference_mode():
            exact = wide.get_image_features(pixel_values=tensor.float()).pooler_output[0].numpy()
        half = theirs_error(model, tensor, exact)
        errors = [relative(run(each), exact) for each in ours.values()]
    click.echo(f"{_native.isas()[0]}, {threads} threads, {layers} layers")
    click.echo(f"torch bf16    {median(torchs):8.1f} ms an image, error {half:.1e}")
    llama = mine.pop() if others else []
    if llama:
        click.echo(f"llama.cpp     {median(llama):8.1f} ms an image")
    for dtype, error, each in zip(ours, errors, mine, strict=True):
        beside = f", {ratio(each, llama):.2f} to llama.cpp" if llama else ""
        click.echo(
            f"octavo {dtype:6} {median(each):8.1f} ms an image, error {error:.1e}, "
            f"ratio {ratio(each, torchs):.2f}{beside}"
        )


def vocabulary() -> int:
    return int(json.loads((TOKENIZER / "config.json").read_text())["text_config"]["vocab_size"])


@contextmanager
def peer(python: str, folder: Path, threads: int) -> Iterator[Callable[[], object]]:
    """What encodes a picture by llama.cpp, from the folder as a GGUF file with its mmproj."""
    for file in TOKENIZER.glob("*token*"):
        shutil.copy(file, folder)
    model = folder.parent / "clip.gguf"
    convert(folder, model)
    script = Path(__file__).parent / "peers" / "llama_cpp_vision.py"
    command = [python, script, model, model.with_name("mmproj-clip.gguf"), str(threads)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as p:
        assert p.stdin is not None and p.stdout is not None
        ask, told = p.stdin, p.stdout

        def encode() -> None:
            ask.write("\n")
            ask.flush()
            if told.readline() != "done\n":
                raise SystemExit("llama.cpp's process has ended")

        yield encode


def convert(folder: Path, model: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "octavo.cli.main", "convert", folder, "--output", model],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip


def relative(found: np.ndarray, exact: np.ndarray) -> float:
    """The root of the mean squared difference, as a share."""
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


def theirs_error(model: Any, tensor: Any, exact: np.ndarray) -> float:
    import torch

    with torch.inference_mode():
        found = model.bfloat16().get_image_features(pixel_values=tensor).pooler_output[0]
    return relative(found.float().numpy(), exact)


@main.command()
@click.option("--questions", default=60, show_default=True)
@click.option("--llama-cpp", metavar="PYTHON", required=True)
def answers(questions: int, llama_cpp: str) -> None:
    """Greedy answers of the model that ships with octavo, as GGUF with its mmproj, beside
    llama.cpp's: about pictures as they are, which both frame, and about the same in the encoder's
    size, which neither does. Then with what llama.cpp does otherwise done here, too: pictures are
    framed as there, and the class token lies behind the patches."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "tiny_vlm"))
    from scenes import held_out

    asked = [(decode_image(file, "image"), text) for file, text, _ in held_out(questions)]
    framed = [(llava_in_llama_cpp.square(image, SHIPPED_SIDE), text) for image, text in asked]
    small = [(image.resize((SHIPPED_SIDE, SHIPPED_SIDE)), text) for image, text in asked]
    with TemporaryDirectory() as name:
        model, behind = Path(name) / "m.gguf", Path(name) / "behind"
        convert(TOKENIZER, model)
        encoder = model.with_name("mmproj-m.gguf")
        theirs, theirs_small = (told(llama_cpp, model, encoder, each) for each in (asked, small))
        llava_in_llama_cpp.roll_positions(TOKENIZER, behind)
        llm = octavo.LLM(str(model), mmproj=str(encoder), threads=1)
        rolled = octavo.LLM(str(behind), threads=1)
        as_theirs = patch.object(
            VisionModel, "_merged", lambda _, states: llava_in_llama_cpp.kept(states)
        )
        for what, given, wanted, own in (
            ("as they are", asked, theirs, llm),
            ("framed as by llama.cpp", framed, theirs, llm),
            ("framed as by llama.cpp, class token behind", framed, theirs, rolled),
            (f"{SHIPPED_SIDE} x {SHIPPED_SIDE}", small, theirs_small, llm),
            (f"{SHIPPED_SIDE} x {SHIPPED_SIDE}, class token behind", small, theirs_small, rolled),
        ):  # fmt: skip
            with as_theirs if own is rolled else nullcontext():
                mine = [said(own, *each) for each in given]
            equal = sum(a == b for a, b in zip(mine, wanted, strict=True))
            click.echo(f"pictures {what}: {equal} of {questions} answers equal")


def told(python: str, model: Path, encoder: Path, asked: list[tuple[Image.Image, str]]) -> list:
    """llama.cpp's answers."""
    lines = [
        json.dumps({
            "prompt": f"<s>USER: <__media__>\n{question}\nASSISTANT:\n", "most": 12,
            "pixels": b64encode(image.tobytes()).decode(), "size": [image.height, image.width],
        })
        for image, question in asked
    ]  # fmt: skip
    script = Path(__file__).parent / "peers" / "llama_cpp_answers.py"
    found = subprocess.run(
        [python, script, model, encoder, "1"], input="\n".join(lines), text=True,
        stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    return [json.loads(line) for line in found.stdout.splitlines()]


def said(llm: octavo.LLM, image: Image.Image, question: str) -> list[int]:
    """The tokens of an answer, the one that ends it left out."""
    content = [{"type": "image", "image": image}, {"type": "text", "text": question}]
    params = octavo.SamplingParams(temperature=0, max_tokens=12)
    (answer,) = llm.chat([{"role": "user", "content": content}], params)
    return [t for t in answer.tokens if t != 1]  # </s>


@main.command("first-token")
@click.option("--threads", default=2, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--vision-dtype", default="auto", show_default=True)
def first_token(threads: int, rounds: int, vision_dtype: str) -> None:
    """Where the time of a request with a 336 x 336 PNG goes, with SmolLM2-135M's shape behind it."""
    file = io.BytesIO()
    picture(SIDE, SIDE).save(file, "PNG")
    with TemporaryDirectory() as name:
        folder = Path(name)
        save(folder, 24, TEXT)
        images, opened = load(folder, threads, vision_dtype)
        plan = make_plan(opened.compiled, name="m", threads=threads, context=1024)
        executable = load_executable(opened, plan)
        while images.pack_pending() or executable.pack_pending():
            pass
        read = preprocessor(images.vision, processor_settings(opened.checkpoint))
        spent: dict[str, list[tuple[float, float]]] = {}

        def timed(what: str, run: Callable[..., Any], *given: Any) -> Any:
            began, used = time.perf_counter(), time.process_time()
            result = run(*given)
            took = (time.perf_counter() - began, time.process_time() - used)
            spent.setdefault(what, []).append((1e3 * took[0], 1e3 * took[1]))
            return result

        for _ in range(rounds + 1):
            image = timed("decode (Pillow)", decode_image, file.getvalue(), "image")
            (made,) = timed("resize, crop, hash", read, image, "auto", "image").images
            timed("normalise, cut into patches", images.begin, [made])
            (rows,) = timed("encoder and projector", images.run, 3600.0)
            step = _prefill(np.asarray(rows))
            for at, part in enumerate(step):
                timed(f"prefill, step {at + 1}", executable.step, part)
    counted = {w: [median(t) for t in zip(*times[1:], strict=True)] for w, times in spent.items()}
    whole = [sum(each) for each in zip(*counted.values(), strict=True)]
    click.echo(f"{_native.isas()[0]}, {threads} threads, encoder as {vision_dtype}")
    for what, (ms, cpu) in [*counted.items(), ("sum", whole)]:
        share = 100 * cpu / whole[1]
        click.echo(f"{what:30} {ms:8.2f} ms, of a processor {cpu:8.2f} ms {share:5.1f} %")


def _prefill(rows: np.ndarray) -> list[StepInput]:
    """The prompt's steps, of at most 512 tokens: the image first, then text."""
    n = len(rows) + PROMPT
    steps = []
    for first in range(0, n, 512):
        count = min(512, n - first)
        seen = rows[first : first + count]
        blocks = np.arange(-(-n // BLOCK), dtype=np.int32)
        at = np.arange(count, dtype=np.int32)
        steps.append(
            StepInput(
                np.full(count, IMAGE_TOKEN, np.int32), at + np.int32(first),
                [Span(0, count, first, 0)], blocks, np.array([count - 1], np.int32),
                embeddings=np.ascontiguousarray(seen) if len(seen) else None,
                embedding_rows=np.arange(len(seen), dtype=np.int32) if len(seen) else None,
            )
        )  # fmt: skip
    return steps


if __name__ == "__main__":
    main()
