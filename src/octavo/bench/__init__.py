"""Measurements as commands; their results are JSON."""
