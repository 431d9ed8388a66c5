"""Two real models in one server, with their engines in its process: each is the model it is alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import octavo
from octavo.generate.load import load
from tests.unit.fake_models import listening

PROMPTS = ["The capital of France is", "Once upon a time", "One, two, three,"]


def test_each_answers_as_alone(smollm2: Path, minilm: Path) -> None:
    words = load("smollm2", offline=True, context=512, memory="1GiB")
    dots = load(str(minilm), offline=True, memory="1GiB")
    params = octavo.SamplingParams(temperature=0, max_tokens=12)
    with octavo.LLM(words) as llm, octavo.LLM(dots) as encoder:
        expected = [c.text for c in llm.generate(PROMPTS, params, progress=False)]
        vectors = [v.tolist() for v in encoder.embed(PROMPTS)]
        with listening(words, dots) as server:

            def complete(prompt: str) -> str:
                body = {"model": words.name, "prompt": prompt, "max_tokens": 12, "temperature": 0}
                return str(server.json("/v1/completions", body)[1]["choices"][0]["text"])

            def embed(prompt: str) -> list[float]:
                body = {"model": dots.name, "input": prompt}
                found: list[float] = server.json("/v1/embeddings", body)[1]["data"][0]["embedding"]
                return found

            with ThreadPoolExecutor(6) as threads:
                texts = threads.map(complete, PROMPTS)
                found = threads.map(embed, PROMPTS)
                assert list(texts) == expected
                assert list(found) == vectors
            status, reply = server.json("/v1/completions", {"model": dots.name, "prompt": "a"})
            assert (status, reply["error"]["code"]) == (400, "unsupported_task")
            cards = {m["id"]: m["max_model_len"] for m in server.json("/v1/models")[1]["data"]}
            assert cards == {words.name: 512, dots.name: dots.context}
            used = server.ask("/metrics")[1]
            for name in (words.name, dots.name):
                assert f'octavo_requests_running{{model_name="{name}"}} 0.0' in used
