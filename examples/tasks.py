"""Many questions at once and a stream beside them, in an asynchronous program."""

import asyncio

import octavo

params = octavo.SamplingParams(temperature=0, max_tokens=24)


async def main() -> None:
    async with octavo.AsyncLLM("smollm2") as llm:

        async def ask(question: str) -> str:
            (answer,) = await llm.chat(question, params)
            return f"{question} {answer.text}"

        answers = asyncio.gather(*(ask(f"What is {n} plus {n}?") for n in range(1, 5)))
        async for piece in llm.stream("Once upon a time", params):
            print(piece, end="", flush=True)
        print("", *await answers, sep="\n")


asyncio.run(main())
