"""What llama.cpp does to LLaVA's pictures and encoder otherwise than the model's folder says, for
`vision.py answers`: done to Octavo's, it should answer as llama.cpp."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from PIL import Image


def square(image: Image.Image, side: int) -> Image.Image:
    """The picture as llama.cpp frames LLaVA's: all of it, with the mean color around."""
    scale = np.float32(side) / np.float32(max(image.size))
    width, height = (min(int(np.ceil(np.float32(n) * scale)), side) for n in image.size)
    framed = Image.new("RGB", (side, side), (122, 116, 104))
    inner = image.resize((width, height), Image.Resampling.BICUBIC)
    framed.paste(inner, ((side - width) // 2, (side - height) // 2))
    return framed


def roll_positions(model: Path, folder: Path) -> None:
    """Copies a LLaVA model. The class token has the last position in the copy, and each patch the
    one before its own, as in llama.cpp, which puts the token behind the patches."""
    shutil.copytree(model, folder)
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    begin = 8 + int.from_bytes(data[:8], "little")
    tensors = json.loads(data[8:begin])
    (table,) = (t for name, t in tensors.items() if name.endswith("position_embedding.weight"))
    first, end = (begin + at for at in table["data_offsets"])
    row = (end - first) // table["shape"][0]
    data[first:end] = data[end - row : end] + data[first : end - row]
    file.write_bytes(data)


def kept(states: np.ndarray) -> np.ndarray:
    """Which of a tower's states are shown, of rows that begin with the class token: the first row
    is left out, which is the first patch in llama.cpp, and the class token's is the last."""
    return np.concatenate([states[2:], states[:1]])
