r"""What runs of stages take at least as pipeline stages, without planning them: seconds, for every run that may matter.

When the forwards of all ``k`` micro-batches in flight are done, each of them holds what its schedule keeps. So the kept sets of a run fit ``k``
times beside weights and gradients, and what does not fit is recomputed. How much time that takes at least is a fractional knapsack: the
stages that free most bytes per second of recomputation are given up first. Segments' inputs, peaks and nesting are left out, so it is a
lower bound, and where nothing needs to be given up it is exact.
"""

from __future__ import annotations

import math

import numpy as np

from lightning_rotor.planning.partition.problem import Costs, Reals

# Numbers in one array of the knapsack.
_MOST_NUMBERS = 4_000_000


class LeastSeconds:
    """Lower bounds by pipeline stage, first stage of the chain and length less one: ``(stages, n, lengths)``, infinite where a run cannot be.

    Args:
        costs: The problem.
        longest: Runs of more stages of the chain than this are left out.

    Attributes:
        seconds: Forward and backward of a micro-batch.
        forward: The forward.
        backward: The backward.
        most_forward: No forward takes longer.
        most_backward: Nor a backward, if both together take no longer than ``seconds``: more of it costs more than it can hide.
    """

    def __init__(self, costs: Costs, longest: int) -> None:
        self._costs = costs
        problem = costs.problem
        chain, stages = problem.chain, problem.stages
        n = len(chain)
        self.longest = min(longest, n - stages + 1)
        whole = [[option.forward_seconds + option.backward_seconds for option in stage.options] for stage in chain]
        self._least = np.array([min(seconds) for seconds in whole])
        forwards = [[stage.discard_seconds, *(each.forward_seconds for each in stage.options)] for stage in chain]
        backwards = [min(each.backward_seconds for each in stage.options) for stage in chain]
        self._read_ways()
        plain = self._sums(self._least)
        forward, most_forward = (
            self._sums(np.array(list(map(min, forwards)))),
            self._sums(np.array(list(map(max, forwards)))),
        )
        backward = self._sums(np.array(backwards))
        if problem.recompute in ("always", "except_last"):
            plain = plain + self._checkpointed()
        speeds = [problem.device_of(stage).speed for stage in range(stages)]
        self.seconds = np.stack([plain / speed for speed in speeds])
        self.forward = np.stack([forward / speed for speed in speeds])
        self.backward = np.stack([backward / speed for speed in speeds])
        self.most_forward = np.stack([most_forward / speed for speed in speeds])
        if problem.recompute == "rotor":
            for stage in range(stages):
                memory = problem.device_of(stage).memory_bytes
                if memory is not None:
                    self.seconds[stage] += self._recomputed(stage, memory) / speeds[stage]
        self.most_backward = self.seconds - self.forward
        for stage in range(stages):
            self._forbid_impossible(stage, n, stages)

    def _sums(self, values: Reals) -> Reals:
        """``(n, lengths)``: over every run."""
        before = np.concatenate(([0.0], np.cumsum(values)))
        n = len(values)
        ends = np.minimum(np.arange(n)[:, None] + np.arange(1, self.longest + 1), n)
        sums: Reals = before[ends] - before[:-1, None]
        return sums

    def _forbid_impossible(self, stage: int, n: int, stages: int) -> None:
        """Every pipeline stage before and behind needs a stage of the chain."""
        first = np.arange(n)[:, None]
        last = first + np.arange(self.longest)
        wrong = (first < stage) | (last > n - (stages - stage)) | ((stage == 0) & (first > 0))
        if stage == stages - 1:
            wrong |= last != n - 1
        self.seconds[stage][np.broadcast_to(wrong, self.seconds[stage].shape)] = math.inf

    # ---------------------------------------------------------------- recomputation

    def _read_ways(self) -> None:
        """What a stage holds when it is kept as plain training keeps it, and the least seconds per byte to hold less."""
        chain = self._costs.problem.chain
        self._kept, self._price = np.zeros(len(chain)), np.full(len(chain), math.inf)
        self._again = np.zeros(len(chain))
        for number, stage in enumerate(chain):
            # Of a boundary that both sides save, neither side frees anything alone.
            shared = number == 0 or any(option.saved_output_bytes for option in chain.stages[number - 1].options)
            held = [each.saved_bytes + (0 if shared else each.saved_input_bytes) for each in stage.options]
            seconds = [each.forward_seconds + each.backward_seconds for each in stage.options]
            most = max(held)
            again = [
                stage.discard_seconds + each.backward_seconds + min(each.replay_seconds, each.forward_seconds)
                for each in stage.options
            ]
            bare = [stage.discard_seconds + each.backward_seconds for each in stage.options if not each.saved_tensors]
            ways = list(zip(held, seconds, strict=True))
            if stage.recomputable:
                ways.append((0, min(again + bare)))
            extra = [(most - taken, max(time - self._least[number], 0.0)) for taken, time in ways]
            self._kept[number] = most
            self._price[number] = min((time / freed for freed, time in extra if freed > 0), default=math.inf)
            self._again[number] = stage.discard_seconds if stage.recomputable and not bare else 0.0

    def _checkpointed(self) -> Reals:
        """A whole run in one segment: all forwards once more, the last one up to its last saved tensor."""
        chain = self._costs.problem.chain
        saved = np.array([max(each.forward_seconds - each.replay_seconds for each in stage.options) for stage in chain])
        n = len(chain)
        ends = np.minimum(np.arange(n)[:, None] + np.arange(self.longest), n - 1)
        total: Reals = np.maximum(self._sums(self._again) - np.maximum(saved, 0)[ends], 0)
        return total

    def _recomputed(self, stage: int, memory_bytes: int) -> Reals:
        """``(n, lengths)``: seconds at least for what does not fit into so much memory."""
        n, longest = len(self._kept), self.longest
        in_flight = self._costs.problem.in_flight[stage]
        extra = np.zeros((n, longest))
        excess = self._excess(stage, memory_bytes) / in_flight
        # Every pipeline stage before and behind has a stage of the chain at least.
        behind = n - (self._costs.problem.stages - stage)
        rows = stage + np.flatnonzero((excess[stage : behind + 1] > 0).any(axis=1))
        step = max(_MOST_NUMBERS // longest**2, 1)
        for begin in range(0, len(rows), step):
            first = rows[begin : begin + step]
            members = np.minimum(first[:, None] + np.arange(longest), n - 1)
            order = np.argsort(self._price[members], axis=1, kind="stable")
            places = np.take_along_axis(members, order, axis=1)
            inside = order[:, :, None] < np.arange(1, longest + 1)
            freed = np.cumsum(self._kept[places][:, :, None] * inside, axis=1)
            needed = np.clip(excess[first], 0, None)[:, None, :]
            given = np.diff(np.minimum(freed, needed), axis=1, prepend=0.0)
            price = self._price[places]
            with np.errstate(invalid="ignore"):
                spent = np.where(given > 0, given * price[:, :, None], 0.0).sum(axis=1)
            # What cannot be freed at all is somebody else's to refuse: bounds of bytes are rough.
            extra[first] = np.where(np.isfinite(spent), spent, 0.0)
        return extra

    def _excess(self, stage: int, memory_bytes: int) -> Reals:
        """``(n, lengths)``: bytes that do not fit if every run keeps everything, over all micro-batches in flight."""
        costs, in_flight = self._costs, self._costs.problem.in_flight[stage]
        n, longest = len(self._kept), self.longest
        first = np.arange(n)[:, None]
        ends = np.minimum(first + np.arange(longest), n - 1)
        static = costs.static_table(stage, first, ends) + costs.gradient_table(first, ends)
        output = np.array([each.output_bytes for each in costs.problem.chain])[ends]
        excess: Reals = in_flight * (self._sums(self._kept) + output) + static - memory_bytes
        return excess
