"""A forward that measures and plans itself, and the training steps around it.

In: modules, a limit and the first batch. Out: the modules' outputs, computed under plans from the first call on.

The way of a call, in the order in which it happens:

- ``forward``: the forward in the place of the module's own, put there by ``attachment``. If memory runs out,
  ``out_of_memory`` says if it can run again. ``key_value_caches`` takes caches away that nobody reads.
- ``module_plans``: the plan for this call, a new shape's included. ``signature`` tells calls apart, ``cache`` has the
  plan of each, ``prepared`` is an entry of it. ``plan_settings`` are the same for all.
- ``call_profiler``: what the call costs, with other code of compiled stages where the budget asks for it.
- ``known_cuts``: the stages of the module for such a call.
- ``measurements``: costs of the sizes that were measured, and bounds for others. ``other_sizes`` takes a plan over from
  another size; ``records`` are costs and plans in a checkpoint.
  ``size_classes`` rounds sizes in steps of several calls.
- ``offloading``: the memory that plans may move to, and the link to it.
- ``budget_source``: the question that all of these ask, what a plan may use, and the events that they tell of.

The way of a step, which answers it:

- ``step_planner``: beginning, calls and end of each step. ``step_state`` is the table of a training's states,
  ``running_step`` the step that runs now.
- ``modules``: the planned modules. ``target_search`` finds them where the user names none, and ``unseen_forward`` waits
  for the first call of one that no dry run has met.
- ``compiled_steps``: steps of a model that was compiled as a whole, which run as they are while they keep the limit.
- ``limit``: the budget of a chain, and the errors where no plan keeps the limit.
- ``step_watch``: peaks of measured steps; ``corrections``: what they teach, such as the bytes of the loss.
  ``kept_sizes``: the sizes that need not be measured any more.
- ``joint_plans``: one plan for calls that are alive together. ``joint_paths`` are such calls, ``path_plans`` the plan
  of one path, ``around_calls`` the bytes that steps have taken around its calls. ``plans_with_room`` lends plans to
  calls that come in another step, and ``later_calls`` says what may come behind them.

Around both: ``loop`` is the training loop as plans see it, ``agreement`` that of processes that exchange messages,
``batch_sizes`` the advice on the best batch size.
"""
