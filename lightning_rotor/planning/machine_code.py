"""Whether a table is worth machine code, and what the code needs; see :mod:`lightning_rotor.planning.compiled`."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np
import numpy.typing as npt

from lightning_rotor.planning.kernel import Seconds, Storage
from lightning_rotor.planning.requirements import Decisions, Integers

_log = logging.getLogger(__name__)

# Loops add up so much in half a second, which is how long it takes to load Numba and the code.
_WORTHWHILE_SUMS = 2e8
# Lengths that are solved in one call.
_LENGTHS = 8


def is_worthwhile(stages: int, slots: int) -> bool:
    """Whether a table is so large that compiled code pays, even if it is the only one of its process."""
    return stages**3 / 6 * slots >= _WORTHWHILE_SUMS


@cache
def compiled_code() -> ModuleType | None:
    """The module of compiled functions; None where it cannot be had: planning then takes longer and finds the same."""
    try:
        import numba

        from lightning_rotor.planning import compiled
    except ImportError as error:  # Numba raises it, too, if it is too old for NumPy
        _log.debug("long chains are planned by loops: %s", error)
        return None
    except RuntimeError as error:  # no place to keep compiled code: compiling takes longer than it saves
        _log.info("long chains are planned by loops, for Numba cannot keep compiled code: %s", error)
        return None
    # Without compilation the same code would run as Python, a thousand times slower.
    return None if getattr(numba.config, "DISABLE_JIT", 0) else compiled


class CompiledTable:
    """Fills a storage by compiled code.

    Args:
        decisions: The chain.
        storage: Where its rows go, in single precision.
        twins: See :func:`lightning_rotor.planning.kernel.first_twins`.
        whole: Where the numbers of the whole step go.
        code: :mod:`lightning_rotor.planning.compiled`.
    """

    def __init__(
        self, decisions: Decisions, storage: Storage, twins: Integers | None, whole: Seconds, code: ModuleType
    ) -> None:
        self._code = code
        if not code.solve_lengths.signatures and not any(
            Path(code.solve_lengths.stats.cache_path).glob("compiled.*.nbi")
        ):
            _log.info("compiling the planner for long chains, which takes some seconds, once")
        self._arrays = _arrays(decisions, storage, twins, whole, code)

    def solve(self, band: range, lengths: range) -> None:
        """All intervals that end in ``band`` and have one of ``lengths`` (less one)."""
        self._code.solve_lengths(self._arrays, (band.start, band.stop), (lengths.start, lengths.stop))

    @staticmethod
    def steps(band: range) -> list[range]:
        """The lengths to solve in one call each."""
        return [range(begin, min(begin + _LENGTHS, band.stop)) for begin in range(0, band.stop, _LENGTHS)]


def _arrays(decisions: Decisions, storage: Storage, twins: Integers | None, whole: Seconds, code: ModuleType) -> object:
    """Everything in the form that is compiled for. Which column is what, the compiled module says."""
    d, needs = decisions, decisions.thresholds
    n, most = d.top + 1, len(storage.body_base)
    chunks = -(-storage.size // code.CHUNK)
    most_held = [int(needs.held[first, first:].max()) for first in range(n)]
    stages = [d.outermost, d.ending_count, d.variant_count, d.class_count, d.is_apart, d.gives_up_input, d.input_slots]
    stages += [np.array(needs.forward_base), np.array(most_held)]
    leaves = [d.retained, d.freed, d.output_class, d.forward, d.replay, d.bare]
    return code.Arrays(
        size=storage.size,
        segment_seconds=float(needs.segment_seconds),
        stages=_stacked(*stages),
        variants=_stacked(d.alike_from[:, :most], d.alike[:, :most], d.columns, d.bare_columns),
        contexts=np.stack([d.variant, d.needs_as_segment]),
        endings=np.concatenate([_stacked(d.ending_base, d.ending_trigger), d.ends], axis=-1),
        class_held=d.class_held,
        input_retained=d.input_retained,
        leaves=np.concatenate([_stacked(*leaves), d.backward, d.last_backward], axis=-1),
        seconds=np.stack([d.seconds, d.last_seconds, d.bare_seconds], axis=-1),
        discard_before=d.discard_before,
        pairs=np.stack([needs.discard, needs.first_discard, needs.remembered, needs.held, needs.handed_on]),
        recording=np.stack(d.recording),
        twins=np.tile(np.arange(n), (n, 1)) if twins is None else twins,
        body_base=storage.body_base,
        rest_base=storage.rest_base,
        rest_rank=np.ascontiguousarray(storage.rest_rank, np.int64),
        bodies=storage.body_rows,
        rests=storage.rest_rows,
        body_least=np.zeros((chunks, len(storage.body_rows)), np.float32),
        rest_least=np.zeros((chunks, len(storage.rest_rows)), np.float32),
        whole=whole,
    )


def _stacked(*columns: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> Integers:
    return np.ascontiguousarray(np.stack([column.astype(np.int64) for column in columns], axis=-1))
