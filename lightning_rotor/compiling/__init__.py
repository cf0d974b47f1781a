"""One compiled graph in, one compiled graph out: the planner as the partitioner of a joint graph.

In: AOTAutograd's joint graph of a forward and its backward, and bytes. Out: a forward and a backward whose counted peak
keeps them, with as little recomputation as the planner finds, to be compiled by whoever asked for the split.

- ``joint_graph``: the forward's nodes as stages in a row, cut wherever one activation is alive.
- ``stage_options``: what each stage may save, as torch's own minimum cuts choose it at several budgets.
- ``graph_costs``: bytes and seconds of nodes; ``graph_chain``: of the stages, as a ``Chain``.
- ``backward_writer``: the pair of graphs for a schedule, with nested recomputation in the backward.
- ``peak_count``: the peak of a finished pair, with ``kernel_workspaces``, which kernels take while they run.
- ``partitioner``: the fastest schedule whose pair keeps the budget.
"""
