"""From a module and one call of it to stages.

::

    module, call ──► recorder ──► Recording ──► boundaries ──► GraphSlice ──► GraphCut
                     (one real    (a graph,     (where to      (a stage runs  (holds for a call
                      forward)     guards)       cut)           one of them)   until the module changes)

In: a module and the arguments of a call. Out: a cut, which binds the arguments of each call to the first value of its
stages. Read ``cuts`` first, then ``recorder`` with ``operations`` and ``writer``; ``guards`` and
``size_guards`` say for which calls a recording holds; ``boundaries`` and ``graph_stage`` make stages of it;
``compiled`` is about modules that the user compiled.
"""
