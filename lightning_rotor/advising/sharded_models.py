"""Ways to train in which the parameters are spread over devices: FSDP2, with units for the model's blocks.

They are spread over all devices, or over groups of neighbours that hold copies (HSDP): then less is sent between nodes,
and each device holds more.

Each unit is one stage of the chain. The planner gives a schedule for what is left of the limit beside the messages, and
``sharded_step`` says what the step takes with them; the difference goes to the next plan.
"""

from __future__ import annotations

from lightning_rotor.advising.choice import Choice, StepSeconds
from lightning_rotor.advising.model_costs import Sharding, SpreadParameters
from lightning_rotor.advising.python_lines import fsdp_lines
from lightning_rotor.advising.sharded_step import ShardedStep, sharded_step
from lightning_rotor.advising.task import Task
from lightning_rotor.chain import Chain
from lightning_rotor.errors import BudgetError
from lightning_rotor.planning import plan
from lightning_rotor.private.sharding import UnitSizes
from lightning_rotor.schedule import Schedule
from lightning_rotor.simulator import Simulation, simulate

# Plans, each of which knows the messages of the one before.
_TRIES = 4
# Resolution of the planner.
_SLOTS = 250


def sharded_models(task: Task) -> list[Choice]:
    """FSDP2 over all devices and over groups of them, with and without resharding, where that fits."""
    sharding = task.costs.sharding
    samples = task.divided(task.cluster.size)
    if sharding is None or samples is None or task.cluster.size == 1:
        return []
    chain = sharding.costs.at(samples)
    choices = []
    for shards in _group_sizes(task):
        for reshard in (True, False):
            choice = Spread(task, sharding, chain, samples, shards=shards, reshard=reshard).fastest()
            if choice is not None:
                choices.append(choice)
    return choices


def _group_sizes(task: Task) -> list[int]:
    """Devices among which parameters may be spread: all of them, or some of a node that divide it."""
    # Groups that lie on several nodes send as much between them as all devices do, and hold more.
    inside_a_node = [shards for shards in range(2, task.cluster.devices + 1) if task.cluster.devices % shards == 0]
    return sorted({*inside_a_node, task.cluster.size})


class Spread:
    """FSDP2 with parameters spread over ``shards`` devices of a task; as many others as there are hold copies."""

    def __init__(
        self,
        task: Task,
        sharding: Sharding,
        chain: Chain,
        samples: int,
        *,
        shards: int,
        reshard: bool,
    ) -> None:
        self._task = task
        self._sharding = sharding
        self._chain = chain
        self._samples = samples
        self._reshard = reshard
        self._shards = shards
        self._sizes = [unit_sizes(unit, shards) for unit in sharding.units]
        shard_bytes = sum(unit.shard_bytes(shards) for unit in sharding.units)
        self.shard_gradient_bytes = sum(sizes.shard_bytes for sizes in self._sizes)
        resident = task.costs.resident_at(samples)
        # Optimizers step on shards.
        state_bytes = round(self.shard_gradient_bytes * task.costs.state_scale)
        self._held_bytes = shard_bytes + state_bytes + resident.buffer_bytes + resident.batch_bytes
        self._final_bytes = self._held_bytes + self.shard_gradient_bytes
        self._final_bytes += round(self.shard_gradient_bytes * task.costs.temporary_scale)

    def fastest(self) -> Choice | None:
        """The fastest schedule found under which the step with its messages keeps the limit; None if there is none."""
        limit_bytes = self._task.limit_bytes
        if self._final_bytes > limit_bytes:
            # No schedule changes what is there when the optimizer steps.
            return None
        simulation = self._simulated(Schedule.keep_all(len(self._chain)))
        fastest: Choice | None = None
        for _ in range(_TRIES):
            choice = self.choice(simulation)
            is_faster = fastest is None or choice.seconds.total < fastest.seconds.total
            if choice.peak_bytes <= limit_bytes and is_faster:
                fastest = choice
                if not choice.recomputed:
                    # Nothing is faster than plain training.
                    break
            # What is around the chain differs from plan to plan, so the next one has that of this.
            budget_bytes = simulation.peak_bytes + limit_bytes - choice.peak_bytes
            try:
                solved = plan(
                    self._chain,
                    max(budget_bytes, 1),
                    slots=_SLOTS,
                    lingering_bytes=self.shard_gradient_bytes,
                )
            except BudgetError:
                break
            # The same again: so would be all further ones.
            if solved.schedule == simulation.schedule:
                break
            simulation = solved.simulation
        return fastest

    def _simulated(self, schedule: Schedule) -> Simulation:
        # Gradients of the step before are there during the forward, as shards.
        return simulate(self._chain, schedule, lingering_bytes=self.shard_gradient_bytes)

    def step(self, simulation: Simulation) -> ShardedStep:
        """The step with its messages."""
        cluster = self._task.cluster
        copies = cluster.size // self._shards

        def gather_seconds(size_bytes: int) -> float:
            return cluster.gather_seconds(size_bytes, self._shards)

        def reduce_seconds(size_bytes: int) -> float:
            # Spreading sums over processes goes around the same ring as gathering. Then copies of a shard are summed.
            spread_seconds = cluster.gather_seconds(size_bytes, self._shards)
            return spread_seconds + cluster.sum_seconds(size_bytes / self._shards, copies, apart=self._shards)

        *units, rest = self._sizes
        return sharded_step(
            simulation.events,
            self._sharding.unit_of_stage,
            units,
            rest,
            reshard=self._reshard,
            gather_seconds=gather_seconds,
            reduce_seconds=reduce_seconds,
        )

    def choice(self, simulation: Simulation) -> Choice:
        """A way to train under a schedule."""
        step = self.step(simulation)
        peak_bytes = max(self._held_bytes + step.peak_bytes, self._final_bytes)
        # Stages and not their runs: one in a nested segment runs more often.
        recomputed = {event.stage for event in simulation.events if event.phase == "recompute"}
        optimizer_seconds = self._task.optimizer_seconds(self.shard_gradient_bytes)
        return Choice(
            kind="FSDP2",
            devices=self._task.cluster.size,
            # Each device has a batch of its own.
            copies=self._task.cluster.size,
            shards=self._shards,
            batch_per_device=self._samples,
            peak_bytes=peak_bytes,
            seconds=StepSeconds(
                compute=step.busy_seconds - simulation.recompute_seconds + optimizer_seconds,
                recomputation=simulation.recompute_seconds,
                link=step.seconds - step.busy_seconds,
            ),
            reshard=self._reshard,
            recomputed=len(recomputed),
            chain_length=len(self._chain),
            lines=fsdp_lines(self._task, self._sharding.containers, shards=self._shards, reshard=self._reshard),
        )


def unit_sizes(unit: SpreadParameters, processes: int) -> UnitSizes:
    """Bytes of a unit and of its messages."""
    # A message has all shards, each padded to the largest.
    shard_bytes = unit.shard_bytes(processes)
    learning_bytes = unit.shard_bytes(processes, learning=True)
    return UnitSizes(
        gathered_bytes=shard_bytes * processes,
        gradient_bytes=learning_bytes * processes,
        reduced_bytes=learning_bytes * processes,
        shard_bytes=learning_bytes,
    )
