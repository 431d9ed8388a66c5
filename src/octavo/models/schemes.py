"""What a GGUF file and a Hugging Face folder of the same family call the same things.

Names of modules and keys are those that the families read; here is which architecture is which
model_type, and what llama.cpp's converter does to weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from octavo.models import gemma2, gpt2, mixtral, olmo2, phi, phi3, starcoder2
from octavo.models.defaults import DEFAULTS
from octavo.models.names import GGUF_KEYS, GGUF_NAMES, HF_KEYS, HF_NAMES

_LOCAL = {"experts": "num_local_experts"}
# Where what GGUF calls post_attention_norm is the norm before the feed-forward block.
_NORM_BETWEEN = {"ffn_norm": "blk.{}.post_attention_norm"}


@dataclass(frozen=True)
class Scheme:
    """One family in both formats.

    own, gguf_own, keys: names where they differ from HF_NAMES, GGUF_NAMES and HF_KEYS.
    pairs: GGUF's rows of q and k lie in pairs. norm_offset: what its norms have more. transposed:
    what folders hold as `[inputs, outputs]`.
    """

    model_type: str
    class_name: str
    own: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    gguf_own: Mapping[str, str] = field(default_factory=dict)
    pairs: bool = False
    norm_offset: float = 0.0
    transposed: tuple[str, ...] = ()

    @property
    def modules(self) -> dict[str, str]:
        """Hugging Face names of modules by their GGUF names, both with {} for the layer."""
        hf = HF_NAMES | dict(self.own)
        found = {name: hf[module] for module, name in GGUF_NAMES.items() if module in hf}
        return found | {name: hf[module] for module, name in self.gguf_own.items()}

    @property
    def embed(self) -> str:
        """The folder's name of the embedding table."""
        return self.modules[GGUF_NAMES["embed"]]

    @property
    def tied(self) -> bool:
        """Whether the head is the embeddings where config.json does not say."""
        return bool(DEFAULTS[self.model_type]["tie_word_embeddings"])

    @property
    def settings(self) -> dict[str, str]:
        """Keys of config.json by GGUF's keys, without the architecture."""
        hf = HF_KEYS | dict(self.keys)
        return {GGUF_KEYS[k]: hf[k] for k in GGUF_KEYS}


SCHEMES: Mapping[str, Scheme] = {
    "llama": Scheme("llama", "LlamaForCausalLM", pairs=True),
    "mistral": Scheme("mistral", "MistralForCausalLM", pairs=True),
    "mixtral": Scheme("mixtral", "MixtralForCausalLM", mixtral.NAMES, _LOCAL, pairs=True),
    "smollm3": Scheme("smollm3", "SmolLM3ForCausalLM", pairs=True),
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

_GGUF = {"mistral": "llama", "mixtral": "llama", "olmo3": "olmo2"}
# By model_type: the name of the architecture in GGUF files, and the family.
FOLDERS: Mapping[str, tuple[str, Scheme]] = {
    s.model_type: (_GGUF.get(name, name), s) for name, s in SCHEMES.items()
}
