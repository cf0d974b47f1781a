"""A forward that measures and plans itself.

In: modules, a limit and the first batch. Out: the modules' outputs, computed under plans from the first call on.
Read ``step``, ``modules``, ``forward``, ``plans``, ``cuts`` and ``cache``; ``limit`` and ``joint`` for calls that share
it; then ``loop``, the training around it and its other processes.
"""
