#!/bin/sh
# A question with curl.
curl -s "${OCTAVO_SERVER:-http://127.0.0.1:8000}/v1/chat/completions" \
  -H 'content-type: application/json' \
  -d '{"model": "smollm2", "messages": [{"role": "user", "content": "What is the capital of France?"}]}'
