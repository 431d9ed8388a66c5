"""OpenAI's API: bodies to requests, and text to replies."""
