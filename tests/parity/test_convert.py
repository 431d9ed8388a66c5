"""Models in another format: the same logits, tokens and values, or a loss that is told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q

from octavo.backends.torch.reference import Reference
from octavo.checkpoint import Checkpoint, open_checkpoint
from octavo.checkpoint.base import TensorType
from octavo.checkpoint.dequantize import dequantize
from octavo.checkpoint.writer import NewTensor, write_folder, write_gguf
from octavo.compress import repack
from octavo.compress.conversion import Conversion, Converted, Format, relative_error
from octavo.compress.counterparts import in_order
from octavo.compress.folder_view import as_folder
from octavo.compress.gguf_view import gguf_parts
from octavo.compress.quantize import job_of
from octavo.compress.recipe_file import find_recipe
from octavo.compress.vocabulary import vocabulary
from octavo.errors import OctavoError, Unsupported, UsageError
from octavo.models import build_program
from octavo.text import ChatTemplate, load_tokenizer
from octavo.text.chat import template_source
from octavo.text.messages import message
from tests.conftest import npm_tokenizer, real_text
from tests.families import FAMILIES, VOCABULARY, Family, save_family, save_gguf
from tests.parity.test_reference import LIMIT
from tests.parity.test_tokenizers import strings
from tests.quantized_models import WRITERS, quantize_folder
from tests.small_models import Small, save_hf
from tests.small_models import save_gguf as save_llama

CONVERTED = [name for name, family in FAMILIES.items() if family.arch not in ("", "gpt-oss")]
IDS = np.random.default_rng(3).integers(3, VOCABULARY, 300).tolist()
# Sums of the features of a head in another order, in fp32: logits of a few units, 300 positions.
REORDERED = 2e-4
HALF = 2.0**-8  # the largest relative step of BF16


def logits(checkpoint: Checkpoint) -> torch.Tensor:
    return Reference(build_program(checkpoint)).logits(IDS)


def convert(checkpoint: Checkpoint, output: Path, format: Format) -> Converted:
    return Conversion(checkpoint, output, format).run()


def write_view(view: Checkpoint, folder: Path) -> Path:
    tensors = {n: NewTensor(t.type, t.shape, t.raw) for n, t in view.tensors.items()}
    write_folder(folder, view.metadata, tensors, view.files)
    return folder


@pytest.fixture(scope="module", params=CONVERTED)
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Family, Path, Path]:
    """A small model as transformers saves it, and as llama.cpp's converter would write it."""
    family, root = FAMILIES[request.param], tmp_path_factory.mktemp(request.param)
    save_family(family, root / "hf")
    save_gguf(family, root / "hf", root / "model.gguf")
    return family, root / "hf", root / "model.gguf"


def test_gguf_as_folder(both: tuple[Family, Path, Path], tmp_path: Path) -> None:
    """The view has the folder's tensors; Octavo and transformers compute with it what they do."""
    from transformers import AutoModelForCausalLM

    family, folder, path = both
    checkpoint, source = open_checkpoint(path), open_checkpoint(folder)
    view = as_folder(checkpoint)
    assert view.format == "hf" and as_folder(view) is view
    assert view.tensors.keys() == source.tensors.keys()
    offset = np.float32(1e-6 if family.arch.startswith("gemma") else 0)  # of w + 1 in fp32
    for name, tensor in view.tensors.items():
        assert np.abs(dequantize(tensor) - dequantize(source.tensors[name])).max() <= offset
    assert view.metadata["model_type"] == family.model_type
    seen = logits(view)
    assert (logits(checkpoint) - seen).abs().max().item() <= REORDERED
    written = write_view(view, tmp_path / "written")
    model = AutoModelForCausalLM.from_pretrained(written, attn_implementation="eager").eval()
    with torch.inference_mode():
        theirs = model(torch.tensor([IDS])).logits[0]
    assert (theirs - seen).abs().max().item() <= LIMIT


def test_folder_as_gguf(both: tuple[Family, Path, Path], tmp_path: Path) -> None:
    """The file has the tensors that llama.cpp's converter writes, its keys, and its logits."""
    _, folder, path = both
    expected = open_checkpoint(path)
    for name, file in as_folder(expected).files.items():
        (folder / name).write_bytes(file.make())  # type: ignore[union-attr]
    source = open_checkpoint(folder)
    result = convert(source, tmp_path / "out.gguf", "gguf")
    assert result.lossless
    made = open_checkpoint(tmp_path / "out.gguf")
    assert made.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        ours, theirs = made.tensors[name].vector(), tensor.vector()
        # factors of rotations are quotients of fp32; other numbers are copied
        assert np.abs(ours / theirs - 1).max() <= (1e-6 if name.startswith("rope_") else 0)
    keys = {k: v for k, v in expected.metadata.items() if not k.startswith("tokenizer.")}
    numbers = {k: v for k, v in keys.items() if isinstance(v, int | float)}
    assert {k: made.metadata.get(k) for k in numbers} == pytest.approx(numbers, rel=1e-6)
    others = keys.keys() - numbers.keys()
    assert {k: made.metadata.get(k) for k in others} == {k: keys[k] for k in others}
    for key in ("model", "pre", "tokens", "merges", "bos_token_id", "eos_token_id"):
        full = f"tokenizer.ggml.{key}"
        assert made.metadata[full] == expected.metadata[full]
    assert (logits(source) - logits(made)).abs().max().item() <= REORDERED


@pytest.mark.parametrize("name", ["opt", "gpt-oss", "qwen2-windows", "gemma3-pattern"])
def test_what_gguf_cannot_say_is_refused(name: str, tmp_path: Path) -> None:
    save_family(FAMILIES[name], tmp_path)
    with pytest.raises(OctavoError) as refused:
        gguf_parts(open_checkpoint(tmp_path))
    assert len(str(refused.value).splitlines()) == 1


def test_gguf_without_a_folder_is_refused(tmp_path: Path) -> None:
    save_family(FAMILIES["gpt-oss"], tmp_path)
    save_gguf(FAMILIES["gpt-oss"], tmp_path, tmp_path / "model.gguf")
    with pytest.raises(Unsupported, match="gpt-oss") as refused:
        as_folder(open_checkpoint(tmp_path / "model.gguf"))
    assert refused.value.suggestions


# -- vocabularies -----------------------------------------------------------------------------


def test_tokenizer_of_a_gguf_file(smollm2: Path, tmp_path: Path) -> None:
    """transformers and Octavo encode with the written files as Octavo does with the GGUF file."""
    from transformers import AutoTokenizer

    checkpoint = open_checkpoint(smollm2)
    view, ours = as_folder(checkpoint), load_tokenizer(checkpoint)
    for name, file in view.files.items():
        (tmp_path / name).write_bytes(file.make())  # type: ignore[union-attr]
    (tmp_path / "config.json").write_text(json.dumps(view.metadata))
    theirs, seen = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(view)
    assert seen.special == ours.special
    texts = [*strings(600), real_text(20_000)]
    for text in texts:
        ids = ours.encode(text)
        assert seen.encode(text) == ids
        assert theirs.encode(text, split_special_tokens=True) == ids
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.special.bos, ours.special.end)
    source = template_source(checkpoint)
    assert source is not None and template_source(view) == source
    template = ChatTemplate(source, ours)
    talk = [
        {"role": "user", "content": "How far is it?"},
        {"role": "assistant", "content": "12 km"},
    ]
    found = theirs.apply_chat_template([*talk, talk[0]], add_generation_prompt=True)
    messages = [message(m["role"], m["content"]) for m in [*talk, talk[0]]]
    assert template.encode(messages) == found["input_ids"]
    template.close()


def test_published_vocabulary() -> None:
    """Scores that are made of merges encode as the published tokenizer.json does."""
    folder = npm_tokenizer("llama2")
    source = Checkpoint(folder, "hf", {}, {}, {p.name: p for p in folder.glob("*.json")})
    ours = load_tokenizer(source)
    made = vocabulary(source, len(ours.vocabulary))
    assert made["tokenizer.ggml.model"] == "llama"
    theirs = load_tokenizer(Checkpoint(Path("model.gguf"), "gguf", made, {}))
    assert theirs.special == ours.special
    for text in strings(300):
        assert theirs.encode(text) == ours.encode(text)


def test_vocabulary_comes_back(smollm2: Path) -> None:
    """Tokens, types, merges, ids, template and the name of the rule, through tokenizer.json."""
    checkpoint = open_checkpoint(smollm2)
    view = as_folder(checkpoint)
    made = vocabulary(view, view.metadata["vocab_size"])
    names = ("model", "pre", "tokens", "token_type", "merges", "bos_token_id", "eos_token_id")
    keys = [f"tokenizer.ggml.{n}" for n in (*names, "padding_token_id", "add_bos_token")]
    for key in (*keys, "tokenizer.chat_template"):
        assert made[key] == checkpoint.metadata[key]


def test_a_rule_without_a_name_is_refused(tmp_path: Path) -> None:
    save_llama(Small(), tmp_path / "model.gguf", Q.F32)
    made = as_folder(open_checkpoint(tmp_path / "model.gguf")).files["tokenizer.json"]
    source = json.loads(made.make())  # type: ignore[union-attr]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(source))
    known = Checkpoint(tmp_path, "hf", {}, {}, {path.name: path})
    assert vocabulary(known, 320)["tokenizer.ggml.pre"] == "gpt-2"
    split = {"type": "Split", "pattern": {"Regex": r"\p{L}{1,5}|\P{L}"}, "behavior": "Isolated"}
    spell = source["pre_tokenizer"] | {"use_regex": False}
    both = [split | {"invert": False}, spell]
    source["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": both}
    path.write_text(json.dumps(source))
    with pytest.raises(Unsupported, match="no name for"):
        vocabulary(known, 320)


# -- grids ------------------------------------------------------------------------------------

WIDE = Small(heads=4, kv_heads=2, head_dim=64, hidden=256, ffn=512, layers=1, tied=False)
BLOCKS = [Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0]
# Formats whose grids hold a block format's exactly. The others get 16 bits.
EXACT: dict[Q, tuple[Format, ...]] = {
    Q.Q4_0: ("gptq", "awq", "compressed-tensors", "mlx"), Q.Q4_1: ("mlx",),
    Q.Q5_0: ("gptq", "compressed-tensors", "mlx"), Q.Q5_1: ("mlx",),
    Q.Q8_0: ("gptq", "compressed-tensors", "mlx"),
}  # fmt: skip
HELD = [(kind, layout) for kind, layouts in EXACT.items() for layout in layouts]
NOT_HELD = [
    (kind, layout)
    for kind in BLOCKS
    for layout in ("gptq", "awq", "compressed-tensors", "mlx")
    if layout not in EXACT[kind]
]


def kept(result: Converted) -> set[str]:
    return {t.now for t in result.tensors if not t.lossless}


@pytest.mark.parametrize(("kind", "layout"), HELD)
def test_blocks_keep_their_values(kind: Q, layout: Format, tmp_path: Path) -> None:
    """Every layer has the values it had, and the way back gives the bytes it came from."""
    save_llama(WIDE, tmp_path / "a.gguf", kind)
    a = open_checkpoint(tmp_path / "a.gguf")
    result = convert(a, tmp_path / "folder", layout)
    view, folder = as_folder(a), open_checkpoint(tmp_path / "folder")
    assert folder.tensors.keys() == view.tensors.keys()
    layers = [n for n in view.tensors if ".layers." in n]
    for name in layers:
        assert np.array_equal(in_order(folder.tensors[name]), dequantize(view.tensors[name]))
    assert {t.lossless for t in result.tensors if ".layers." in t.name} == {True}
    for file in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        assert (tmp_path / "folder" / file).exists()
    convert(folder, tmp_path / "b.gguf", "gguf")
    b = open_checkpoint(tmp_path / "b.gguf")
    assert b.tensors.keys() == a.tensors.keys()
    for name in (n for n in a.tensors if n.startswith("blk.")):
        before, after = a.tensors[name], b.tensors[name]
        assert np.array_equal(dequantize(before), dequantize(after))


@pytest.mark.parametrize("layout", EXACT[Q.Q4_0])
def test_a_layer_is_packed_once(
    layout: Format, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its tensors will be is known by their shape."""
    packed: list[tuple[int, ...]] = []
    pack = repack.folder_tensors

    def counted(u: repack.Uniform, *args: Any) -> Any:
        packed.append(u.codes.shape)
        return pack(u, *args)

    monkeypatch.setattr(repack, "folder_tensors", counted)
    save_llama(WIDE, tmp_path / "a.gguf", Q.Q4_0)
    result = convert(open_checkpoint(tmp_path / "a.gguf"), tmp_path / "folder", layout)
    assert len(packed) == sum(t.now.startswith(layout) for t in result.tensors)


def test_awq_has_groups_of_one_size(tmp_path: Path) -> None:
    """Its config.json names one: layers of two are refused before anything is written."""
    save_llama(WIDE, tmp_path / "a.gguf", Q.F32)
    own = tmp_path / "own.yaml"
    own.write_text(
        "method: rtn\nformats: [compressed-tensors]\nweights: {bits: 4, group: 64}\n"
        'layers:\n  - match: "*.k_proj.weight"\n    weights: {bits: 4, group: 32}\n'
    )
    source, recipe = open_checkpoint(tmp_path / "a.gguf"), find_recipe(str(own))
    says = "an AWQ folder has groups of one size; here they are of 32 and 64 columns"
    made = open_checkpoint(job_of(source, recipe, tmp_path / "two").run().output)
    with pytest.raises(UsageError, match=says) as refused:
        Conversion(made, tmp_path / "x", "awq")
    assert refused.value.suggestions == ("--format gptq",)
    convert(made, tmp_path / "gptq", "gptq")
    config = json.loads((tmp_path / "gptq" / "config.json").read_bytes())["quantization_config"]
    others = [v["group_size"] for k, v in config["dynamic"].items() if k.startswith("+:")]
    assert (config["group_size"], others) == (64, [32] * WIDE.layers)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(("kind", "layout"), NOT_HELD)
def test_what_no_grid_holds_is_refused(kind: Q, layout: Format, tmp_path: Path) -> None:
    save_llama(WIDE, tmp_path / "a.gguf", kind)
    with pytest.raises(UsageError, match="exactly") as refused:
        convert(open_checkpoint(tmp_path / "a.gguf"), tmp_path / "folder", layout)
    assert "octavo quantize" in refused.value.suggestions[0]
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize("kind", [Q.Q4_0, Q.Q4_1, Q.Q8_0])
def test_the_same_bytes_come_back(kind: Q, tmp_path: Path) -> None:
    """GGUF to MLX, which has codes for all matrices, and back."""
    save_llama(WIDE, tmp_path / "a.gguf", kind)
    a = open_checkpoint(tmp_path / "a.gguf")
    assert convert(a, tmp_path / "mlx", "mlx").lossless
    convert(open_checkpoint(tmp_path / "mlx"), tmp_path / "b.gguf", "gguf")
    b = open_checkpoint(tmp_path / "b.gguf")
    for name, tensor in a.tensors.items():
        assert b.tensors[name].type is tensor.type
        assert np.array_equal(b.tensors[name].raw(), tensor.raw())


@pytest.mark.parametrize("kind", [TensorType.Q4_K, TensorType.Q5_K])
def test_k_formats_fit_mlx(kind: TensorType, tmp_path: Path) -> None:
    """Products of two scales are no fp16, but fp32 holds them."""
    from octavo.compress.blocks import encode

    small = replace(WIDE, ffn=256, layers=1, kv_heads=1)
    save_llama(small, tmp_path / "f32.gguf", Q.F32)
    plain = open_checkpoint(tmp_path / "f32.gguf")
    tensors = {
        n: NewTensor.of(encode(t.vector(), kind), kind)
        if len(t.shape) == 2
        else NewTensor(t.type, t.shape, t.raw)
        for n, t in plain.tensors.items()
    }
    write_gguf(tmp_path / "k.gguf", plain.metadata, tensors)
    source = open_checkpoint(tmp_path / "k.gguf")
    assert convert(source, tmp_path / "mlx", "mlx").lossless
    view, made = as_folder(source), open_checkpoint(tmp_path / "mlx")
    for name, tensor in view.tensors.items():
        assert np.array_equal(dequantize(made.tensors[name]), dequantize(tensor))


def linear(name: str) -> bool:
    return "_proj" in name


@pytest.mark.parametrize("name", sorted(WRITERS))
def test_every_quantized_folder_becomes_gguf_and_floats(name: str, tmp_path: Path) -> None:
    """Values are kept where blocks hold them; elsewhere each number moves by one step of the 16
    bits at most, and the report says how much."""
    save_hf(WIDE, tmp_path / "q")
    quantize_folder(tmp_path / "q", WRITERS[name], linear)
    save_llama(WIDE, tmp_path / "v.gguf", Q.F32)
    for file, made in as_folder(open_checkpoint(tmp_path / "v.gguf")).files.items():
        (tmp_path / "q" / file).write_bytes(made.make())  # type: ignore[union-attr]
    source = open_checkpoint(tmp_path / "q")
    for format, output in (("gguf", tmp_path / "out.gguf"), ("safetensors", tmp_path / "out")):
        result = convert(source, output, format)  # type: ignore[arg-type]
        view = as_folder(open_checkpoint(output))
        errors = {t.name: t.error for t in as_named(result, source)}
        for module, tensor in source.tensors.items():
            was, now = in_order(tensor), dequantize(view.tensors[module])
            # rows of q and k are summed in another order
            assert relative_error(was, now) == pytest.approx(errors[module], rel=1e-9)
            assert (np.abs(was - now) <= np.abs(was) * HALF).all()


def as_named(result: Converted, source: Checkpoint) -> list[Any]:
    """The report's rows by the folder's names, whichever format it is of."""
    if result.format != "gguf":
        return list(result.tensors)
    _, parts = gguf_parts(source)
    names = {p.name: p.sources[0].name for p in parts}
    return [replace(t, name=names[t.name]) for t in result.tensors]


def test_llama_cpp_reads_the_keys(tmp_path: Path) -> None:
    """What llama.cpp's loader asks of a file is there in the types it wants."""
    save_hf(WIDE, tmp_path / "hf")
    save_llama(WIDE, tmp_path / "v.gguf", Q.F32)
    for file, made in as_folder(open_checkpoint(tmp_path / "v.gguf")).files.items():
        (tmp_path / "hf" / file).write_bytes(made.make())  # type: ignore[union-attr]
    convert(open_checkpoint(tmp_path / "hf"), tmp_path / "out.gguf", "gguf")
    reader = gguf.GGUFReader(tmp_path / "out.gguf")
    kinds = {
        "general.architecture": "STRING", "llama.block_count": "UINT32",
        "llama.attention.layer_norm_rms_epsilon": "FLOAT32", "llama.rope.freq_base": "FLOAT32",
        "tokenizer.ggml.bos_token_id": "UINT32", "tokenizer.ggml.add_bos_token": "BOOL",
    }  # fmt: skip
    assert {k: reader.get_field(k).types[0].name for k in kinds} == kinds  # type: ignore[union-attr]
    vectors = [t for t in reader.tensors if len(t.shape) == 1]
    assert vectors and {t.tensor_type for t in vectors} == {Q.F32}
