"""Execution on an NVIDIA GPU: torch for memory, streams and graphs, Triton for kernels."""
