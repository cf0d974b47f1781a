"""Measured costs of one module, and what follows from them for sizes that were never measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lightning_rotor.capture.graph_cut import GraphCut
from lightning_rotor.capture.sequentialize import Cut
from lightning_rotor.planned.signature import Signature
from lightning_rotor.planning.size_bounds import bound_at, most_growth
from lightning_rotor.private.values import spelled
from lightning_rotor.profiling import Profile
from lightning_rotor.profiling.chain_profile import profile_over
from lightning_rotor.stages.sequential import Stage, wiring_of

# A bound looks at all of them, so each costs time at every new size.
_MOST_MEASURED = 32


@dataclass(frozen=True, slots=True)
class Estimate:
    """Costs at least as high as would be measured; ``is_near`` if they are not much higher."""

    profile: Profile
    is_near: bool


class Measurements:
    """The measured signatures of one module, those measured last."""

    def __init__(self) -> None:
        self._profiles: dict[Signature, Profile] = {}

    def add(self, signature: Signature, profile: Profile) -> None:
        """Remember what was measured."""
        # To the end of the order: a size that was measured again is not the first to be forgotten.
        self._profiles.pop(signature, None)
        # Without the shapes that its stages take: equal stages of several measurements are then the same objects.
        bare = tuple(replace(stage, takes=()) for stage in profile.chain)
        self._profiles[signature] = profile.over(replace(profile.chain, stages=bare))
        for oldest in list(self._profiles)[:-_MOST_MEASURED]:
            del self._profiles[oldest]

    def keep_only(self, is_kept: Callable[[Signature], bool]) -> None:
        """Forget all other signatures."""
        for signature in list(self._profiles):
            if not is_kept(signature):
                del self._profiles[signature]

    def estimate(self, signature: Signature) -> Estimate | None:
        """Costs for a signature from those of other sizes; None if it must be measured."""
        wanted = signature.family
        family = []
        chains = []
        for measured, profile in self._profiles.items():
            if measured.family == wanted and _is_told_by_shapes(signature.cut, measured.cut):
                family.append(measured)
                chains.append((measured.shapes, profile.chain))
        bound = bound_at(signature.shapes, chains)
        if bound is None:
            return None
        measured = family[bound.measurement]
        profile = self._profiles[measured].over(bound.chain)
        try:
            profile = for_call(profile, signature)
            # The stages are the same objects, so costs match one to one. Sizes that were recorded apart have stages of
            # their own, which are merged here as those of the measurement were.
            if measured.cut is signature.cut:
                return Estimate(profile, bound.is_near)
            estimated = profile_over(
                signature.cut.stages,
                profile.chain,
                group_sizes=profile.group_sizes,
                remembered=profile.remembered,
                drawn=profile.drawn,
            )
        except (ValueError, IndexError):  # the stages are others
            return None
        return Estimate(estimated, bound.is_near)


def _is_told_by_shapes(cut: Cut, measured: Cut) -> bool:
    """True if no operation of a recording has taken more than another's could with inputs of its shapes.

    Code may read a size from values, which no shape of an input tells: ``int(lengths.max())``. There is a recording for
    each such number, and what was measured for a smaller one is no bound.
    """
    if cut is measured or not isinstance(cut, GraphCut) or not isinstance(measured, GraphCut):
        return True
    taken, known = cut.recording.bytes_by_operation, measured.recording.bytes_by_operation
    shapes, known_shapes = cut.recording.guards.recorded_shapes, measured.recording.guards.recorded_shapes
    if len(taken) != len(known) or list(map(len, shapes)) != list(map(len, known_shapes)):
        return False
    growth = most_growth(known_shapes, shapes)
    return all(size_bytes <= growth * known_bytes for size_bytes, known_bytes in zip(taken, known, strict=True))


def for_call(profile: Profile, signature: Signature) -> Profile:
    """Costs of another size for a call: they say for which input they are."""
    chain = profile.chain
    stages = [replace(chain.stages[0], takes=_taken_by_first(profile.stages, signature))]
    for stage in chain.stages[1:]:
        # What later stages take is of the other size; without it they are known not to be measured.
        if stage.takes:
            stage = replace(stage, takes=())
        stages.append(stage)
    return profile.over(replace(chain, stages=tuple(stages)))


def _taken_by_first(stages: Sequence[Stage], signature: Signature) -> tuple[str, ...]:
    """Tensors that the first stage reads, for which a plan is made."""
    names = []
    # Behind the shapes of tensors there may be numbers of packed sequences, which have no kind.
    for (dtype, _, _), shape in zip(signature.kinds, signature.shapes, strict=False):
        names.append(spelled(dtype, shape))
    reads = wiring_of(stages).wire.reads
    if len(reads) != len(names):
        # One value holds several tensors, so nobody knows which of them a stage takes out of it.
        return tuple(names)
    taken = []
    for read, name in zip(reads, names, strict=True):
        if read in stages[0].reads:
            taken.append(name)
    return tuple(taken)
