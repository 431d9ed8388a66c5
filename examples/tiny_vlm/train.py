"""Trains a small LLaVA on drawn scenes and writes it as a Hugging Face folder.

python train.py tiny_vlm/

The image encoder, the projector and the language model learn together, from nothing. Many questions
are asked about each image in one sequence: they see the image, and not each other.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import math
import os
import random
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from scenes import COLORS, KINDS, Scene, as_file, caption, draw, held_out, question, random_scene
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

SIDE, PATCH = 96, 16
GRID = SIDE // PATCH
VOCABULARY = 512
WIDTH = 128
ASKED = 8  # questions about an image
SEEING = 0.6  # of the steps teach the encoder alone, which is cheap
PROCESSES = 2  # each with a batch of its own
MEAN, STD = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
PLACES = 1 + len(KINDS) * len(COLORS) + 10  # what may be at a place: nothing, a shape, a digit

TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{{ 'ASSISTANT:\n' }}"
    "{% elif message['role'] == 'user' %}"
    "{{ 'USER: ' }}"
    "{% endif %}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] if part['type'] == 'image' %}{{ '<image>\n' }}{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}"
    "{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:\n' }}{% endif %}"
)


# -- tokens -----------------------------------------------------------------------------------


def make_processor(seed: int) -> LlavaProcessor:
    """A byte-level vocabulary learned from questions, and what makes pixels of images."""
    rng = random.Random(f"{seed} texts")
    texts = []
    for _ in range(4000):
        scene = random_scene(rng)
        asked = [question(rng, scene) for _ in range(4)] + [caption(rng, scene)]
        texts += [f"USER: {q}\nASSISTANT:\n{a}\n" for q, a in asked]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(t, special=True) for t in ("<s>", "</s>", "<pad>", "<image>")]
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY, special_tokens=special, show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )  # fmt: skip
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>",
        extra_special_tokens={"image_token": "<image>"},
    )  # fmt: skip
    size = {"height": SIDE, "width": SIDE}
    images = CLIPImageProcessorPil(
        size=size, crop_size=size, do_center_crop=False, image_mean=list(MEAN), image_std=list(STD)
    )
    return LlavaProcessor(
        images, fast, patch_size=PATCH, vision_feature_select_strategy="default",
        num_additional_image_tokens=1, chat_template=TEMPLATE,
    )  # fmt: skip


def make_model(processor: LlavaProcessor, seed: int) -> LlavaForConditionalGeneration:
    """The model before training."""
    torch.manual_seed(seed)
    ids = processor.tokenizer
    vision = CLIPVisionConfig(
        hidden_size=WIDTH, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        image_size=SIDE, patch_size=PATCH, projection_dim=WIDTH,
    )  # fmt: skip
    text = LlamaConfig(
        vocab_size=len(ids), hidden_size=WIDTH, intermediate_size=384, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=1024,
        bos_token_id=ids.bos_token_id, eos_token_id=ids.eos_token_id,
        pad_token_id=ids.pad_token_id, tie_word_embeddings=False,
    )  # fmt: skip
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=processor.image_token_id,
        vision_feature_layer=-1, image_seq_length=GRID * GRID, tie_word_embeddings=False,
    )  # fmt: skip
    return LlavaForConditionalGeneration(config)


# -- batches ----------------------------------------------------------------------------------


class Batches(Dataset[dict[str, torch.Tensor]]):
    """Batch i is the same whenever it is made. Each image is asked `ASKED` questions."""

    def __init__(self, processor: LlavaProcessor, seed: int, size: int, numbers: range) -> None:
        ids = processor.tokenizer
        self._tokenizer = ids
        self._bos, self._eos, self._pad = ids.bos_token_id, ids.eos_token_id, ids.pad_token_id
        self._image = [processor.image_token_id] * (GRID * GRID)
        self._seed, self._size, self._numbers = seed, size, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        torch.set_num_threads(1)
        rng = random.Random(f"{self._seed} batch {self._numbers[index]}")
        images, rows = [], []
        for _ in range(self._size):
            scene = random_scene(rng)
            seen = pixels(as_file(draw(scene, rng), rng))
            images.append((seen, *places(scene, seen)))
            asked = [question(rng, scene) for _ in range(ASKED - 1)] + [caption(rng, scene)]
            rng.shuffle(asked)
            rows.append(self.row(asked, turns=rng.random() < 0.2))
        seen, what, covered = (
            torch.from_numpy(np.stack(part)) for part in zip(*images, strict=True)
        )
        return {"pixels": seen, "places": what, "shown": covered, **self.stacked(rows)}

    def row(self, asked: list[tuple[str, str]], turns: bool) -> dict[str, list[int]]:
        """Tokens of questions and answers about one image.

        part: 0 for what comes before the questions, else the number of a question, which sees part
        0 and itself; as turns of one conversation they see all before.
        """
        opening = [self._bos, *self._encode("USER: "), *self._image, *self._encode("\n")]
        tokens, part = list(opening), [0] * len(opening)
        places, wanted = list(range(len(opening))), [-100] * len(opening)
        for number, (text, answer) in enumerate(asked[: 4 if turns else None], 1):
            again = self._encode("\nUSER: ") if turns and number > 1 else []
            said = [*again, *self._encode(text + "\nASSISTANT:\n")]
            answered = [*self._encode(answer), self._eos]
            begin = len(tokens) if turns else len(opening)
            tokens += said + answered
            part += [0 if turns else number] * (len(said) + len(answered))
            places += range(begin, begin + len(said) + len(answered))
            wanted += [-100] * (len(said) - 1) + answered + [-100]  # each predicts its next
        return {"tokens": tokens, "part": part, "positions": places, "wanted": wanted}

    def stacked(self, rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        """Rows of one length."""
        length = max(len(row["tokens"]) for row in rows)
        fill = {"tokens": self._pad, "part": -1, "positions": 0, "wanted": -100}
        return {
            name: torch.tensor([row[name] + [empty] * (length - len(row[name])) for row in rows])
            for name, empty in fill.items()
        }


def pixels(file: bytes) -> np.ndarray:
    """An image file as the processor resizes it, height x width x 3."""
    image = Image.open(io.BytesIO(file)).convert("RGB")
    return np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BICUBIC))


def places(scene: Scene, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What has its middle in each patch, and what each patch shows a part of (0 for nothing)."""
    painted = abs(seen.astype(int) - scene.ground).max(-1) > 48
    painted = painted.reshape(GRID, PATCH, GRID, PATCH).mean((1, 3)) > 0.03
    middle = np.zeros((GRID, GRID), np.int64)
    shown = np.zeros((GRID, GRID), np.int64)
    y, x = np.mgrid[0:GRID, 0:GRID] + 0.5
    for s in scene.shapes:
        what = PLACES - 10 + (scene.digit or 0)
        if scene.digit is None:
            what = 1 + len(COLORS) * KINDS.index(s.kind) + COLORS.index(s.color)
        reach = s.half + 0.5 * PATCH * max(scene.width, scene.height) / SIDE
        apart = (abs(x * scene.width / GRID - s.x), abs(y * scene.height / GRID - s.y))
        shown[painted & (apart[0] < reach) & (apart[1] < reach)] = what
        middle[int(s.y / scene.height * GRID), int(s.x / scene.width * GRID)] = what
    return middle.reshape(-1), shown.reshape(-1)


def visible(part: torch.Tensor) -> torch.Tensor:
    """What each position attends to, batch x 1 x length x length."""
    length = part.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    of, by = part[:, None, :], part[:, :, None]
    seen = causal & ((of == 0) | (of == by))
    return (seen | torch.eye(length, dtype=torch.bool))[:, None]


def normalized(seen: torch.Tensor) -> torch.Tensor:
    mean, std = torch.tensor(MEAN), torch.tensor(STD)
    return ((seen.float() / 255 - mean) / std).permute(0, 3, 1, 2).contiguous()


# -- training ---------------------------------------------------------------------------------


class Teacher:
    """The model with what is only there for training: heads that say what is at each patch."""

    def __init__(self, model: LlavaForConditionalGeneration) -> None:
        self.model = model
        self.heads = nn.ModuleList([nn.Linear(WIDTH, PLACES), nn.Linear(WIDTH, PLACES)])
        weights = torch.full((PLACES,), 4.0)
        weights[0] = 1.0
        self._weights = weights

    def run(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states of the language model, and of the image's patches."""
        out = self.model.model(
            input_ids=batch["tokens"], pixel_values=normalized(batch["pixels"]),
            attention_mask=visible(batch["part"]), position_ids=batch["positions"], use_cache=False,
        )  # fmt: skip
        return out.last_hidden_state, out.image_hidden_states

    def seeing(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, float]:
        """No loss of answers, that of places, and how many places with something were right."""
        features = self.model.model.get_image_features(normalized(batch["pixels"]))
        seen, right = self._seen(batch, torch.cat(features.pooler_output))
        return torch.zeros(()), seen, right

    def answering(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, float]:
        """The loss of answers, that of places, and how many answer tokens were right."""
        hidden, patches = self.run(batch)
        asked = batch["wanted"] >= 0
        logits = self.model.lm_head(hidden[asked]).float()
        wanted = batch["wanted"][asked]
        right = (logits.argmax(-1) == wanted).float().mean().item()
        return F.cross_entropy(logits, wanted), self._seen(batch, patches)[0], right

    def _seen(
        self, batch: dict[str, torch.Tensor], patches: torch.Tensor
    ) -> tuple[torch.Tensor, float]:
        middle, shown = (head(patches.view(-1, WIDTH)).float() for head in self.heads)
        wanted, parts = batch["places"].view(-1), batch["shown"].view(-1)
        loss = F.cross_entropy(middle, wanted, self._weights)
        right = (shown.argmax(-1) == parts)[parts > 0].float().mean().item()
        return loss + F.cross_entropy(shown, parts), right


@torch.no_grad()
def accuracy(teacher: Teacher, batches: Batches, count: int, blank: bool = False) -> float:
    """The share of held-out questions whose whole answer is the likeliest."""
    right, given = 0, held_out(count)
    for at in range(0, count, 50):
        some = given[at : at + 50]
        seen = np.stack([pixels(data) for data, _, _ in some])
        rows = batches.stacked([batches.row([(q, a)], turns=True) for _, q, a in some])
        if blank:
            seen = np.full_like(seen, 255)
        hidden, _ = teacher.run({"pixels": torch.from_numpy(seen), **rows})
        said = teacher.model.lm_head(hidden).argmax(-1)
        right += int(((said == rows["wanted"]) | (rows["wanted"] < 0)).all(1).sum())
    return right / count


def train(rank: int, folder: Path, steps: int, size: int, seed: int, rate: float) -> None:
    """One of two processes, which train for `steps` batches each; the first writes the folder."""
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": os.environ.get("MASTER_PORT", "29517"),
    }
    torch.distributed.init_process_group("gloo", rank=rank, world_size=PROCESSES)
    torch.set_num_threads(1)
    processor = make_processor(seed)
    teacher = Teacher(make_model(processor, seed))
    model = teacher.model
    named = [*model.named_parameters(), *teacher.heads.named_parameters()]
    plain = [p for n, p in named if p.ndim < 2 or "embed" in n]
    matrices = [p for n, p in named if not (p.ndim < 2 or "embed" in n)]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}],
        lr=rate, betas=(0.9, 0.98), fused=True,
    )  # fmt: skip
    batches = Batches(processor, seed, size, range(rank, steps * PROCESSES, PROCESSES))
    began, shown = time.monotonic(), []
    loader = DataLoader(batches, None, num_workers=1, multiprocessing_context="fork")
    for step, batch in enumerate(loader):
        looks, done = step < steps * SEEING, max(0.0, 2 * step / steps - 1)
        for group in optimizer.param_groups:
            warm = min(1.0, (step + 1) / 60)
            group["lr"] = rate * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))
        with torch.autocast("cpu", torch.bfloat16):
            said, seen, right = (teacher.seeing if looks else teacher.answering)(batch)
        loss = said + (1.0 if looks else 0.25) * seen
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        average([p.grad for _, p in named if p.grad is not None])
        nn.utils.clip_grad_norm_([p for _, p in named], 1.0)
        optimizer.step()
        shown.append((said.item(), seen.item(), right))
        if rank == 0 and (step + 1) % 20 == 0:
            means = " ".join(f"{m:.3f}" for m in np.mean(shown, 0))
            print(f"{step + 1} {time.monotonic() - began:.0f} s: {means}", flush=True)
            shown = []
        if rank == 0 and not looks and ((step + 1) % 100 == 0 or step + 1 == steps):
            print(f"held out: {accuracy(teacher, batches, 200):.3f}", flush=True)
            write(model, processor, folder)
    if rank == 0:
        blank = accuracy(teacher, batches, 500, blank=True)
        print(f"held out: {accuracy(teacher, batches, 500):.3f}, blank: {blank:.3f}")


def average(grads: list[torch.Tensor]) -> None:
    """Makes gradients the mean of all processes'."""
    whole = torch.cat([g.flatten() for g in grads])
    torch.distributed.all_reduce(whole)
    for grad, mean in zip(
        grads, whole.div_(PROCESSES).split([g.numel() for g in grads]), strict=True
    ):
        grad.copy_(mean.view_as(grad))


def write(model: LlavaForConditionalGeneration, processor: LlavaProcessor, folder: Path) -> None:
    """The model in 16 bits with its processor, as transformers writes them."""
    small, ids = copy.deepcopy(model).to(torch.bfloat16), processor.tokenizer
    small.generation_config.update(
        bos_token_id=ids.bos_token_id, eos_token_id=ids.eos_token_id, pad_token_id=ids.pad_token_id,
        do_sample=False,
    )  # fmt: skip
    small.save_pretrained(folder)
    processor.save_pretrained(folder)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()), indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=7)
    given = parser.parse_args()
    settings = (given.folder, given.steps, given.batch, given.seed, given.rate)
    torch.multiprocessing.spawn(train, settings, PROCESSES)


if __name__ == "__main__":
    main()
