"""Micro-batches through stages on several devices, under the schedules of :mod:`torch.distributed.pipelining`.

In: a module, a call of it, options. Out: a PipelinedModule that trains in its place, on all processes together::

    module, call ──► pipelined ──► PipelinedModule ──► PipelineRunner ──► torch's schedules
                     (cut, measured,  (``step``: user     (shapes, seeds,   MicroBatchStage
                     partitioned)     code around it)     outputs for all)  └─ Part ─ Executor

Read ``pipeline_schedule`` and ``pipeline_simulator`` (plain numbers), ``partition``, ``micro_batches``, ``placement``,
then ``runner``, ``step``, ``pipelined``. No Lightning in here.
"""
