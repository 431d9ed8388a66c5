"""Small random models of both families, written as real files by the libraries that own the formats."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Q

from octavo.checkpoint.base import TensorType
from octavo.compress.blocks import encode


@dataclass(frozen=True)
class Small:
    family: str = "llama"
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    hidden: int = 64
    ffn: int = 96
    layers: int = 3
    vocabulary: int = 320
    tied: bool = True
    bias: bool = False
    dtype: str = "float32"
    window: int = 24

    @property
    def name(self) -> str:
        flags = f"{'tied' if self.tied else 'untied'}{'-bias' if self.bias else ''}"
        return f"{self.family}-{self.heads}x{self.head_dim}-kv{self.kv_heads}-{flags}-{self.dtype}"


def hf_model(s: Small) -> torch.nn.Module:
    """A transformers model whose layers keep the scale of what passes through them."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(s.heads * 100 + s.kv_heads)
    common: dict[str, Any] = {
        "vocab_size": s.vocabulary, "hidden_size": s.hidden, "intermediate_size": s.ffn,
        "num_hidden_layers": s.layers, "num_attention_heads": s.heads, "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim, "max_position_embeddings": 2048, "tie_word_embeddings": s.tied,
        "attn_implementation": "eager", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    if s.family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**common, attention_bias=s.bias, mlp_bias=s.bias))
    else:
        config = Gemma3TextConfig(
            **common, sliding_window=s.window, query_pre_attn_scalar=s.head_dim
        )
        model = Gemma3ForCausalLM(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn_like(p) * (0.2 if p.ndim == 1 else p.shape[-1] ** -0.5))
            if "norm" in name:
                p.add_(0.0 if s.family == "gemma3" else 1.0)
    return model.to(getattr(torch, s.dtype)).eval()


def save_hf(s: Small, folder: Path) -> torch.nn.Module:
    """Writes a Hugging Face folder and returns the same model in fp32."""
    model = hf_model(s)
    model.save_pretrained(folder)
    return (
        type(model).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    )


GGUF_TYPES = [Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0, Q.MXFP4, Q.F16, Q.BF16, Q.F32]
K_TYPES = [Q.Q2_K, Q.Q3_K, Q.Q4_K, Q.Q5_K, Q.Q6_K]  # which the gguf package cannot encode


def llama_writer(s: Small, path: Path, eps: float) -> gguf.GGUFWriter:
    """A llama GGUF with its hyperparameters and a vocabulary, but no tensors yet."""
    w = gguf.GGUFWriter(path, "llama")
    w.add_context_length(2048)
    w.add_embedding_length(s.hidden)
    w.add_block_count(s.layers)
    w.add_feed_forward_length(s.ffn)
    w.add_head_count(s.heads)
    w.add_head_count_kv(s.kv_heads)
    w.add_key_length(s.head_dim)
    w.add_layer_norm_rms_eps(eps)
    w.add_rope_freq_base(10000.0)
    add_vocabulary(w, s.vocabulary)
    return w


def save_gguf(s: Small, path: Path, quant: Q, metadata: dict[str, Any] | None = None) -> None:
    """A llama GGUF with random weights, its matrices stored as `quant`."""
    rng = np.random.default_rng(7)
    w = llama_writer(s, path, 1e-5)
    for key, value in (metadata or {}).items():
        w.add_key_value(key, *value)

    def matrix(name: str, rows: int, cols: int) -> None:
        x = (rng.standard_normal((rows, cols)) / cols**0.5).astype(np.float32)
        if quant in K_TYPES:
            return w.add_tensor(name, encode(x, TensorType(int(quant))), raw_dtype=quant)
        kind = quant if cols % 32 == 0 or quant in (Q.F16, Q.BF16, Q.F32) else Q.F32
        w.add_tensor(name, gguf.quants.quantize(x, kind), raw_dtype=kind)

    def vector(name: str, n: int) -> None:
        w.add_tensor(name, (1 + 0.2 * rng.standard_normal(n)).astype(np.float32))

    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    matrix("token_embd.weight", s.vocabulary, s.hidden)
    vector("output_norm.weight", s.hidden)
    if not s.tied:
        matrix("output.weight", s.vocabulary, s.hidden)
    for i in range(s.layers):
        b = f"blk.{i}."
        vector(b + "attn_norm.weight", s.hidden)
        vector(b + "ffn_norm.weight", s.hidden)
        for name, rows, cols in (
            ("attn_q", q, s.hidden), ("attn_k", kv, s.hidden), ("attn_v", kv, s.hidden),
            ("attn_output", s.hidden, q), ("ffn_gate", s.ffn, s.hidden), ("ffn_up", s.ffn, s.hidden),
            ("ffn_down", s.hidden, s.ffn),
        ):  # fmt: skip
            matrix(f"{b}{name}.weight", rows, cols)
            if s.bias:
                vector(f"{b}{name}.bias", rows)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def add_vocabulary(w: gguf.GGUFWriter, size: int) -> None:
    """A byte-level vocabulary: 256 bytes, control tokens, and one merge."""
    from octavo.text.detokenizer import _byte_alphabet

    tokens = [*_byte_alphabet(), *(f"<|extra_{i}|>" for i in range(size - 257)), "th"]
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("gpt-2")
    w.add_token_list(tokens)
    w.add_token_types([1] * 256 + [3] * (size - 257) + [1])
    w.add_token_merges(["t h"])
    w.add_bos_token_id(256)
    w.add_eos_token_id(257)


def write_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
