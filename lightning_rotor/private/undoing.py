"""Changes of what is not ours that are undone whatever happens."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def undone(undo: Callable[[], object]) -> Iterator[None]:
    """Context at whose end ``undo`` runs, and once more if an exception ends it early.

    An interrupt (Ctrl-C) may come between any two lines, also of ``undo``, and one in the middle of a change. So the
    change is made inside of the context, and ``undo`` does no harm where there is nothing to undo.
    """
    is_over = False
    try:
        try:
            yield
        finally:
            undo()
            is_over = True
    finally:
        # An interrupt has ended the first try somewhere in its middle. A second one seldom comes so soon.
        if not is_over:
            undo()
