"""Builds the wheel: pure functions from (environment, machine facts) to decisions, and thin commands that act on them.

Runs before anything is installed: only the standard library is imported here, setuptools in commands.py and backend.py.
"""
