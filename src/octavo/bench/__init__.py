"""Benchmarks behind `octavo bench`."""
