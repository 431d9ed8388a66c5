"""Many prompts at once, without a server: they share steps, so it is quicker than one by one."""

import octavo

subjects = ["the sea", "a forest", "the desert", "a city at night"]
params = octavo.SamplingParams(temperature=0.7, seed=7, max_tokens=24, stop="\n")

with octavo.LLM("smollm2") as llm:
    for subject, done in zip(
        subjects, llm.generate([f"One line about {s}:" for s in subjects], params), strict=True
    ):
        print(f"{subject}: {done.text.strip()} [{done.finish_reason}]")
