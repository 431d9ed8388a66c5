"""A LoRA adapter beside its model. Give the folder that PEFT wrote, and the model it belongs to."""

import sys

import octavo

folder = sys.argv[1]
model = sys.argv[2] if len(sys.argv) > 2 else "smollm2"
params = octavo.SamplingParams(temperature=0, max_tokens=16)

with octavo.LLM(model, adapters={"mine": folder}) as llm:
    prompts = ["Once upon a time"] * 2
    plain, adapted = llm.generate(prompts, params, adapter=["", "mine"])
    print(f"model:   {plain.text}\nadapter: {adapted.text}")
