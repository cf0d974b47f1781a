"""From a module and one call of it to stages.

::

    module, call ──► symbols or recorder ──► graph ──► boundaries ──► GraphStage ──► GraphCut
                     (a traced or a          (watched: what it        (a stage runs  (holds for a call
                      recorded forward)       takes for granted)       one of them)   until the module changes)

In: a module and the arguments of a call. Out: a cut, which binds the arguments of each call to the first value of its
stages. Read ``cutting``, ``cuts``, ``boundaries``, then ``recorder`` or ``symbols``.
"""
