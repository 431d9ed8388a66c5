"""What a GGUF file and a Hugging Face folder of the same family call the same things.

Names of modules and keys are those that the families read; here is which architecture is which
model_type, and what llama.cpp's converter does to weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from octavo.models import gemma2, gpt2, mixtral, olmo2, phi, phi3, starcoder2
from octavo.models.names import GGUF_KEYS, GGUF_NAMES, HF_KEYS, HF_NAMES

_LOCAL = {"experts": "num_local_experts"}
# Where what GGUF calls post_attention_norm is the norm before the feed-forward block.
_NORM_BETWEEN = {"ffn_norm": "blk.{}.post_attention_norm"}


@dataclass(frozen=True)
class Scheme:
    """One family in both formats.

    own, gguf_own, keys: names where they differ from HF_NAMES, GGUF_NAMES and HF_KEYS.
    norm_offset: what GGUF's norms have more. transposed: folders hold `[inputs, outputs]`.
    """

    model_type: str
    class_name: str
    own: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    gguf_own: Mapping[str, str] = field(default_factory=dict)
    norm_offset: float = 0.0
    transposed: tuple[str, ...] = ()

    @property
    def modules(self) -> dict[str, str]:
        """Hugging Face names of modules by their GGUF names, both with {} for the layer."""
        hf = HF_NAMES | dict(self.own)
        found = {name: hf[module] for module, name in GGUF_NAMES.items() if module in hf}
        return found | {name: hf[module] for module, name in self.gguf_own.items()}

    @property
    def settings(self) -> dict[str, str]:
        """Keys of config.json by GGUF's keys, without the architecture."""
        hf = HF_KEYS | dict(self.keys)
        return {GGUF_KEYS[k]: hf[k] for k in GGUF_KEYS}


SCHEMES: Mapping[str, Scheme] = {
    "llama": Scheme("llama", "LlamaForCausalLM"),
    "mistral": Scheme("mistral", "MistralForCausalLM"),
    "mixtral": Scheme("mixtral", "MixtralForCausalLM", mixtral.NAMES, _LOCAL),
    "smollm3": Scheme("smollm3", "SmolLM3ForCausalLM"),
    "qwen2": Scheme("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Scheme("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": Scheme("qwen3_moe", "Qwen3MoeForCausalLM"),
    "olmoe": Scheme("olmoe", "OlmoeForCausalLM"),
    "olmo2": Scheme("olmo2", "Olmo2ForCausalLM", olmo2.NAMES),
    "olmo3": Scheme("olmo3", "Olmo3ForCausalLM", olmo2.NAMES),
    "phi2": Scheme("phi", "PhiForCausalLM", phi.NAMES),
    "phi3": Scheme("phi3", "Phi3ForCausalLM", phi3.NAMES),
    "gemma": Scheme("gemma", "GemmaForCausalLM", norm_offset=1.0),
    "gemma2": Scheme("gemma2", "Gemma2ForCausalLM", gemma2.NAMES, norm_offset=1.0),
    "gemma3": Scheme("gemma3_text", "Gemma3ForCausalLM", gemma2.NAMES, norm_offset=1.0),
    "gpt2": Scheme("gpt2", "GPT2LMHeadModel", gpt2.NAMES, gpt2.KEYS, transposed=gpt2.TRANSPOSED),
    "seed_oss": Scheme("seed_oss", "SeedOssForCausalLM", gguf_own=_NORM_BETWEEN),
    "starcoder2": Scheme("starcoder2", "Starcoder2ForCausalLM", starcoder2.NAMES, starcoder2.KEYS),
}  # fmt: skip
