"""Text that a model writes itself: nobody's, and like what it was trained on."""

from __future__ import annotations

from pathlib import Path

from octavo.engine.request import SamplingParams
from octavo.llm import LLM

COUNT, TOKENS = 128, 512  # texts, and most tokens of each


def written(model: Path) -> list[str]:
    """Texts drawn at temperature 1 from the model's beginning of a text: the same ones whenever
    they are drawn. Raises OctavoError."""
    with LLM(str(model), context=TOKENS + 1) as llm:
        special = llm.tokenizer.special
        ids = (i for i in (special.bos, special.end) if i is not None)
        first = next(ids, None)
        prompt = llm.tokenizer.encode("\n", add_bos=False) if first is None else [first]
        params = SamplingParams(temperature=1, seed=0, max_tokens=TOKENS)
        return [done.text for done in llm.generate([prompt], params, n=COUNT, progress=False)]
