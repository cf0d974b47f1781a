"""A forward that measures and plans itself.

In: modules, a limit and the first batch. Out: the modules' outputs, computed under plans from the first call on.
Read ``step``, ``modules``, ``forward`` and ``plans``; ``limit``, ``calls`` and ``joint`` for calls that share it; then
``cache``, ``new_shapes``, ``ranks`` and ``closed_loop`` for what does not happen at every step.
"""
