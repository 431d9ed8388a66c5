"""Qwen-VL models in GGUF with their image encoder in an mmproj file, both written with llama.cpp's
package: what the folder computes that has the same weights."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import octavo
from octavo.checkpoint import open_checkpoint
from octavo.engine.open import open_model
from octavo.errors import CheckpointError, Unsupported
from octavo.models import build_vision
from octavo.models.mmproj import with_mmproj
from tests.api.test_images import CIRCLE, VIDEO_TEMPLATE, shown
from tests.parity.test_mmproj import changed, embeddings
from tests.unit.test_video_files import moving
from tests.vision_models import MEAN, PLACEHOLDER, STD, VISION_FAMILIES

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
NAMES = ["<pad>", "<s>", "</s>", *LETTERS, "qq"]
NAMES += [f"<unused_{i}>" for i in range(PLACEHOLDER - len(NAMES))]
SPECIAL = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
TEMPLATE = (
    VIDEO_TEMPLATE.replace("<image>", SPECIAL[0]).replace("<video>", SPECIAL[1])
    .replace("<begin>", SPECIAL[2]).replace("<end>", SPECIAL[3])
)  # fmt: skip
KINDS = {
    "qwen2_vl": ("qwen2vl", "qwen2vl_merger"),
    "qwen2_5_vl": ("qwen2vl", "qwen2.5vl_merger"),
    "qwen3_vl": ("qwen3vl", "qwen3vl_merger"),
}
VISION = "visual."


def write_folder(name: str, folder: Path) -> None:
    VISION_FAMILIES[name].save(folder)
    tokenizer = Tokenizer(models.BPE({n: i for i, n in enumerate(NAMES)}, [("q", "q")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(n, special=True) for n in (*NAMES[:3], *SPECIAL)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def write_model(
    name: str, weights: dict[str, np.ndarray], config: dict[str, Any], file: Path
) -> None:
    """The language model as llama.cpp's converter writes it."""
    arch, _ = KINDS[name]
    w, c = gguf.GGUFWriter(file, arch), config["text_config"]
    w.add_block_count(c["num_hidden_layers"])
    w.add_context_length(c["max_position_embeddings"])
    w.add_embedding_length(c["hidden_size"])
    w.add_feed_forward_length(c["intermediate_size"])
    w.add_head_count(c["num_attention_heads"])
    w.add_head_count_kv(c["num_key_value_heads"])
    w.add_layer_norm_rms_eps(c["rms_norm_eps"])
    w.add_rope_freq_base(c["rope_parameters"]["rope_theta"])
    w.add_rope_dimension_sections([*c["rope_parameters"]["mrope_section"], 0])
    if name == "qwen3_vl":
        w.add_key_length(c["head_dim"])
        w.add_value_length(c["head_dim"])
        w.add_uint32("qwen3vl.n_deepstack_layers", 2)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("gpt-2")
    tokens = [*NAMES, *SPECIAL]
    tokens += [f"<more_{i}>" for i in range(c["vocab_size"] - len(tokens))]
    w.add_token_list(tokens)
    control = gguf.TokenType.CONTROL
    w.add_token_types([
        gguf.TokenType.NORMAL if t in (*LETTERS, "qq") else control if t in (*NAMES[:3], *SPECIAL) else gguf.TokenType.UNUSED
        for t in tokens
    ])  # fmt: skip
    w.add_token_merges(["q q"])
    w.add_eos_token_id(2)
    w.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], c["num_hidden_layers"])
    for key, value in weights.items():
        if not key.startswith(VISION):
            found = names.get_name(key, (".weight", ".bias"))
            assert found is not None, key
            w.add_tensor(found, value)
    write(w)


def write_mmproj(
    name: str, weights: dict[str, np.ndarray], config: dict[str, Any], file: Path
) -> None:
    """The encoder likewise."""
    v, kind = config["vision_config"], KINDS[name][1]
    hidden = v.get("embed_dim", v["hidden_size"])
    w = gguf.GGUFWriter(file, "clip")
    w.add_clip_has_vision_encoder(True)
    w.add_clip_projector_type(kind)
    w.add_vision_projection_dim(64)
    w.add_vision_image_size(560)
    w.add_vision_patch_size(v["patch_size"])
    w.add_vision_embedding_length(hidden)
    w.add_vision_feed_forward_length(
        v["hidden_size"] if "embed_dim" in v else v["intermediate_size"]
    )
    w.add_vision_block_count(v["depth"])
    w.add_vision_head_count(v["num_heads"])
    w.add_vision_image_mean(MEAN)
    w.add_vision_image_std(STD)
    w.add_vision_attention_layernorm_eps(1e-6)
    w.add_uint32("clip.vision.image_min_pixels", 4 * 64)
    w.add_uint32("clip.vision.image_max_pixels", 24 * 64)
    if name == "qwen2_5_vl":
        w.add_vision_use_silu(True)
        w.add_vision_n_wa_pattern(v["fullatt_block_indexes"][0] + 1)
        w.add_uint32("clip.vision.window_size", v["window_size"])
    if name == "qwen3_vl":
        w.add_vision_use_gelu(True)
        w.add_vision_spatial_merge_size(2)
        w.add_vision_is_deepstack_layers([True, True, False])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, v["depth"])
    fixed = {
        "merger.norm": "v.post_ln", "merger.linear_fc1": "mm.0", "merger.linear_fc2": "mm.2",
        "patch_embed.proj": "v.patch_embd",
    }  # fmt: skip
    for key, value in weights.items():
        if not key.startswith(VISION):
            continue
        stem, _, part = key.removeprefix(VISION).rpartition(".")
        if stem == "patch_embed.proj" and part == "weight":
            for i, end in enumerate(("", ".1")):
                w.add_tensor("v.patch_embd.weight" + end, np.ascontiguousarray(value[:, :, i]))
        elif stem.endswith("attn.qkv") and name != "qwen3_vl":
            for one, rows in zip("qkv", np.split(value, 3), strict=True):
                at = names.get_name("visual." + stem.replace("qkv", one))
                w.add_tensor(f"{at}.{part}", np.ascontiguousarray(rows))
        else:
            deep = re.fullmatch(r"deepstack_merger_list\.(\d+)\.(?:linear_)?(\w+)", stem)
            at = f"v.deepstack.{deep[1]}.{deep[2]}" if deep else fixed.get(stem)
            at = at or names.get_name("visual." + stem)
            assert at is not None, stem
            w.add_tensor(f"{at}.{part}", value)
    write(w)


def write(w: gguf.GGUFWriter) -> None:
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    out = {}
    for name in KINDS:
        root = tmp_path_factory.mktemp(name)
        write_folder(name, root / "hf")
        weights = {
            re.sub(r"^model\.(?=visual\.)|(?<=^model\.)language_model\.", "", key): value
            for key, value in load_file(root / "hf" / "model.safetensors").items()
        }
        config = json.loads((root / "hf" / "config.json").read_text())
        config["vision_config"] |= VISION_FAMILIES[name].settings["vision_config"]
        write_model(name, weights, config, root / "m.gguf")
        write_mmproj(name, weights, config, root / "mmproj-m.gguf")
        out[name] = root / "hf", root / "m.gguf"
    return out


def answers(path: Path) -> list[list[tuple[int, float]]]:
    """Of a picture and of a video."""
    params = octavo.SamplingParams(temperature=0, max_tokens=8, logprobs=0, ignore_eos=True)
    video = {"type": "video", "video": moving(5), "fps": 0.5}
    asked = [
        shown(CIRCLE, text="What is it?"),
        [{"role": "user", "content": [video, {"type": "text", "text": "What moves?"}]}],
    ]
    with octavo.LLM(str(path), memory="1GiB", threads=2) as llm:
        said = [llm.chat(messages, params)[0] for messages in asked]
    return [list(zip(reply.tokens, reply.logprobs or [], strict=True)) for reply in said]


@pytest.mark.parametrize("name", KINDS)
def test_pairs_compute_what_folders_do(name: str, pairs: dict[str, tuple[Path, Path]]) -> None:
    folder, model = pairs[name]
    pair = with_mmproj(open_checkpoint(model))
    assert pair.mmproj is not None
    image = VISION_FAMILIES[name].image(4)
    assert np.array_equal(embeddings(pair, image), embeddings(open_checkpoint(folder), image))
    vision = build_vision(pair)
    assert vision is not None and vision.family == name and vision.tokens == 24
    assert answers(model) == answers(folder)


WRONG: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("qwen2_vl", {"vision__attention__layer_norm_epsilon": 1e-5}, Unsupported, "epsilon is 1.0e-05"),
    ("qwen2_vl", {"vision__something_new": 3}, Unsupported, "something_new"),
    ("qwen2_vl", {"drop": "v.patch_embd.weight.1"}, CheckpointError, "v.patch_embd.weight.1' is missing"),
    ("qwen2_vl", {"drop": "v.blk.1.attn_k.weight"}, CheckpointError, "v.blk.1.attn_k.weight' is missing"),
    ("qwen2_5_vl", {"vision__n_wa_pattern": None}, CheckpointError, "n_wa_pattern is None"),
    ("qwen2_5_vl", {"projector_type": "qwen3vl_merger"}, CheckpointError, "made for qwen3vl models"),
    ("qwen3_vl", {"drop": "v.deepstack.1.fc2.weight"}, CheckpointError, "is missing"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "error", "says"), WRONG, ids=lambda v: str(v)[:40])
def test_files_that_cannot_be(
    name: str, change: dict[str, Any], error: type[Exception], says: str,
    pairs: dict[str, tuple[Path, Path]], tmp_path: Path,
) -> None:  # fmt: skip
    model = pairs[name][1]
    wrong = changed(model.with_name("mmproj-m.gguf"), tmp_path / "mmproj-x.gguf", **change)
    with pytest.raises(error, match=re.escape(says)):
        open_model(model, mmproj=str(wrong))
