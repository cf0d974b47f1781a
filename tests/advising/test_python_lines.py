"""Lines of Python that run a way to train, as users get them."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_rotor.advising.cluster import Cluster
from lightning_rotor.advising.python_lines import ddp_lines, fsdp_lines, one_device_lines, pipeline_lines
from lightning_rotor.advising.task import Task

COSTS: Any = None
"""Lines do not depend on what a model costs."""


def task(nodes: int = 1) -> Task:
    return Task(COSTS, Cluster.of("H100", 8, nodes), 64, 2**30, "bf16-mixed", "70%")


def test_one_device_and_ddp_differ_in_their_strategy() -> None:
    end = 'precision="bf16-mixed", callbacks=[RotorCallback("70%")])'
    assert one_device_lines(task(), 1) == f"trainer = L.Trainer(devices=1, {end}"
    assert ddp_lines(task(), 1) == f'trainer = L.Trainer(strategy="ddp", devices=8, {end}'


def test_nodes_and_accumulated_batches_are_named_where_there_are_several() -> None:
    line = ddp_lines(task(nodes=4), 2)
    assert "devices=8, num_nodes=4, " in line
    assert "accumulate_grad_batches=2" in line
    assert "num_nodes" not in ddp_lines(task(), 2)


@pytest.mark.parametrize(("containers", "loops"), [(("layers", "tail"), ["layers", "tail"]), (("",), [None])])
def test_blocks_are_spread_container_by_container_and_the_rest_last(
    containers: tuple[str, ...], loops: list[str | None]
) -> None:
    text = fsdp_lines(task(), containers, shards=8, reshard=False)
    compile(text, "lines", "exec")
    lines = [line.strip() for line in text.splitlines()]
    found = [line for line in lines if line.startswith("for ")]
    assert found == [f"for block in self.model{'' if name is None else f'.{name}'}:" for name in loops]
    assert lines.count("fully_shard(block, mesh=mesh, reshard_after_forward=False)") == len(loops)
    assert lines[-3] == "fully_shard(self, mesh=mesh)"
    assert "data_parallel_size=8, tensor_parallel_size=1" in lines[-1]


def test_groups_of_devices_have_a_mesh_of_their_own() -> None:
    text = fsdp_lines(task(nodes=4), ("layers",), shards=8, reshard=True)
    compile(text, "lines", "exec")
    assert 'mesh = init_device_mesh(self.device_mesh.device_type, (4, 8), mesh_dim_names=("copies", "shards"))' in text
    assert "data_parallel_size=32, tensor_parallel_size=1" in text


def test_a_pipeline_plans_by_its_strategy_and_not_by_the_callback() -> None:
    line = pipeline_lines(task(), 4, "1f1b", 16)
    compile(line, "lines", "exec")
    assert 'micro_batches=16, schedule="1f1b", pipeline_stages=4, mem_limit="70%"' in line
    assert "RotorCallback" not in line
