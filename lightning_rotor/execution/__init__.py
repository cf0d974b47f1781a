"""A schedule runs, with exact gradients.

In: stages and a schedule. Out: an :class:`~lightning_rotor.execution.executor.Executor`, called like the stages in a
row. Read ``executor``, then ``passes`` (how a stage runs first and again) and ``segment_state`` (what it reads and
changes). ``inversion`` rebuilds inputs instead of keeping them; ``isolated`` runs without a trace.
"""
