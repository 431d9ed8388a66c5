"""Documents by meaning. The first argument is the model's name, best that of an embedding model."""

import os
import sys

from openai import OpenAI

url = os.environ.get("OCTAVO_SERVER", "http://127.0.0.1:8000")
client = OpenAI(base_url=f"{url}/v1", api_key="none")
model = sys.argv[1] if len(sys.argv) > 1 else client.models.list().data[0].id

documents = [
    "The Seine flows through Paris.",
    "Bread rises because yeast makes gas.",
    "A compiler turns source code into machine code.",
]
query = "Which river is in the capital of France?"
query_vector, *vectors = (
    item.embedding for item in client.embeddings.create(model=model, input=[query, *documents]).data
)
scores = [sum(a * b for a, b in zip(query_vector, v, strict=True)) for v in vectors]
for score, document in sorted(zip(scores, documents, strict=True), reverse=True):
    print(f"{score:.3f}  {document}")
