"""Micro-batches through stages on several devices, under the schedules of :mod:`torch.distributed.pipelining`.

In: a module, a call of it, options. Out: a PipelinedModule that trains in its place, on all processes together::

    module, call ──► pipelined ──► PipelinedModule ──► PipelineRunner ──► torch's schedules
                     (cut, measured,  (``paused_call``:  (shapes, seeds,   MicroBatchStage
                     partitioned)     user code around)  outputs for all)  └─ Part ─ Executor

Read, plain numbers first:

- ``pipeline_options``: what the user sets, checked;
- ``pipeline_schedule``: the order of works under each schedule; ``runner`` has torch's class for each;
- ``pipeline_simulator``, with ``step_times``, ``device_levels``, ``stage_loads``: what an order takes, without torch;
- ``partition``: where to cut, so that it takes least;
- ``micro_batches``, ``micro_batch_seeds``, ``batch_statistics``: a batch in parts that train as the whole does;
- ``processes``, ``placement``, ``shared_gradients``, ``device_speeds``: who has which weights, and who is how fast;
- ``layouts``, ``part``, ``micro_batch_stage`` and ``runner``: a step;
- ``paused_call``, ``pipelined_module``, ``pipelined``: a module becomes a pipeline;
- ``pipeline`` is the facade for a plain loop, ``balances`` serves torchgpipe's users.

No Lightning in here.
"""
