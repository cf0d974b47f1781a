"""Programs of other people that once failed, each with the tests that show its kind with the right value.

The programs lie outside of the repository, in ``shared/cases``. A test that is renamed or dropped is noticed here, so
that no kind is left without one.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import nn

from lightning_rotor import RotorCallback
from tests.training import assert_same_training, tight_limit, train

TESTS = Path(__file__).parent
CASES = TESTS.parents[1] / "shared" / "cases"
HARNESSES = {"gpt", "hh", "more"}  # what several of the programs share

# Name of the program: file and name of each test.
SHOWN_BY: dict[str, tuple[str, ...]] = {
    "another_graph_each_step": (
        "test_steps_with_sizes.py::test_where_all_fits_with_room_nothing_is_searched_or_measured_after_the_first_steps",
        "test_other_packages.py::test_sizes_that_change_at_every_step_are_not_measured_each_where_calls_share_a_limit",
    ),
    "attribute_that_raises_another_error": (
        "stages/test_users_objects.py::test_a_module_that_raises_for_some_names_is_counted_in_a_dry_run",
        "stages/test_users_objects.py::test_a_module_whose_getattr_raises_anything",
    ),
    "communicates_in_a_helper": ("test_messages.py::test_messages_leave_the_bits_of_plain_training",),
    "communicates_under_checkpointable": (
        "test_messages.py::test_messages_leave_the_bits_of_plain_training",
        "test_messages.py::test_processes_that_exchange_messages_run_one_plan",
    ),
    "container_that_refuses_len": (
        "stages/test_users_objects.py::test_odd_objects_wherever_they_are_kept",
        "stages/test_users_objects.py::test_a_change_inside_of_a_list_that_refuses_len_is_seen",
    ),
    "context_with_a_name": ("stages/test_users_objects.py::test_the_context_of_a_function_may_have_any_attribute",),
    "costs_on_a_busy_machine": ("test_busy_machine.py::test_interrupted_runs_are_no_costs",),
    "damaged_plans": (
        "test_damaged_files.py::test_a_damaged_plan_is_a_plan_error_or_the_plan",
        "test_damaged_files.py::test_a_text_that_is_no_schedule_is_refused_at_once",
    ),
    "damaged_states": ("test_damaged_files.py::test_a_damaged_state_is_left_aside",),
    "dry_run_kinds": ("test_first_step.py::test_what_the_dry_run_does_not_reach_is_planned_from_the_first_step_on",),
    "fsdp_without_reshard": ("test_fsdp_attempts.py::test_training_is_what_it_was_without_the_attempt",),
    "hugging_face_trainer": ("test_hugging_face.py::test_the_hugging_face_trainer_trains_it_as_it_is",),
    "interrupt_while_recording": (
        "test_interrupts.py::test_an_interrupt_at_each_line_that_changes_something_leaves_all_as_it_was",
        "test_interrupts.py::test_training_goes_on_after_an_interrupt",
    ),
    "layers_skipped_at_random": ("test_whole_steps.py::test_a_size_that_is_a_draw_is_never_exceeded_in_silence",),
    "module_called_twice_with_lengths": (
        "test_steps_with_sizes.py::test_where_all_fits_with_room_nothing_is_searched_or_measured_after_the_first_steps",
    ),
    "module_inside_a_wrapper": ("test_target.py::test_of_a_module_and_its_wrapper_the_outer_one_is_planned",),
    "more_lengths_than_plans": (
        "test_changing_shapes.py::test_steps_of_ever_other_lengths_settle",
        "test_changing_shapes.py::test_a_size_that_fits_without_recomputation_is_measured_once_that_pays_and_no_profiler_records",
    ),
    "names_of_a_wrapped_model": (
        "test_names_of_a_wrapped_model.py::test_names_are_those_of_the_module_also_inside_of_another",
        "test_names_of_a_wrapped_model.py::test_the_signature_is_the_modules",
    ),
    "object_in_a_closure": ("test_holders.py::test_a_change_of_what_is_held_is_seen",),
    "odd_names": ("test_odd_names.py::test_odd_names_are_printed_as_they_are",),
    "one_of_eight_blocks": (
        "test_cases.py::test_equal_blocks_of_a_module_that_cannot_be_recorded_are_planned_together",
        "test_target.py::test_what_can_be_no_chain_is_passed_over",
    ),
    "optimizer_step_over_limit": ("test_whole_steps.py::test_the_step_of_an_optimizer_counts",),
    "other_lightning_import": ("test_two_lightnings.py::test_a_trainer_of_either_trains_with_plans_and_resumes",),
    "pipeline_balance_message": (
        "test_balance.py::test_a_balance_for_another_number_of_devices_is_shown_as_it_was_written",
    ),
    "pipeline_bf16_mixed": ("test_pipeline_start.py::test_precisions_are_those_of_one_process",),
    "tensor_parallel": (
        "test_tensor_parallel.py::test_parts_of_a_sequence_are_planned_to_the_same_bits",
        "test_meshes.py::test_spread_layers_in_units_are_planned",
    ),
    "terminal_without_unicode": ("test_odd_names.py::test_a_terminal_without_unicode_shows_what_it_can",),
    "thread_draws_random_numbers": (
        "stages/test_draws.py::test_a_loader_that_prefetches_gives_the_batches_of_plain_training",
    ),
    "use_takes_text": ("test_damaged_files.py::test_use_takes_a_schedules_text_and_says_what_else_it_takes",),
    "vision_language_model": (
        "test_vision_language.py::test_they_train_inside_a_limit_with_the_bits_of_plain_training",
        "test_vision_language.py::test_hooks_that_collect_for_the_code_around_them_run_again",
    ),
}


@cache
def names_in(file: str) -> frozenset[str]:
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("case", SHOWN_BY)
def test_each_case_is_a_test_of_its_kind(case: str) -> None:
    for name in SHOWN_BY[case]:
        file, _, test = name.partition("::")
        assert test.startswith("test_")
        assert test in names_in(file), f"{case} is shown by no test any more: {name} is gone"


@pytest.mark.skipif(not CASES.is_dir(), reason="the programs are kept beside the repository")
def test_no_case_is_left_out() -> None:
    assert {path.stem for path in CASES.glob("*.py")} - HARNESSES == set(SHOWN_BY)


class Denoiser(L.LightningModule):
    """Eight equal blocks between two transforms, of which the second one cannot be recorded."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Conv1d(18, 36, 1), nn.GELU(), nn.Conv1d(36, 18, 1)) for _ in range(8)
            )
            self.register_buffer("window", torch.hann_window(16))

        def forward(self, wave: torch.Tensor) -> torch.Tensor:
            spectrum = torch.stft(wave, 16, 4, window=self.window, return_complex=True)
            x = torch.cat([spectrum.real, spectrum.imag], 1)
            for block in self.blocks:
                x = x + block(x)
            real, imaginary = x.chunk(2, 1)
            return torch.istft(torch.complex(real, imaginary), 16, 4, window=self.window, length=wave.shape[1])

    def __init__(self) -> None:
        super().__init__()
        self.net = self.Net()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (wave,) = batch
        return (self.net(wave) - wave).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


@pytest.mark.wide
def test_equal_blocks_of_a_module_that_cannot_be_recorded_are_planned_together(tmp_path: Path) -> None:
    waves = [torch.randn(24, 400, generator=torch.Generator().manual_seed(1))]
    limit = tight_limit(Denoiser, waves, tmp_path, batch_size=6)
    rotor = RotorCallback(limit, show_table=False)
    planned = train(Denoiser, waves, tmp_path, batch_size=6, callback=rotor)
    assert_same_training(train(Denoiser, waves, tmp_path, batch_size=6), planned)
    assert rotor.plan is not None
    assert rotor.plan.recomputed
    stages = " ".join(getattr(rotor.plan, "names", ()) or rotor.plan.chain.names)
    assert all(f"blocks.{number}" in stages for number in range(8))
