"""Bytes that a process holds beside a chain, and bytes that it may hold.

In: a limit as users write it, a model and its optimizers. Out: the bytes that a plan may use. Read in this order:

- ``budget``: what is left of a limit, and the sentence of every error that names a limit (``limit_error``).
- ``resident_memory``: what a process holds, and when; ``held`` counts what is there.
- ``optimizer_prediction``: the state of an optimizer that has not stepped yet, and what its steps take, by dry steps
  of ``optimizer_copies``, whose allocations ``step_allocations`` counts. LBFGS alone is counted by hand.
- ``device_memory``: what a device has, and what a user's limit means on it.
"""
