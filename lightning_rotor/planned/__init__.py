"""A forward that measures and plans itself.

In: a module, a limit and the first batch. Out: the module's output, computed under a plan from the very first call on.
Read ``forward``, ``preparation``, ``cache``; then ``new_shapes``, ``ranks`` and ``out_of_memory`` for what does not
happen at every step.
"""
