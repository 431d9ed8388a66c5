"""An answer as it is written, and what it used."""

import os

from openai import OpenAI

url = os.environ.get("OCTAVO_SERVER", "http://127.0.0.1:8000")
client = OpenAI(base_url=f"{url}/v1", api_key="none")

stream = client.chat.completions.create(
    model="smollm2",
    messages=[{"role": "user", "content": "Count from one to ten."}],
    temperature=0,
    max_tokens=64,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
    if chunk.usage:
        print(f"\n{chunk.usage.prompt_tokens} tokens read, {chunk.usage.completion_tokens} written")
