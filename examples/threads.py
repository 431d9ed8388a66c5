"""One model, several threads and two streams read by turns: each gets what it would get alone."""

from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest

import octavo

params = octavo.SamplingParams(temperature=0, max_tokens=24)

with octavo.LLM("smollm2") as llm:
    with ThreadPoolExecutor(4) as pool:
        questions = [f"What is {n} plus {n}?" for n in range(1, 5)]
        for question, (answer,) in zip(
            questions, pool.map(lambda q: llm.chat(q, params), questions), strict=True
        ):
            print(f"{question} {answer.text}")

    left = llm.stream("Once upon a time", params)
    right = llm.stream("In a galaxy far away", params)
    for pieces in zip_longest(left, right, fillvalue=""):
        print(" | ".join(pieces))
