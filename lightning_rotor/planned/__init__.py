"""A forward that measures and plans itself.

In: a module, a limit and the first batch. Out: the module's output, computed under a plan from the first call on.
Read ``step``, ``forward`` and ``plans``; then ``cache``, ``new_shapes``, ``ranks`` and ``closed_loop`` for what does
not happen at every step.
"""
