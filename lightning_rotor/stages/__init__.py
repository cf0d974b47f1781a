"""What stages are: callables in a row, and what their code reads and changes besides what it takes and gives.

In: a module. Out: one :class:`~lightning_rotor.stages.sequential.Stage` after the other, with the numbers of the values
that each takes and makes. Read ``sequential`` first (also what an invertible module is); ``snapshot`` remembers,
compares and puts back what user code can reach, ``generators`` the state of random generators.
"""
