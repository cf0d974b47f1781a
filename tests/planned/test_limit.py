"""The limit of a step: the budgets that follow from it, and when training ends."""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.random_chains import random_chain
from lightning_rotor.chain import Chain
from lightning_rotor.errors import BudgetError, RotorWarning, TrialError
from lightning_rotor.planned.limit import StepLimit
from lightning_rotor.planned.loop import TrainingLoop
from lightning_rotor.planned.running_step import Step, StepStart
from lightning_rotor.planning.step_phases import Mark, PhaseKind, StepPhase
from lightning_rotor.units import parse_limit

LIMIT = 10**6
WIDTH = 16
# Of parameters and of their gradients, each.
MODEL_BYTES = (WIDTH * WIDTH + WIDTH) * 4


class Loop(TrainingLoop):
    """A training of one layer on the CPU."""

    def __init__(self, *, lingers: bool = True, trial: bool = False) -> None:
        self.model = nn.Linear(WIDTH, WIDTH)
        optimizer = torch.optim.Adam(self.model.parameters())
        self.is_lead = True
        self.warned_of = set()
        self.local_processes = 1
        self.is_trial = lambda: trial
        self.device = lambda: torch.device("cpu")
        self.optimizers = lambda: [optimizer]
        self.wrapped = lambda: self.model
        self.gradients_linger = lambda: lingers
        self.hooks_at_end = False

    def has_hooks_at_end(self) -> bool:
        return self.hooks_at_end

    def untoggled(self) -> Any:
        return nullcontext()


def limit_of(loop: Loop, *, beyond: bool = False) -> StepLimit:
    return StepLimit(loop, parse_limit(LIMIT), beyond=beyond)


@pytest.fixture
def chain() -> Chain:
    return random_chain(random.Random(1), 4, "transformer")


def step_with(batch: torch.Tensor, *, is_first: bool = False) -> Step:
    step = Step(batch)
    step.note_start(StepStart([batch], is_first=is_first))
    return step


def phase(kind: PhaseKind, peak_bytes: int, optimizer: str = "") -> StepPhase:
    return StepPhase(Mark(kind, None, optimizer), 0, peak_bytes, 0)


def test_a_budget_is_the_limit_less_what_the_process_holds(chain: Chain) -> None:
    limit = limit_of(Loop())
    batch = torch.ones(4, WIDTH)
    budget = limit.budget(chain, nn.ModuleList(), step_with(batch))
    # Parameters, two moments of Adam with their counts, gradients outside of the (no) planned modules, the batch.
    assert budget.limit_bytes == LIMIT
    assert 4 * MODEL_BYTES + batch.nbytes <= budget.reserved_bytes <= 4 * MODEL_BYTES + batch.nbytes + 64
    assert limit.reserved_bytes == budget.reserved_bytes
    assert budget.error is BudgetError
    assert limit_of(Loop(trial=True)).budget(chain, nn.ModuleList(), None).error is TrialError


def test_what_steps_have_taught_is_kept_free_and_a_guess_for_other_chains(chain: Chain) -> None:
    limit = limit_of(Loop())
    step = step_with(torch.ones(1))
    before = limit.budget(chain, nn.ModuleList(), step)
    search = limit.corrections.search_for(chain)
    search.correction_bytes, search.is_measured = 1000, True
    taught = limit.budget(chain, nn.ModuleList(), step)
    assert taught.available_bytes == before.available_bytes - 1000
    assert taught.guessed_bytes == 0
    other = limit.budget(random_chain(random.Random(2), 4, "transformer"), nn.ModuleList(), step)
    assert other.guessed_bytes >= 1000
    assert limit.budget(chain, nn.ModuleList(), step, correction_bytes=0).available_bytes == before.available_bytes


def test_a_first_step_lacks_what_later_ones_find() -> None:
    limit = limit_of(Loop())
    first = limit.start_of([], is_first=True)
    assert first.state_bytes >= 2 * MODEL_BYTES
    assert first.missing_forward_bytes == MODEL_BYTES + first.state_bytes
    assert first.missing_backward_bytes == first.state_bytes  # lingering gradients are freed before
    assert limit_of(Loop(lingers=False)).start_of([], is_first=True).missing_backward_bytes == MODEL_BYTES + (
        first.state_bytes
    )
    assert limit.start_of([], is_first=False).missing_forward_bytes == 0


def refusal(limit: StepLimit, minimum_bytes: int) -> BudgetError:
    return BudgetError("too small", budget_bytes=LIMIT, minimum_bytes=minimum_bytes, stage="layer")


def test_a_call_without_a_plan_ends_training_only_behind_a_step_that_shows_what_it_needs(chain: Chain) -> None:
    limit = limit_of(Loop())
    step = step_with(torch.ones(1))
    limit.budget(chain, nn.ModuleList(), step)
    limit.note_no_plan(refusal(limit, 2 * LIMIT), step)
    assert step.no_plan is not None
    with pytest.raises(BudgetError, match=r"mem_limit .* is below the minimum") as error:
        limit.end_step(step, Any, is_measured=False)  # type: ignore[arg-type]
    assert 2 * LIMIT <= error.value.minimum_bytes <= 2.02 * LIMIT
    assert step.no_plan is None
    with pytest.raises(BudgetError, match="too small"):
        limit.note_no_plan(refusal(limit, 2 * LIMIT), None)  # between two steps


def test_beyond_the_limit_training_goes_on_with_one_warning(chain: Chain) -> None:
    limit = limit_of(Loop(), beyond=True)
    limit.budget(chain, nn.ModuleList(), None)
    with pytest.warns(RotorWarning, match="training goes on beyond the limit"):
        limit.note_no_plan(refusal(limit, 2 * LIMIT), None)
    limit.note_no_plan(refusal(limit, 2 * LIMIT), None)  # another warning would be an error here


def test_a_step_that_has_exceeded_names_a_limit_that_is_enough(chain: Chain) -> None:
    limit = limit_of(Loop())
    limit.budget(chain, nn.ModuleList(), None)
    with pytest.raises(BudgetError, match=r"and steps differ by 1,?000 B") as error:
        limit.exceeded(phase(PhaseKind.LOSS, 2 * LIMIT), Step(None), spread_bytes=1000)
    assert error.value.minimum_bytes > 2 * LIMIT + 1000
    with pytest.raises(BudgetError, match="nothing in it is planned"):
        limit.exceeded_without_a_plan(2 * LIMIT)


def test_the_optimizers_step_counts_but_not_the_first_ones(chain: Chain) -> None:
    limit = limit_of(Loop())
    batch = torch.ones(1)
    limit.budget(chain, nn.ModuleList(), None)
    highest = [phase(PhaseKind.LOSS, 10), phase(PhaseKind.OPTIMIZER, 2 * LIMIT, "Adam")]
    first = step_with(batch, is_first=True)
    limit.learn_final(first, highest)
    assert not limit.knows_final_peak
    assert not limit.check_final(first, highest)  # it makes the state, which takes what no later one does
    later = step_with(batch)
    limit.learn_final(later, highest)
    assert limit.final_peak_bytes == 2 * LIMIT
    # One measurement against a prediction: the next step is measured as well, and this one forgotten.
    assert limit.check_final(later, highest)
    assert not limit.knows_final_peak
    assert not limit.check_final(later, [phase(PhaseKind.OPTIMIZER, LIMIT, "Adam")])
    limit.learn_final(later, highest)
    with pytest.raises(BudgetError, match=r"the step of Adam, with hooks and clipping around it") as error:
        limit.check_final(later, highest)
    assert error.value.stage == "Adam.step"
    # Where the backward exceeds, too, a smaller plan follows first.
    assert not limit.check_final(later, [phase(PhaseKind.LOSS, 3 * LIMIT), highest[1]])


def test_processes_keep_inside_the_least_of_their_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop()
    limit = limit_of(loop)
    monkeypatch.setattr(Loop, "answers_of_all", lambda self, told: [told, told - 5, told + 5])
    limit.agree([])
    limit.read([])
    assert limit.size_bytes == LIMIT - 5
