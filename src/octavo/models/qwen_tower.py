"""What the towers of Qwen-VL models share: sizes, patches of several pictures, attention rotated
along two axes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from octavo.checkpoint import Checkpoint
from octavo.errors import CheckpointError, Unsupported
from octavo.models import rope
from octavo.models.activations import activation
from octavo.models.grid import MOST_TOKENS
from octavo.models.metadata import Metadata, Recorded
from octavo.models.vision import find_module, token_id
from octavo.program import Activation, Builder, Program, Value
from octavo.vision.normalize import processor_settings
from octavo.vision.qwen2_vl import pixel_limits

CHANNELS = 3
EPS = 1e-6
THETA = 10000.0
IMAGE_TOKEN, VIDEO_TOKEN = 151655, 151656  # transformers' defaults
PATCHES = "patch_embed.proj"


@dataclass(frozen=True)
class QwenTower:
    """Sizes of a tower. prefix: of its tensors. out: width of its tokens' embeddings. patch: pixels
    a side; merge: patches a side of a token; frames: pictures of a patch."""

    prefix: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    out: int
    patch: int
    merge: int
    frames: int
    activation: Activation
    theta: float

    @property
    def features(self) -> int:
        """Of a patch."""
        return CHANNELS * self.frames * self.patch**2


def vision_config(checkpoint: Checkpoint) -> tuple[Checkpoint, Recorded]:
    """A folder as its vision_config describes it. Raises CheckpointError."""
    values, family = checkpoint.metadata.get("vision_config"), checkpoint.metadata["model_type"]
    if not isinstance(values, Mapping):
        raise CheckpointError(f"{checkpoint.path.name}: no vision_config")
    metadata = Recorded({**values, "model_type": f"{family}_vision"})
    return replace(checkpoint, metadata=metadata), metadata


def read_tower(inner: Checkpoint, first: bool = False) -> QwenTower:
    """first: keys as Qwen2-VL names them. Raises CheckpointError or Unsupported."""
    m, name = Metadata(inner), inner.path.name
    rotation = m.get("rope_parameters") or {}
    theta = rotation.get("rope_theta", THETA) if isinstance(rotation, Mapping) else None
    if not isinstance(theta, int | float) or not 1 < theta < 1e30:
        raise m.bad("rope_parameters", rotation)
    if (kind := rotation.get("rope_type", "axial")) != "axial":
        raise Unsupported(f"{name}: a vision rope_type of {str(kind)[:40]!r}")
    hidden = m.size("embed_dim" if first else "hidden_size")
    c = QwenTower(
        prefix=find_module(inner, PATCHES).removesuffix(PATCHES), layers=m.size("depth"),
        hidden=hidden, heads=m.size("num_heads"),
        ffn=hidden * m.size("mlp_ratio") if first else m.size("intermediate_size"),
        out=m.size("hidden_size" if first else "out_hidden_size"), patch=m.size("patch_size"),
        merge=m.size("spatial_merge_size"), frames=m.size("temporal_patch_size"),
        activation=activation(inner, "hidden_act", m.get("hidden_act")), theta=float(theta),
    )  # fmt: skip
    if c.hidden % (4 * c.heads) or c.layers > len(inner.tensors):
        raise CheckpointError(
            f"{name}: {c.layers} vision layers of {c.hidden} features over {c.heads} heads"
        )
    if m.size("in_channels") != CHANNELS:
        raise Unsupported(f"{name}: images of {m.size('in_channels')} channels")
    return c


def tower_builder(checkpoint: Checkpoint, c: QwenTower) -> Builder:
    """Builds a program in which the convolution over patches is a matrix."""
    name = c.prefix + PATCHES + ".weight"
    conv = checkpoint.tensor(name, (c.hidden, CHANNELS, c.frames, c.patch, c.patch))
    matrix = replace(conv, shape=(c.hidden, c.features))
    return Builder(replace(checkpoint, tensors=dict(checkpoint.tensors) | {name: matrix}))


def linear(b: Builder, x: Value, name: str, width: int) -> Value:
    return b.linear(x, f"{name}.weight", width, f"{name}.bias")


def attention(b: Builder, c: QwenTower, y: Value, name: str, segmented: bool = False) -> Value:
    """Attention whose heads turn by row in one half of their pairs and by column in the other."""
    n, frequencies = c.hidden, rope.plain(c.theta, c.hidden // c.heads // 2).frequencies
    axes = (0,) * len(frequencies) + (1,) * len(frequencies)
    q, k, v = (
        b.linear(y, f"{name}.qkv.weight", 3 * n, f"{name}.qkv.bias", (j * n, (j + 1) * n))
        for j in range(3)
    )
    q, k = (b.rope(x, c.heads, frequencies * 2, False, axes=axes) for x in (q, k))
    # Layers come one after the other and keep nothing: they share the room for keys and values.
    a = b.attention(
        q, k, v, layer=0, heads=c.heads, kv_heads=c.heads, scale=(n // c.heads) ** -0.5,
        causal=False, segmented=segmented,
    )  # fmt: skip
    return linear(b, a, name + ".proj", n)


def projector(
    checkpoint: Checkpoint, c: QwenTower, first: str, second: str, norm: str = ""
) -> Program:
    """Two linear layers over a token's states side by side, or over their norm."""
    b, width = Builder(checkpoint), c.hidden * c.merge**2
    x = b.select_rows(b.features(width))
    if norm:
        x = b.layer_norm(x, f"{norm}.weight", f"{norm}.bias", EPS)
    x = b.activate(linear(b, x, first, width), "gelu")
    return b.build(1, linear(b, x, second, c.out), task="embed")


def most_rows(c: QwenTower) -> int:
    """Of the largest image."""
    return MOST_TOKENS * c.merge**2


def most_tokens(checkpoint: Checkpoint, c: QwenTower) -> int:
    """Of the largest picture that the folder's processor makes. Raises CheckpointError."""
    longest = pixel_limits(processor_settings(checkpoint))[1]
    return max(1, min(MOST_TOKENS, longest // (c.patch * c.merge) ** 2))


def placeholders(m: Recorded, name: str) -> tuple[int, int]:
    """The tokens of pictures and of a video's frames. Raises CheckpointError."""
    return (
        token_id(m, name, "image_token_id", default=IMAGE_TOKEN),
        token_id(m, name, "video_token_id", default=VIDEO_TOKEN),
    )
