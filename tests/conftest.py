"""What every test relies on: one thread, a fixed seed, no display, and a GPU or a simulated one for tests that need it."""

from __future__ import annotations

import gc
import logging
import math
import os

# Read once, when torch and matplotlib are imported. Three test processes on two cores, as a third of the time is waiting: one thread each.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MPLBACKEND"] = "Agg"

import random
import sys
import time
import traceback
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from xdist.scheduler import LoadFileScheduling

from lightning_rotor.planned import module_plans
from lightning_rotor.planning import compilation, dynamic_program
from lightning_rotor.private.running_threads import threads
from lightning_rotor.profiling import stage_seconds
from tests import cuda_device, grids
from tests.cuda_device.remote import SimulatedDevices
from tests.features import FeatureResults, declared_features
from tests.imported_python import ImportedPython

torch.set_num_threads(1)

# The files that take longest, longest first: one that a process begins last makes the other wait.
LONGEST = (
    *("test_ranks", "test_lightning_tools", "test_meshes", "test_compiled", "test_messages"),
    *("test_target", "test_cuda_memory", "test_compiled_steps", "test_pipeline_runner", "test_command_line"),
    *(
        "test_pipeline_strategy",
        "test_rank_faults",
        "test_lightning_training",
        "test_optimizer_prediction",
        "test_late_copies",
    ),
    *("test_tensor_parallel", "test_callback", "test_docs", "test_recording", "test_pipeline_shared_weights"),
    *("test_two_lightnings", "test_solver", "test_graph_cuts", "test_ways_bad_input", "test_whole_steps"),
    *("test_checkpointable", "test_no_trace", "test_pipeline_start", "test_fuzz", "test_advice_ranks"),
    *("test_advice", "test_changing_shapes", "test_imagenet_example", "test_inversion", "test_other_packages"),
    *("test_estimates", "test_imports", "test_holders", "test_compiled_modules", "test_lightning_resume"),
    *("test_pipeline_failures"),
)
# What takes seconds to start, and what the source of a test file says if its tests need it: the simulated devices, the
# server that processes of pipelines are forked from, and that for code in a process of its own. One of the test processes
# starts it, and has all these files.
SHARED = ("mark.gpu", "from pipelines import", "imported_python")

# Where it matters how good plans are: tables are as fine as a user's.
FINE_FOLDERS = ("planning", "report", "advising", "pipeline")
FINE = ("test_skips",)
# Where seconds of stages are compared, or what follows from them: they are measured as thoroughly as for a user.
TIMED_FOLDERS = ("profiling", "report", "advising")
TIMED = (
    *("test_busy_machine", "test_checkpointable", "test_compiled", "test_compiled_steps", "test_advice"),
    *("test_advice_ranks", "test_batch_sizes", "test_pipeline_speeds", "test_offload", "test_offloading"),
)

# Profiling takes as long as it takes, so no deadline. Continuous integration must not fail by chance; developers search anew each time.
for _name, _examples in (("rotor", 30), ("whole", 100)):
    hypothesis.settings.register_profile(
        _name, max_examples=_examples, deadline=None, print_blob=True, derandomize="CI" in os.environ
    )
hypothesis.settings.load_profile("rotor")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--features", type=Path, help="run the tests that show a feature, and write their results as a table"
    )
    parser.addoption("--all", action="store_true", help="run the wide grids, too")


def pytest_configure(config: pytest.Config) -> None:
    grids.is_whole = config.getoption("--all")
    if grids.is_whole:
        hypothesis.settings.load_profile("whole")
    path = config.getoption("--features")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(FeatureResults(path.absolute()))
    if not torch.cuda.is_available() and cuda_device.missing() is None:
        config.pluginmanager.register(SimulatedDevices())


class _SharedStarts(LoadFileScheduling):
    """One file after the other to the process that is free, but files that share what takes long to start to one of them."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return _shared_start(self.config.rootpath / file) or file


@cache
def _shared_start(file: Path) -> str | None:
    source = file.read_text()
    return next((each for each in SHARED if each in source), None)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    return _SharedStarts(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Only what shows a feature, since importing the others takes long."""
    if config.getoption("--features") is None or collection_path.suffix != ".py":
        return None
    file = collection_path.relative_to(Path(__file__).parent).as_posix()
    return True if file not in {feature.file for feature in declared_features()} else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--features") is not None:
        items[:] = [item for item in items if item.get_closest_marker("feature")]
    if not config.getoption("--all"):
        items[:] = [item for item in items if item.get_closest_marker("wide") is None]
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))
    for item in items:  # reports from other processes carry properties, but no markers
        item.user_properties += [("feature", mark.args) for mark in item.iter_markers("feature")]
    for item in items:
        reason = _why_not(item.get_closest_marker("gpu"))
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def _why_not(mark: pytest.Mark | None) -> str | None:
    """Why a test cannot run on a device here; None if it can, or needs none."""
    if mark is None:
        return None
    if not torch.cuda.is_available():
        missing = cuda_device.missing()
        return None if missing is None else f"needs a CUDA device; {missing}"
    wanted = mark.kwargs.get("devices", 1)
    return None if torch.cuda.device_count() >= wanted else f"needs {wanted} CUDA devices"


@pytest.fixture(scope="module", autouse=True)
def _little_garbage_to_look_through() -> None:
    """The library collects garbage and looks through all objects, of which imported modules have millions. Take these out."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _plans_by_bytes_alone(request: pytest.FixtureRequest) -> Iterator[None]:
    """What else the machine does must not decide how often a test plans; test_checkpointable tells what was timed."""
    with pytest.MonkeyPatch.context() as patch:
        if request.path.stem != "test_checkpointable":
            patch.setattr(module_plans, "_NOTABLE", math.inf)
        yield


@pytest.fixture(scope="module", autouse=True)
def _compiled_tables(request: pytest.FixtureRequest) -> Iterator[None]:
    """Of short chains, too: this process plans hundreds, for which it is worth loading. test_dynamic_program tells that numbers are the same."""
    with pytest.MonkeyPatch.context() as patch:
        if request.path.stem not in ("test_dynamic_program", "test_solver"):
            patch.setattr(dynamic_program, "_COMPILED_STAGES", 0)
            compilation.compiled_kernels()  # what this logs is of no test
        yield


@pytest.fixture(scope="module", autouse=True)
def _coarse_tables(request: pytest.FixtureRequest) -> Iterator[None]:
    """Wherever bits and peaks are compared, and not how good plans are."""
    with pytest.MonkeyPatch.context() as patch:
        if request.path.parent.name not in FINE_FOLDERS and request.path.stem not in FINE:
            grids.make_tables_coarse(patch)
        yield


@pytest.fixture(scope="module", autouse=True)
def _few_timed_runs(request: pytest.FixtureRequest) -> Iterator[None]:
    """One of each stage, and none again because other work has interrupted it.

    Costs decide which plan of those that fit a test gets, and it compares bits and bytes. So what else the machine does
    must not decide how long the test takes.
    """
    with pytest.MonkeyPatch.context() as patch:
        if request.path.parent.name not in TIMED_FOLDERS and request.path.stem not in TIMED:
            patch.setattr(stage_seconds, "_ENOUGH_SECONDS", 0.0)
            patch.setattr(stage_seconds, "_MOST_INTERRUPTED", 0)
        yield


@pytest.fixture(autouse=True)
def deterministic_mode() -> Iterator[None]:
    """``Trainer(deterministic=True)`` sets it for the process, and leaves it on."""
    mode = torch.get_deterministic_debug_mode()
    yield
    if torch.get_deterministic_debug_mode() != mode:
        torch.set_deterministic_debug_mode(mode)


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    """A thread that may draw random numbers makes later tests repeat forwards, and measure what that takes."""
    before = threads()
    yield
    deadline = time.monotonic() + 5
    while threads() > before and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    if threads() > before:
        stacks = [traceback.format_stack(frame) for frame in sys._current_frames().values()]
        pytest.fail("a thread outlives the test:\n" + "\n".join("".join(stack[:4]) for stack in stacks))


@pytest.fixture(scope="session")
def imported_python() -> Iterator[ImportedPython]:
    """For code in a process of its own, without the seconds in which torch is imported."""
    made = ImportedPython()
    yield made
    made.close()


@pytest.fixture(scope="session")
def hugging() -> Iterator[Any]:
    """Hugging Face's package, which reports much."""
    import transformers

    level = logging.getLogger("transformers").level
    logging.getLogger("transformers").setLevel(logging.ERROR)
    yield transformers
    logging.getLogger("transformers").setLevel(level)


@pytest.fixture(autouse=True)
def _same_seed_for_every_test() -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  (users and Lightning's seed_everything still use the global generator)
    # ``torch.manual_seed`` notes the whole stack for devices that do not exist, a third of what a short test takes.
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)
