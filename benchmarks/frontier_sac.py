"""torch's own automatic selective checkpointing as a rival: ``torch.distributed._tools.sac_ilp`` over its estimators, with its policies applied.

For a memory budget ``sac_milp`` says which blocks to checkpoint and how much of what each saves to discard, and
``get_optimal_checkpointing_policy_per_module`` which operators of a block that leaves recomputed. The estimators run the model without values;
what operators take is measured here, on the CPU, where they cannot measure it themselves. Needs the extra `bench` (pulp and pwlf).
"""

from __future__ import annotations

import copy
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.distributed._tools.ilp_utils import Graph, aggregate_stats, parse_module_info
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed._tools.runtime_estimator import RuntimeEstimator
from torch.distributed._tools.sac_estimator import SACEstimator, SACStats
from torch.distributed._tools.sac_ilp import get_optimal_checkpointing_policy_per_module, sac_milp
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

GIB = 2**30
ROUNDS = 3
Policy = Callable[..., CheckpointPolicy]


class Seconds(TorchDispatchMode):
    """What each operator takes, by the shapes that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[Any, list[float]] = defaultdict(list)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        began = time.perf_counter()
        output = function(*args, **(kwargs or {}))
        self._known[_key(function, args)].append(time.perf_counter() - began)
        return output

    def estimate(self, function: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
        """The output, without values, and milliseconds."""
        found = self._known.get(_key(function, args), [0.0])
        return function(*args, **(kwargs or {})), 1e3 * statistics.median(found)


def _key(function: Any, args: Any) -> Any:
    return function, tuple(
        tuple(each.shape) if isinstance(each, torch.Tensor) else str(each) for each in tree_leaves(args)
    )


def estimated(build: Callable[[], Any], step: Callable[[Any], None]) -> tuple[Graph, dict[str, SACStats], list[str]]:
    """The graph of modules with their costs, statistics of each, and the blocks' names."""
    seconds, real = Seconds(), build()
    for _ in range(ROUNDS):
        with seconds:
            step(real)
    with FakeCopyMode(FakeTensorMode()) as mode:
        workload = copy.deepcopy(real)
    with mode.fake_mode, redirect_stdout(StringIO()):
        memory, times, operators = MemTracker(), RuntimeEstimator(), SACEstimator()
        memory.track_external(workload.net, *workload.inputs)
        with memory:
            step(workload)
        times("operator-level-cost-model")._estimate = seconds.estimate
        with times:
            step(workload)
        operators._estimate_runtime = seconds.estimate
        with operators:
            workload.net(*workload.inputs)
        info = aggregate_stats(workload.net, memory, times, operators, torch.device("cpu"))
    names = {id(module): f"{type(workload.net).__name__}.{name}" for name, module in workload.net.named_modules()}
    return parse_module_info(info), operators.sac_mod_stats, [names[id(block)] for block in workload.blocks]


def policies(
    build: Callable[[], Any], step: Callable[[Any], None], shares: Sequence[float]
) -> Iterator[tuple[str, list[Policy | None]]]:
    """For each budget as a share of what is saved, its name and a policy for each block; None for one that stays plain."""
    graph, statistics_of, blocks = estimated(build, step)
    most = max(node["act_total"] + node["act_grad_per_module"] + node["grad_total"] for node in graph.nodes)
    fixed = graph.nodes[0]["param_per_module"]
    for share in shares:
        solution, _, peak = sac_milp(graph, (share * most + fixed) / GIB, ac_units=blocks)
        if peak >= 0 and solution:
            yield f"budget {share}", [_policy(statistics_of[name], solution.get(name)) for name in blocks]


def _policy(found: SACStats, discarded: float | None) -> Policy | None:
    """Saves what the optimal policy saves, operator by operator."""
    if discarded is None:
        return None
    saved = get_optimal_checkpointing_policy_per_module(found, min(max(1 - discarded, 0.0), 1.0))
    return partial(_decide, saved or [0] * len(found.func_names), defaultdict(int))


def _decide(
    saved: Sequence[int], seen: dict[bool, int], context: Any, function: Any, *_: Any, **__: Any
) -> CheckpointPolicy:
    number = seen[context.is_recompute]
    seen[context.is_recompute] = (number + 1) % len(saved)
    return CheckpointPolicy.MUST_SAVE if saved[number] else CheckpointPolicy.PREFER_RECOMPUTE


def contexts(policy: Policy) -> Any:
    """For torch's checkpoint: counts operators anew in each forward."""
    policy.args[1].clear()  # type: ignore[attr-defined]
    return create_selective_checkpoint_contexts(policy)
