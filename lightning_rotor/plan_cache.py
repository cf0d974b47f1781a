"""The plans of one module, one for each signature of its input. Those used last stay."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lightning_rotor.chain import Chain
from lightning_rotor.execution import Executor
from lightning_rotor.known_cuts import Signature
from lightning_rotor.planning import Plan
from lightning_rotor.profiling import Profile
from lightning_rotor.schedule import Leaf

MAX_PLANS = 64
"""Plans that are kept by default, each for another signature."""


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """Everything that belongs to one input signature.

    Attributes:
        profile: Its costs.
        plan: None until there is one, and once it no longer holds.
        executor: Runs the plan.
        estimated: The costs follow from those of other shapes.
        runs_plainly: The plan recomputes nothing, and the module's own forward keeps inside it.
    """

    profile: Profile
    plan: Plan | None = None
    executor: Executor | None = None
    estimated: bool = False
    runs_plainly: bool = False

    @classmethod
    def of(cls, signature: Signature, profile: Profile, plan: Plan, *, estimated: bool = False) -> Prepared:
        """Ready to run."""
        cut = signature.cut
        executor = Executor(
            profile.stages, profile.chain, plan.schedule, profile.states, root=cut.module, inputs=cut.inputs
        )
        return cls(profile, plan, executor, estimated, _may_run_plainly(signature, profile.chain, plan))

    def without_plan(self) -> Prepared:
        """The costs alone."""
        return Prepared(self.profile, estimated=self.estimated)


def _may_run_plainly(signature: Signature, chain: Chain, plan: Plan) -> bool:
    """Whether the module's own forward stays within the plan: it recomputes nothing, and may hold what the plan lets go of.

    Code that is written out keeps intermediate values in variables until it returns; the members of an ``nn.Sequential`` do not. Under
    autocast it keeps a cast copy of every weight.
    """
    if any(not isinstance(item, Leaf) or item.option for item in plan.schedule.items):
        return False
    if any(enabled for enabled, _ in signature.autocast):
        return False
    passing_bytes = 0
    if signature.cut.way != "sequential":
        passing_bytes = sum(stage.keep.forward_peak_bytes - stage.keep.saved_bytes for stage in chain)
    return plan.peak_bytes + passing_bytes <= plan.budget_bytes


class PlanCache:
    """What is ready for which signature.

    Args:
        most: So many are kept; those that were not used for longest go first.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._prepared: OrderedDict[Signature, Prepared] = OrderedDict()

    def __len__(self) -> int:
        return len(self._prepared)

    def __contains__(self, signature: Signature) -> bool:
        return signature in self._prepared

    def __iter__(self) -> Iterator[tuple[Signature, Prepared]]:
        return iter(self._prepared.items())

    @property
    def latest(self) -> tuple[Signature, Prepared]:
        """What was used last."""
        return next(reversed(self._prepared.items()))

    def use(self, signature: Signature) -> Prepared | None:
        """What is ready, now used last."""
        found = self._prepared.get(signature)
        if found is not None:
            self._prepared.move_to_end(signature)
        return found

    def put(self, signature: Signature, prepared: Prepared) -> None:
        """Add or replace; it is now used last."""
        self._prepared[signature] = prepared
        self._prepared.move_to_end(signature)
        while len(self._prepared) > self._most:
            self._prepared.popitem(last=False)

    def drop(self, keep: Callable[[Signature], bool]) -> None:
        """Forget signatures that no call can have any more."""
        for signature in [signature for signature in self._prepared if not keep(signature)]:
            del self._prepared[signature]

    def unplan(self, keep: Callable[[Plan], bool]) -> None:
        """Plan anew, when they come again, all whose plan is not to be kept."""
        for signature, prepared in self._prepared.items():
            if prepared.plan is not None and not keep(prepared.plan):
                self._prepared[signature] = prepared.without_plan()

    def clear(self) -> None:
        """Forget everything."""
        self._prepared.clear()
