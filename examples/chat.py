"""A conversation of two turns with OpenAI's client."""

import os

from openai import OpenAI

url = os.environ.get("OCTAVO_SERVER", "http://127.0.0.1:8000")
client = OpenAI(base_url=f"{url}/v1", api_key="none")

messages = [{"role": "user", "content": "What is the capital of France?"}]
for question in ("", "And of Italy?"):
    if question:
        messages.append({"role": "user", "content": question})
    reply = client.chat.completions.create(model="smollm2", messages=messages, temperature=0)
    answer = reply.choices[0].message.content
    messages.append({"role": "assistant", "content": answer})
    print(f"> {messages[-2]['content']}\n{answer}")
