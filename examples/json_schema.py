"""An answer that matches a JSON schema, whatever the model would rather say."""

import json
import os

from openai import OpenAI

url = os.environ.get("OCTAVO_SERVER", "http://127.0.0.1:8000")
client = OpenAI(base_url=f"{url}/v1", api_key="none")

schema = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 40},
        "country": {"type": "string", "maxLength": 40},
        "inhabitants": {"type": "integer", "minimum": 0},
    },
    "required": ["city", "country", "inhabitants"],
    "additionalProperties": False,
}
reply = client.chat.completions.create(
    model="smollm2",
    messages=[{"role": "user", "content": "Describe Paris: its city, country and inhabitants."}],
    temperature=0,
    response_format={"type": "json_schema", "json_schema": {"name": "place", "schema": schema}},
)
place = json.loads(reply.choices[0].message.content)
print(place["city"], place["country"], place["inhabitants"])
