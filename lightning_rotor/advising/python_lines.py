"""Lines of Python that run a way to train; ``Model`` stands for the user's LightningModule."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_rotor.advising.task import Task


def one_device_lines(task: Task, accumulated: int) -> str:
    """Of a Trainer on one device."""
    return _trainer(task, "devices=1", accumulated=accumulated)


def ddp_lines(task: Task, accumulated: int) -> str:
    """Of a Trainer under DDP."""
    return _trainer(task, 'strategy="ddp"', _devices(task), accumulated=accumulated)


def fsdp_lines(task: Task, containers: Sequence[str], *, shards: int, reshard: bool) -> str:
    """Of a LightningModule that spreads its blocks, and its Trainer."""
    mesh = 'self.device_mesh["data_parallel"]'
    if shards < task.cluster.size:
        # Processes are numbered node by node, so those of a group are neighbours.
        shape = f"({task.cluster.size // shards}, {shards})"
        mesh = f'init_device_mesh(self.device_mesh.device_type, {shape}, mesh_dim_names=("copies", "shards"))'
    lines = [
        "class Sharded(Model):  # self.model is what --model makes",
        "    def configure_model(self):",
        f"        mesh = {mesh}",
    ]
    for container in containers:
        # The model is a container itself where its name in itself is empty.
        blocks = "self.model"
        if container:
            blocks += f".{container}"
        lines.append(f"        for block in {blocks}:")
        lines.append(f"            fully_shard(block, mesh=mesh, reshard_after_forward={reshard})")
    # Last, for it takes what no block has taken.
    lines.append("        fully_shard(self, mesh=mesh)")
    lines.append("")
    sizes = f"data_parallel_size={task.cluster.size}, tensor_parallel_size=1"
    trainer = _trainer(task, f"strategy=ModelParallelStrategy({sizes})", _devices(task))
    lines.append(trainer)
    return "\n".join(lines)


def pipeline_lines(task: Task, stages: int, schedule: str, micro_batches: int) -> str:
    """Of a Trainer with a pipeline."""
    strategy = (
        f'strategy=RotorPipelineStrategy("model", micro_batches={micro_batches}, schedule="{schedule}", '
        f'pipeline_stages={stages}, mem_limit="{task.limit_text}")'
    )
    # The strategy plans by itself: a callback would plan the same modules once more.
    return _trainer(task, strategy, _devices(task), plans=False)


def _devices(task: Task) -> str:
    devices = f"devices={task.cluster.devices}"
    if task.cluster.nodes > 1:
        devices += f", num_nodes={task.cluster.nodes}"
    return devices


def _trainer(task: Task, *arguments: str, accumulated: int = 1, plans: bool = True) -> str:
    listed = [*arguments, f'precision="{task.precision}"']
    if accumulated > 1:
        listed.append(f"accumulate_grad_batches={accumulated}")
    # Of every way but pipelines: on a limit that plain training keeps, the callback recomputes nothing.
    if plans:
        listed.append(f'callbacks=[RotorCallback("{task.limit_text}")]')
    return f"trainer = L.Trainer({', '.join(listed)})"
