"""What a process holds, and what it may hold.

In: a limit as users write it, a model and its optimizers. Out: the bytes that a plan may use. Read ``budget``,
``resident_memory`` and ``held``; then ``optimizer_prediction`` for what is not there yet, and ``device_memory`` for
what a device has.
"""
