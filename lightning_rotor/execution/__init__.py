"""A schedule runs, with exact gradients.

In: stages and a schedule. Out: an :class:`~lightning_rotor.execution.executor.Executor`, called like the stages in a
row. Read ``executor``, ``recomputation``, ``segment_state``; ``inversion`` and ``reverse`` rebuild inputs instead of
keeping them.
"""
