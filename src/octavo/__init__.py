"""Serve language models from an ordinary computer, exactly."""
