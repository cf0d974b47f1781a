"""A module that holds what other code reads, for tests/test_holders.py."""

from typing import Any

held: Any = None


def get() -> Any:
    """What is held."""
    return held
