"""Processes and HTTP: an engine in a child process behind an OpenAI-compatible API."""
