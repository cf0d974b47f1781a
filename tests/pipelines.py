"""Processes for tests of pipelines: started once for a file, they have imported the jobs of all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.gloo_processes import Failure, Processes

__all__ = ["PATIENCE_SECONDS", "Failure", "Processes", "good", "processes"]


PATIENCE_SECONDS = 250
"""For whole trainings on a busy machine."""


@contextmanager
def processes(count: int, **options: float) -> Iterator[Processes]:
    """:class:`Processes` that end with the context."""
    made = Processes(count, preload=["pipeline_server"], **options)
    try:
        yield made
    finally:
        made.close()


def good(answers: list[Any]) -> list[Any]:
    """The answers, if none of them is an exception."""
    for rank, answer in enumerate(answers):
        assert not isinstance(answer, Failure), f"process {rank}:\n{answer.text}"
    return answers
