"""split(m, i, l) on an accelerator, for whole diagonals at once; see :mod:`lightning_rotor.planning.splits` for what it is.

Only this runs there: it is nearly all of the work, and two additions on numbers that stay where they are. Each diagonal goes to the host as split
rows and comes back as bodies and rests, a few hundred megabytes in all for the longest chains.
"""

from __future__ import annotations

import numpy as np
import torch

from lightning_rotor.planning.decisions import Decisions, Integers
from lightning_rotor.planning.packed import Seconds
from lightning_rotor.planning.splits import SplitRows
from lightning_rotor.planning.storage import Storage

# Numbers that are added up at once: at four bytes each, and eight for where to find them, half a gigabyte.
_MOST_SUMS = 1 << 24


class DeviceSplits:
    """Finds the best segments of many intervals at once.

    Args:
        decisions: The chain.
        storage: Rows of shorter intervals, on the host.
        device: Where to add them up.
    """

    def __init__(self, decisions: Decisions, storage: Storage, device: str) -> None:
        self._decisions, self._storage, self._device = decisions, storage, torch.device(device)
        number = torch.float32 if storage.number is np.float32 else torch.float64
        self._size = storage.body_rows.shape[1]
        # Zeros, for rows that are not filled yet are read and thrown away, and what is thrown away must not be NaN.
        self._bodies = torch.zeros(storage.body_rows.shape, dtype=number, device=device)
        self._rests = torch.zeros(storage.rest_rows.shape, dtype=number, device=device)

    def follow(self, first: Integers, length: int) -> None:
        """Take over what the storage has received for intervals of one length (less one)."""
        storage, last = self._storage, first + length
        for base in storage.body_base[:, first]:
            self._copy(self._bodies, storage.body_rows, base[base >= 0] + length)
        for ending in range(len(storage.rest_base)):
            base = storage.rest_base[ending, 0, last]
            self._copy(self._rests, storage.rest_rows, (base + first)[base >= 0])

    def _copy(self, target: torch.Tensor, source: Seconds, rows: Integers) -> None:
        if len(rows):
            target.index_copy_(0, self._tensor(rows), torch.from_numpy(source[rows]).to(self._device))

    def of(self, first: Integers, last: Integers, ending: int, *, variants: int) -> SplitRows:
        """split() of some intervals of the same length."""
        decisions, storage, length = self._decisions, self._storage, int(last[0] - first[0])
        most_paid = int(decisions.input_slots[first].max())
        found = SplitRows(variants, len(first), self._size, most_paid, storage.number)
        if length == 0:
            return found
        needs, is_top = decisions.thresholds, bool(last[0] == decisions.top)
        begins, ends = first[:, None], first[:, None] + np.arange(length)
        held, handed_on = needs.held[begins, ends], needs.handed_on[begins, ends]
        base = np.zeros((len(first), 1), np.int64)
        if not is_top:
            base = (decisions.ending_base[last, ending] + needs.remembered[first, last])[:, None]
        low = self._tensor(
            np.minimum(held + np.maximum(decisions.peak[is_top][begins, ends] + base, handed_on), self._size)
        )
        rest = storage.rest_base[ending, 0, last][:, None] + ends + 1
        rest_starts = self._tensor(rest * storage.width + storage.alive[ends + 1] - held - handed_on)
        for variant in range(variants):
            has = np.flatnonzero(decisions.variant_count[first] > variant)
            if not len(has):
                break
            rows = storage.body_base[variant, first[has]][:, None] + np.arange(length)
            body_starts = self._tensor(rows * self._size - held[has])
            chosen = self._tensor(has)
            best = self._least_sums(body_starts, rest_starts[chosen], low[chosen]).cpu().numpy()
            again = needs.segment_seconds if not is_top else 0.0
            found.rows(variant)[has] = best + storage.number(again)
        return found

    def _least_sums(self, body_starts: torch.Tensor, rest_starts: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        """``(intervals, size)``: minimum over the second axis of all three, ``(intervals, ends)``; infinite below ``low``."""
        slots = torch.arange(self._size, device=self._device)
        bodies, rests = self._bodies.view(-1), self._rests.view(-1)
        best = torch.full((len(low), self._size), torch.inf, dtype=bodies.dtype, device=self._device)
        step = max(_MOST_SUMS // best.numel(), 1)
        for parts in zip(body_starts.split(step, 1), rest_starts.split(step, 1), low.split(step, 1), strict=True):
            body, rest, allowed = (part[..., None] for part in parts)
            # What is outside the row is below `low`, so it only must exist.
            sums = bodies[(body + slots).clamp_(0, bodies.numel() - 1)]
            sums += rests[(rest + slots).clamp_(0, rests.numel() - 1)]
            torch.minimum(best, sums.masked_fill_(slots < allowed, torch.inf).amin(1), out=best)
        return best

    def _tensor(self, integers: Integers) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(integers)).to(self._device)
