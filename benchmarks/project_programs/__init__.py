"""Programs that nobody here wrote: modules and recipes of other packages, in sizes for two cores, with random weights and data.

A program is a function that takes a :class:`~benchmarks.project_programs.program.Run` and trains, as a user of the package does. Each file has
those of one field. ``program`` says what they share.
"""
