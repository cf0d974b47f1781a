"""Events of planned modules: by default, errors end the call, and nothing else does."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_rotor.errors import BudgetError, ModelError, ProfilerBusyError
from lightning_rotor.planned.budget_source import (
    BudgetSource,
    CallBegins,
    MeasuringBegins,
    ModuleCut,
    NoChain,
    NothingFits,
    PlanEvent,
    ProfilerBusy,
    objection,
)

TOO_SMALL = BudgetError("too small", budget_bytes=1, minimum_bytes=2, stage="0")


@pytest.mark.parametrize(
    "event",
    [NoChain("net", ModelError("no chain")), ProfilerBusy(ProfilerBusyError("busy")), NothingFits(TOO_SMALL)],
    ids=lambda event: type(event).__name__,
)
def test_errors_end_the_call_unless_a_source_takes_them(event: Any) -> None:
    with pytest.raises(type(event.error), match=str(event.error)):
        BudgetSource().hear(event)


@pytest.mark.parametrize("event", [MeasuringBegins(), CallBegins()], ids=lambda event: type(event).__name__)
def test_other_events_are_only_heard(event: PlanEvent) -> None:
    BudgetSource().hear(event)


def test_a_source_may_object_to_a_cut() -> None:
    class Choosy(BudgetSource):
        def hear(self, event: PlanEvent) -> None:
            if isinstance(event, ModuleCut) and event.name == "net":
                raise ModelError("better in parts")

    cut: Any = None
    assert objection(BudgetSource(), "net", cut) is None
    assert objection(Choosy(), "other", cut) is None
    assert str(objection(Choosy(), "net", cut)) == "better in parts"
