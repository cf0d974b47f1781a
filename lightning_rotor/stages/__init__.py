"""What stages are: callables in a row, and what their code reads and changes besides what it takes and gives.

In: a module. Out: one :class:`~lightning_rotor.stages.sequential.Stage` after the other, with the numbers of the values
that each takes and makes. Read in this order:

- ``sequential``: stages of an ``nn.Sequential``. ``wiring`` is which values go where, ``threaded_skips`` those of skip
  connections, ``known_layers`` what is known of torch's layers, ``inverses`` what an invertible module is,
  ``submodules`` finds them by their names.
- ``snapshot`` remembers, compares and puts back what user code can reach, with ``holders`` (everything that holds
  values), ``containers`` (without asking their own methods) and ``user_code`` (told from a library's).
- ``generators``: the state of random generators; ``draws`` who draws from them, ``other_threads`` who else may.
"""
