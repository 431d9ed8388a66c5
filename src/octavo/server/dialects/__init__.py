"""The APIs that the server speaks, each a translation to and from the neutral request.

The first writes the errors of paths that belong to none.
"""

from octavo.server.dialects import anthropic, llama_cpp, ollama, openai

DIALECTS = (openai.DIALECT, openai.RESPONSES, anthropic.DIALECT, ollama.DIALECT, llama_cpp.DIALECT)
