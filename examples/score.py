"""How likely a model finds a text: the log-probabilities of a prompt, nothing generated."""

import octavo

params = octavo.SamplingParams(max_tokens=0, prompt_logprobs=0)
texts = ["The capital of France is Paris.", "The capital of France is cheese."]

with octavo.LLM("smollm2", kv_dtype="f32") as llm:  # the most accurate cache
    for text, scored in zip(texts, llm.generate(texts, params), strict=True):
        known = [p for p in scored.prompt_logprobs if p is not None]
        print(f"{sum(known):8.3f} nats in {len(known)} tokens  {text}")
