"""Two real engines behind one router: first tokens by the policy, with prompts that share prefixes.

    python benchmarks/replicas.py [--model smollm2] [--policies cost random]

Each policy has engines of its own, whose caches hold half of the groups each. Prompts of 512 shared and
16 own tokens, 10 groups, replies of 16 tokens, at random times. The first 20 requests are not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from contextlib import aclosing

from octavo.checkpoint.hub import locate
from octavo.client.process import EngineProcessClient
from octavo.client.replicas import Replicas
from octavo.engine.constraint import TokenTable
from octavo.engine.events import Token
from octavo.engine.open import open_model
from octavo.engine.plan import make_plan
from octavo.engine.request import Request, SamplingParams

GROUPS, PREFIX, QUESTION, REPLY = 10, 512, 16, 16
WARM = 2 * GROUPS  # requests that are not counted


async def ask(pool: Replicas, prompt: list[int]) -> float:
    """Seconds until the first token of a reply that is read to its end."""
    began, first = time.perf_counter(), 0.0
    params = SamplingParams(max_tokens=REPLY, temperature=0, ignore_eos=True)
    request = Request(id=str(id(prompt)), prompt=prompt, params=params)
    async with aclosing(pool.submit(request)) as events:
        async for event in events:
            if isinstance(event, Token) and not first:
                first = time.perf_counter() - began
    return first


async def measure(model: str, policy: str, requests: int, rate: float, memory: str) -> str:
    path = locate(model).path
    opened = open_model(path)
    plan = make_plan(opened.compiled, name=model, context=1024, memory=memory, replicas=2)
    clients = [EngineProcessClient(str(path), plan, opened.vocabulary) for _ in range(2)]
    pool, draw = Replicas(clients, policy), random.Random(5)
    pool.use(TokenTable([], [], []))
    try:
        await pool.start()
        running = []
        for i in range(WARM + requests):
            group = draw.randrange(GROUPS)
            prompt = [100 + group] * PREFIX + [1000 + i] * QUESTION
            running.append(asyncio.create_task(ask(pool, prompt)))
            await asyncio.sleep(draw.expovariate(rate))
        cuts = statistics.quantiles((await asyncio.gather(*running))[WARM:], n=100)
        cached = pool.stats["cached_tokens"] / pool.stats["prompt_tokens"]
    finally:
        await pool.close()
    return f"{policy:14} {1e3 * cuts[49]:10,.0f} {1e3 * cuts[89]:10,.0f} {cached:9.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--policies", nargs="+", default=["cost", "random"])
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--memory", default="630MiB", help="of both engines")
    parser.add_argument("--rate", type=float, default=1.5, help="requests a second")
    options = parser.parse_args()
    print(f"{'':14} {'TTFT p50':>10} {'p90 ms':>10} {'cached':>9}")
    for policy in options.policies:
        given = options.model, policy, options.requests, options.rate, options.memory
        print(asyncio.run(measure(*given)), flush=True)


if __name__ == "__main__":
    main()
