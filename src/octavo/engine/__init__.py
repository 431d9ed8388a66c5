"""Requests to steps to tokens."""
