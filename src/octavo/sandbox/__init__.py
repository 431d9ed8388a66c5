"""Worker processes with limits on CPU time and memory, for untrusted templates and grammars."""
