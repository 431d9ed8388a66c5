"""A function that the model calls; its arguments match the schema by construction."""

import json
import os

from openai import OpenAI

url = os.environ.get("OCTAVO_SERVER", "http://127.0.0.1:8000")
client = OpenAI(base_url=f"{url}/v1", api_key="none")


def weather(city: str, unit: str) -> str:
    return f"18 degrees {unit} in {city}"


parameters = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 40},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
reply = client.chat.completions.create(
    model="smollm2",
    messages=[{"role": "user", "content": "What is the weather in Oslo, in celsius?"}],
    temperature=0,
    tools=[{"type": "function", "function": {"name": "weather", "parameters": parameters}}],
    tool_choice={"type": "function", "function": {"name": "weather"}},
)
call = reply.choices[0].message.tool_calls[0]
print(weather(**json.loads(call.function.arguments)))
