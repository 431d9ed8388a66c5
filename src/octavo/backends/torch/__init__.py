"""Execution with PyTorch."""
