"""A schedule runs, with exact gradients.

In: stages and a schedule. Out: an :class:`~lightning_rotor.execution.executor.Executor`, which is called like the stages
one after the other. Read ``executor``, ``recomputation`` and ``segment_state``; ``inversion`` and ``reverse`` rebuild
inputs instead of keeping them.
"""
