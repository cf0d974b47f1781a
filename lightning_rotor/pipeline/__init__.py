"""Micro-batches through stages on several devices, under the schedules of :mod:`torch.distributed.pipelining`.

module, call ──► pipelined ──► PipelinedModule ──► train_step ──► PipelineRunner ──► torch's schedules
                 (cut, measured,  (in the place of  (user code      (shapes, seeds,    MicroBatchStage
                 partitioned)     its forward)      around it)      outputs for all)   └─ PartModule ─ Part ─ Executor
"""
