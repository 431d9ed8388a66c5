"""Releases: a new version gets requests step by step, while tests that may be read after every
request watch it. Pure logic, with the time as an argument; only `store.py` reaches a database.
"""
