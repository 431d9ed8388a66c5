"""Folders that hold more than their model: what is computed with is kept, the rest is no fault."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q

from octavo.checkpoint import Checkpoint, open_checkpoint
from octavo.checkpoint.base import Tensor, TensorType
from octavo.checkpoint.folders import missing
from octavo.checkpoint.writer import NewTensor, write_folder
from octavo.compress.conversion import Conversion
from octavo.compress.merge import Merge
from octavo.compress.quantize import job_of
from octavo.compress.recipe_file import find_recipe
from octavo.errors import Unsupported
from tests.parity.test_formats import published_gpt_oss
from tests.parity.test_lora import make_adapter
from tests.small_models import Small, hf_model, save_gguf

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama whose head is its embedding, with its tokenizer."""
    root = tmp_path_factory.mktemp("leftovers")
    save_gguf(Small(tied=True), root / "m.gguf", Q.F32)
    Conversion(open_checkpoint(root / "m.gguf"), root / "hf", "safetensors").run()
    return root / "hf"


def with_tensors(plain: Path, output: Path, **more: NewTensor) -> Checkpoint:
    """The folder with further tensors, or others of their names."""
    held = open_checkpoint(plain)
    tensors = {n: NewTensor(t.type, t.shape, t.raw) for n, t in held.tensors.items()}
    own = {"config.json", "model.safetensors"}
    files = {p.name: p for p in plain.iterdir() if p.name not in own}
    write_folder(output, held.metadata, tensors | more, files)
    return open_checkpoint(output)


def floats(*shape: int, scale: float = 1.0) -> NewTensor:
    made = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    return NewTensor.of(made * np.float32(scale), TensorType.F32)


def in_gguf(checkpoint: Checkpoint, output: Path) -> dict[str, Tensor]:
    assert Conversion(checkpoint, output, "gguf").run().lossless
    return dict(open_checkpoint(output).tensors)


def test_a_head_of_its_own_is_kept_where_config_says_there_is_none(
    plain: Path, tmp_path: Path
) -> None:
    embed = open_checkpoint(plain).tensors[EMBED]
    own = with_tensors(plain, tmp_path / "own", **{HEAD: floats(*embed.shape)})
    made = in_gguf(own, tmp_path / "own.gguf")
    assert np.array_equal(made["output.weight"].raw(), own.tensors[HEAD].raw())
    again = NewTensor(embed.type, embed.shape, embed.raw)
    same = with_tensors(plain, tmp_path / "same", **{HEAD: again})
    assert "output.weight" not in in_gguf(same, tmp_path / "same.gguf")


def test_what_nothing_is_computed_with_is_left_out(plain: Path, tmp_path: Path) -> None:
    wanted = in_gguf(open_checkpoint(plain), tmp_path / "plain.gguf")
    more = {f"model.layers.0.self_attn.rotary_emb.{n}": floats(16) for n in ("inv_freq",)}
    more |= {f"model.layers.0.attn.{n}": floats(4) for n in ("bias", "masked_bias")}
    made = in_gguf(with_tensors(plain, tmp_path / "more", **more), tmp_path / "more.gguf")
    assert made.keys() == wanted.keys()
    assert all(np.array_equal(made[name].raw(), wanted[name].raw()) for name in wanted)


def test_large_values_stay_where_nothing_is_rounded(plain: Path, tmp_path: Path) -> None:
    width = open_checkpoint(plain).tensors["model.norm.weight"].shape[0]
    large = with_tensors(
        plain, tmp_path / "large", **{"model.norm.weight": floats(width, scale=1e6)}
    )
    made = in_gguf(large, tmp_path / "large.gguf")
    assert np.array_equal(
        made["output_norm.weight"].raw(), large.tensors["model.norm.weight"].raw()
    )


def test_a_model_without_a_form_in_gguf_is_refused_before_it_is_rounded(
    plain: Path, tmp_path: Path
) -> None:
    odd = with_tensors(plain, tmp_path / "odd", odd=floats(4))
    with pytest.raises(Unsupported, match="'odd' has no counterpart in GGUF files"):
        job_of(odd, find_recipe("rtn-4"), tmp_path / "odd.gguf", "gguf")
    assert [p.name for p in tmp_path.iterdir()] == ["odd"]


def test_an_index_that_is_left_beside_a_whole_file_is_not_asked(tmp_path: Path) -> None:
    """`save_pretrained` leaves it where the model was saved in shards before."""
    model = hf_model(Small())
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    old = {p.name: p.read_bytes() for p in tmp_path.glob("model-*")}
    model.model.norm.weight.data.fill_(7)
    model.save_pretrained(tmp_path)
    assert len(old) > 1 and (tmp_path / "model.safetensors.index.json").exists()
    some = dict([*old.items()][:1])
    for shards in ({}, some, old):  # gone, as transformers leaves it, or still there
        for name, data in shards.items():
            (tmp_path / name).write_bytes(data)
        norm = open_checkpoint(tmp_path).tensors["model.norm.weight"].vector()
        assert np.array_equal(norm, np.full_like(norm, 7)) and missing(tmp_path) == []


def test_experts_in_mxfp4_are_not_taken_apart(tmp_path: Path) -> None:
    published_gpt_oss(tmp_path / "oss")
    oss = open_checkpoint(tmp_path / "oss")
    adapter = make_adapter(tmp_path / "lora", 1, modules={"self_attn.q_proj": (64, 64)}, layers=3)
    for begin in (
        lambda: Conversion(oss, tmp_path / "plain", "safetensors"),
        lambda: Merge(oss, [adapter], tmp_path / "merged"),
    ):
        with pytest.raises(Unsupported, match="in MXFP4 have no form as floats"):
            begin()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["lora", "oss"]
