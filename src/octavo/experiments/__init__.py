"""Experiments: variants of a model, its parameters or its prompt, compared on requests of users."""
