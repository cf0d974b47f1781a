"""A schedule runs, with exact gradients.

In: stages and a schedule. Out: an :class:`~lightning_rotor.execution.executor.Executor`, called like the stages in a
row. Read in this order:

- ``executor``: the schedule as nested calls. ``segment`` is one recomputed run of stages, ``recomputation`` drops what
  autograd saves in it and makes it again.
- ``passes``: the rules for a second forward. ``first_pass`` keeps them, with ``segment_state`` (what stages read and
  change), ``tensors_read``, ``lent_tensors``, ``settings`` and ``observers``.
- ``inversion``: inputs are rebuilt instead of kept, with ``boundary``, ``moment``, ``nested_backward`` and
  ``drift_guard``.
- ``moving`` has what items hold elsewhere meanwhile: on the host (``pinned_memory``), or in a file (``file_memory``).
  ``places`` are free ranges there, ``link_speed`` measures copies.
- ``pending`` tells when the backward of a call has come, ``stopwatch`` how long it took; ``isolated`` runs without a
  trace.
"""
