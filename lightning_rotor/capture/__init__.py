"""From a module and one call of it to stages.

::

    module, call ──► recorder ──► Recording ──► boundaries ──► GraphSlice ──► GraphCut
                     (one real    (a graph,     (where to      (a stage runs  (holds for a call
                      forward)     guards)       cut)           one of them)   until the module changes)

In: a module and the arguments of a call. Out: a cut, which binds the arguments of each call to the first value of its
stages. Read in this order:

- ``sequentialize``: which way to a chain is taken. ``graph_cut`` is the way along a graph.
- ``attempts``: a forward is recorded until a ``recording`` holds. A module in it that cannot be recorded becomes one
  operation; where nothing is left to record, the forward is refused (``ModelError``).
- ``recorder``, with ``shown_calls`` and ``dispatch_check``: what it sees. ``operations``, ``module_calls`` and
  ``python_functions`` say what becomes a node. ``saved_in_code`` has what code needs that goes back through itself.
- ``writer`` writes the graph: ``traced_numbers`` are sizes, ``value_memory`` the tensors, ``node_facts`` what a node
  knows, ``recorded_checks`` nodes that check. A forward that branches on a value is judged here: ``GraphWriter.guard``
  keeps the value as a condition of the recording, or raises ``UntraceableError``.
- ``surroundings``: what the code could read outside of modules, how far (``reach``), by which names
  (``names_in_code``). Functions under ``functools.cache`` are ``memoized`` there.
- ``guards``: whether a recording holds for a call. ``call``, ``ambient``, ``watch``, ``notes`` and ``size_guards`` are
  its parts, ``result_sizes`` what the last one knows of frequent operations, ``copies`` how values are compared,
  ``module_facts`` the shorter way of a settled call. What a forward is given and does not read
  (``unread_arguments``) may be anything.
- ``boundaries``, with ``names_of_stages`` and ``graph_stage`` (its code is text of ``source``), makes stages of a
  recording; ``differences`` compares two.
- ``compiled`` is about modules that the user compiled; ``compiled_call`` makes one stage of one that was compiled as a
  whole.
"""
