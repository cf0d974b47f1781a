"""A first pass, and its repetitions: the rules of ``passes``, kept."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from lightning_rotor.execution.lent_tensors import Slot, buffers_of, copies_of, standing_in
from lightning_rotor.execution.observers import Observers
from lightning_rotor.execution.passes import checkpointing, dropping_saved, repeating
from lightning_rotor.execution.segment_state import SegmentState
from lightning_rotor.execution.settings import LayerSettings, Settings
from lightning_rotor.execution.tensors_read import TensorsRead, slots_read
from lightning_rotor.private import torch_names as private
from lightning_rotor.stages.draws import drawn_since
from lightning_rotor.stages.generators import GeneratorStates
from lightning_rotor.stages.snapshot import SMALL_BYTES, Snapshot


class FirstPass:
    """A forward that will be repeated: what it must remember for that, and what it could not undo, which it refuses.

    ``device`` is the one whose generators of torch it may use, besides the host's. ``known_draws`` are kinds that it
    is known to draw from, and grow.

    Attributes:
        values: Buffers with copies of what they were (rule 4).
        generators: States from before it, if it may draw (rule 7).
        drawn: Kinds of generators that it has moved.
        read: Parameters and buffers that a repetition reads as they are (rule 2).
    """

    read: TensorsRead

    def __init__(
        self, state: SegmentState, device: torch.device | None = None, known_draws: set[str] | None = None
    ) -> None:
        self.state, self._device = state, device
        # Shared by all first passes of a segment: what one call was seen to draw is certain for the next.
        self._known_draws = set(state.drawn) if known_draws is None else known_draws
        self.values: list[tuple[nn.Module, str, torch.Tensor]] = []
        self.generators: GeneratorStates | None = None
        self.drawn: frozenset[str] = frozenset()
        # Set where there are attributes of users, or hooks.
        self._watched: tuple[Snapshot, Observers] | None = None
        self._settings = Settings()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context of the forward."""
        state = self.state
        # Rule 4.
        # Before anything of the user's runs, as its first line may update them.
        self.values = copies_of(buffers_of(state.remembered))
        if state.attributed or private.any_hooks_of_all():
            # Rule 8.
            observers = Observers(state.attributed)
            # Rule 6. Globals and enclosing variables that the code reads may change until the backward, too.
            self._watched = Snapshot(state.attributed, code=True, small_bytes=SMALL_BYTES), observers
            observers.watch()
        if state.attributed or self._device is not None:
            # Rule 7. Only code of the user's draws from Python's and NumPy's generators.
            uses_host, uses_torchs = bool(state.attributed), self._device is not None
            self.generators = GeneratorStates(self._device, host=uses_host, torchs=uses_torchs)
        # Rule 9.
        self._layers = LayerSettings(state.layers)
        # Rule 2.
        self.read = TensorsRead(slots_read(state), state.name_of_tensor)
        try:
            yield
        finally:
            if self._watched is not None:
                before, observers = self._watched
                # Also after an error: watched hooks must not stay in the user's tables.
                observers.settle(before)
        if self.generators is not None:
            # Alone, all are set back, as comparing them would take longer than that.
            self.drawn = self.generators.changed() if self.generators.shared else self.generators.kinds
        if self._watched is not None:
            before, _ = self._watched
            before.require_undoable()
        # Rules 2 and 5.
        self.read.require_untouched()

    def tell_draws(self, again: Callable[[], object]) -> None:
        """Tell its own random numbers from those of other threads; ``again`` runs the forward once more if need be.

        A repetition sets back the generators that the forward has drawn from, and no others (rule 7).
        """
        # Without other threads there is nobody else's number, and what is known to be its own needs no proof. So a
        # steady step runs no forward here.
        if self.generators is None or self.drawn <= self._known_draws or not self.generators.shared:
            return

        def repeat() -> None:
            with self.replayed(()), repeating(), dropping_saved():
                again()

        behind = self.generators.now()
        self.drawn = drawn_since(self.generators, repeat, certain=self._known_draws)
        # Its own numbers were drawn again.
        behind.restore(self.drawn)
        self._known_draws |= self.drawn

    @contextmanager
    def replayed(self, kinds: Collection[str] | None = None) -> Iterator[None]:
        """Context of a forward that repeats this one: it sees the state that this one saw, and changes none.

        Of generators, those of these kinds, by default the ones that this one has drawn from.
        """
        kinds = self.drawn if kinds is None else kinds
        # Rule 2.
        # Before any state is put back: an error here must leave everything as it is.
        self.read.require_unchanged()
        with ExitStack() as stack:
            # What stands first is put back last.
            # Rule 9.
            stack.enter_context(self._settings.restored())
            stack.enter_context(self._layers.restored())
            stack.enter_context(self.read.restored())
            if self.generators is not None:
                stack.callback(self.generators.now().restore, kinds)
                # Rule 7.
                self.generators.restore(kinds)
            if self._watched is not None:
                before, observers = self._watched
                stack.callback(before.again().restore)
                # Rule 6.
                before.lend()
                # Rule 8.
                observers.leave_out()
            stack.enter_context(standing_in(self._loans()))
            yield

    def _loans(self) -> Iterator[Slot]:
        """The tensors that stand in tables of parameters and buffers during a replay."""
        # Rule 2.
        for table, name, tensor in self.read.slots:
            # FSDP1 has moved its own out of the way, and into plain attributes.
            if name in table:
                yield table, name, tensor
        # Rule 3.
        for statistic in self.state.statistics:
            if statistic.module.training:
                yield statistic.module._buffers, statistic.name, statistic.scratch
        # Copies of the copies (rule 4): with retain_graph there is another replay after this one.
        for module, name, copy in copies_of(self.values):
            yield module._buffers, name, copy


@contextmanager
def passing_first(first_pass: FirstPass) -> Iterator[None]:
    """Context of a forward that drops its saved tensors."""
    with checkpointing(), first_pass.watching():
        yield
