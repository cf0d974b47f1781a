"""``python -m lightning_rotor plan``: tables, JSON, pictures, and errors that are messages."""

from __future__ import annotations

import json
import random
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.random_chains import random_chain
from lightning_rotor import plan
from lightning_rotor.report.command_line import main
from lightning_rotor.report.frontier_plot import plot_frontier
from lightning_rotor.schedule import Schedule
from lightning_rotor.units import size_unit
from tests.grids import few
from tests.processes import run_python

NETS = """
    import torch
    from torch import nn
    from lightning_rotor.invertible import AdditiveCoupling

    def deep(width=64, depth=6):
        return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())))

    def flow():
        half = lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), *(AdditiveCoupling(half(), half()) for _ in range(6)))

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = deep(depth=2), deep(depth=2)

        def forward(self, x, scale=None):
            return self.right(self.left(x) * scale)

    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = deep()

        def forward(self, x):
            raise KeyError("the user's own mistake")

    def words():
        return nn.Sequential(nn.Embedding(8, 64), nn.Linear(64, 8))

    number = 7
"""


@pytest.fixture
def nets(tmp_path: Path) -> str:
    path = tmp_path / "nets.py"
    path.write_text(textwrap.dedent(NETS))
    return str(path)


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_it_prints_what_a_plan_costs(nets: str, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "--model", f"{nets}:deep", "--input", "512x64", "--budget", "1200KiB", "--optimizer", "adam"]
    assert main([*asked, "--device", device, "--curve"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    for words in ("Recomputation plan", "1.17 MiB", "optimizer state 195 KiB", "Stages", "Budget against overhead"):
        assert words in shown.out
    assert ("Estimated for" in shown.out) == (device == "meta")
    assert max(len(line) for line in shown.out.splitlines() if line.startswith(("│", "╭"))) <= 100


def test_the_table_is_the_plan_of_the_measured_chain(nets: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--model", f"{nets}:deep", "--input", "512x64", "--device", "meta")
    found = answer(capsys, *asked, "--budget", "1200KiB", "--optimizer", "sgd")
    weights = 4 * 6 * (64 * 64 + 64)
    assert found["resident_bytes"] == {
        "parameters": weights,
        "buffers": 0,
        "optimizer state": 0,
        "gradients": weights,
        "batch": 4 * 512 * 64,
    }
    assert found["reserved_bytes"] == weights + 4 * 512 * 64
    assert found["budget_bytes"] == 1200 * 1024
    assert found["peak_bytes"] <= found["budget_bytes"] < found["plain_peak_bytes"]
    assert len(found["stages"]) == 12
    recomputed = [number for number, stage in enumerate(found["stages"]) if stage["recomputed"]]
    assert tuple(recomputed) == Schedule.parse(found["schedule"]).recomputed != ()
    assert found["seconds"] == pytest.approx((1 + found["overhead"]) * found["plain_seconds"])
    assert found["frontier"] is None


def test_the_optimizer_counts(nets: str, capsys: pytest.CaptureFixture[str]) -> None:
    state = {}
    for optimizer in ("none", "sgd", "sgd:momentum=0.9", "AdamW"):
        found = answer(
            capsys,
            "--model",
            f"{nets}:deep",
            "--model-arg",
            "depth=2",
            "--input",
            "8x64",
            "--device",
            "meta",
            "--optimizer",
            optimizer,
        )
        state[optimizer] = found["resident_bytes"]["optimizer state"]
    weights = 4 * 2 * (64 * 64 + 64)
    # Step counters stay on the CPU, as they do with a GPU.
    assert state == {"none": 0, "sgd": 0, "sgd:momentum=0.9": weights, "AdamW": 2 * weights}


def test_by_default_the_budget_is_the_gpus_memory(nets: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--model", f"{nets}:deep", "--input", "8x64")
    found = answer(capsys, *asked, "--gpu", "t4")  # which means --device meta
    assert found["estimated_for"] == "T4"
    assert found["budget_bytes"] == (15 - 1) * 2**30
    assert found["overhead"] == pytest.approx(0, abs=1e-9)
    assert answer(capsys, *asked, "--gpu", "T4", "--budget", "50%")["budget_bytes"] == 15 * 2**29
    slow = answer(capsys, *asked, "--bandwidth", "1e6", "--flops", "1e20")
    assert slow["plain_seconds"] > 100 * found["plain_seconds"]


def test_several_inputs_arguments_and_precisions(nets: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--model", f"{nets}:Two", "--input", "256x64", "--input", "scale=scalar", "--device", "meta")
    full = answer(capsys, *asked)
    assert full["resident_bytes"]["batch"] == 4 * 256 * 64 + 4
    half = answer(capsys, *asked, "--precision", "bf16-true")
    assert half["resident_bytes"]["parameters"] == full["resident_bytes"]["parameters"] / 2
    mixed = answer(capsys, *asked, "--precision", "bf16-mixed")
    assert mixed["resident_bytes"]["parameters"] == full["resident_bytes"]["parameters"]
    assert mixed["plain_peak_bytes"] < full["plain_peak_bytes"]
    wide = answer(capsys, "--model", f"{nets}:deep", "--model-arg", "depth=2", "--input", "4x64", "--activations-only")
    assert len(wide["stages"]) == 4
    assert wide["reserved_bytes"] == 0


@pytest.mark.parametrize("device", few(["cpu", "meta"], "cpu"))
def test_batch_sizes(nets: str, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [
        "--model",
        f"{nets}:deep",
        "--input",
        "64x64",
        "--budget",
        "500KiB",
        "--optimizer",
        "sgd",
        "--device",
        device,
    ]
    found = answer(capsys, *asked, "--batch-sizes", "160,16,64,4096")
    assert [entry["batch_size"] for entry in found["batch_sizes"]] == [16, 64, 160]  # the last does not fit
    assert found["measured_batch_sizes"] == [32, 64]
    assert all(entry["peak_bytes"] <= found["budget_bytes"] == 500 * 1024 for entry in found["batch_sizes"])
    assert [entry["recomputed_stages"] > 0 for entry in found["batch_sizes"]] == [False, False, True]
    speed = {entry["batch_size"]: entry["samples_per_second"] for entry in found["batch_sizes"]}
    assert speed[found["best_batch_size"]] == max(speed.values())
    single = answer(capsys, *asked)  # the measured size is predicted to the byte
    assert found["batch_sizes"][1]["peak_bytes"] == single["peak_bytes"]
    assert main(["plan", *asked, "--batch-sizes"]) == 0
    shown = capsys.readouterr().out
    assert "Batch sizes within 500 KiB, from measurements at (32, 64)" in shown
    assert shown.count("best") == 1


def test_batch_sizes_that_cannot_be_asked_for(nets: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "--model", f"{nets}:Two", "--device", "meta", "--input", "64x64"]
    for more, complaint in (
        (
            ["--batch-sizes", "8,none"],
            "argument --batch-sizes: 'none' is not possible: expected a positive number, such as 500 or 60e12",
        ),
        (["--batch-sizes", "--curve"], "expected no --curve"),
        (["--input", "scale=8x64", "--batch-sizes"], "the inputs have first dimensions [8, 64]: expected one number"),
    ):
        assert main([*asked, *more]) == 2
        assert complaint in capsys.readouterr().err


def test_the_curve_in_json_holds_for_the_whole_process(nets: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--model", f"{nets}:deep", "--input", "512x64", "--device", "meta")
    points = answer(capsys, *asked, "--curve")["frontier"]
    sizes = [point["budget_bytes"] for point in points]
    assert sizes == sorted(sizes)
    assert points[-1]["overhead"] == pytest.approx(0, abs=1e-9)
    least = answer(capsys, *asked, "--budget", str(sizes[0]))
    assert least["peak_bytes"] <= sizes[0]
    assert main(["plan", *asked, "--budget", str(sizes[0] - 1)]) == 2
    assert f"({sizes[0]:,} bytes)" in capsys.readouterr().err


# Long forwards beside what they save: a link gains something.
WIDE = (
    "--model-arg",
    "width=1024",
    "--model-arg",
    "depth=6",
    "--input",
    "65536x1024",
    "--activations-only",
    "--budget",
    "1700MiB",
)


def test_a_link_is_told_with_what_it_carries_and_gains(
    nets: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [*WIDE, "--model", f"{nets}:deep"]
    without = answer(capsys, *asked, "--gpu", "H100")
    assert without["offload"] is None
    data = answer(capsys, *asked, "--gpu", "H100", "--offload", "50GB/s")
    moves = data["offload"]
    assert moves["out_bytes_per_second"] == moves["back_bytes_per_second"] == 50e9
    assert moves["overhead_without_moves"] == without["overhead"] > data["overhead"]
    assert moves["moved_stages"] == sum(stage["moved"] for stage in data["stages"]) > 0
    assert moves["host_bytes"] > 0
    forward_seconds = sum(stage["forward_seconds"] for stage in data["stages"])
    plain_bytes = data["plain_peak_bytes"] - data["reserved_bytes"]
    assert moves["carried_share"] == pytest.approx(50e9 * forward_seconds / plain_bytes)
    pictures = ("--plot", str(tmp_path / "step.png"), "--plot-curve", str(tmp_path / "curve.svg"))
    assert main(["plan", *asked, "--gpu", "H100", "--offload", "50GB/s", "--curve", *pictures]) == 0
    shown = capsys.readouterr().out
    assert "50 GB/s each way: in a forward " in shown
    assert "Moving over this link lowers the overhead from" in shown
    assert "without moves" in shown
    # In a terminal of 80 columns nothing is cut.
    assert "…" not in shown.partition("Budget against overhead")[2]


def test_a_gpu_knows_its_link_and_a_limit_of_the_host_holds(nets: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = (*WIDE, "--model", f"{nets}:deep")
    moves = answer(capsys, *asked, "--gpu", "gh200", "--offload", "host:600MiB")["offload"]
    assert (moves["out_bytes_per_second"], moves["back_bytes_per_second"]) == (170e9, 410e9)
    assert moves["room_bytes"] == 600 * 2**20 >= moves["host_bytes"]
    sizes = answer(capsys, *asked, "--gpu", "H100", "--offload", "50GB/s", "--batch-sizes", "32768,65536")
    assert [size["batch_size"] for size in sizes["batch_sizes"]] == [32768, 65536]


def test_on_the_cpu_the_link_to_a_file_is_measured(
    nets: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "scratch"
    folder.mkdir()
    asked = ("--model", f"{nets}:deep", "--model-arg", "depth=3", "--input", "512x64", "--budget", "1000KiB")
    moves = answer(capsys, *asked, "--device", "cpu", "--offload", f"disk:{folder}")["offload"]
    assert moves["out_bytes_per_second"] > 1e6
    assert not list(folder.iterdir())


def test_it_saves_pictures(nets: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {"--plot": tmp_path / "step.png", "--plot-curve": tmp_path / "curve.svg", "--draw": tmp_path / "net.svg"}
    asked = ["plan", "--model", f"{nets}:deep", "--model-arg", "depth=6", "--input", "512x64", "--budget", "1200KiB"]
    assert main([*asked, "--device", "meta", *(str(word) for pair in files.items() for word in pair)]) == 0
    assert capsys.readouterr().err.splitlines() == [f"wrote {path}" for path in files.values()]
    assert files["--plot"].read_bytes().startswith(b"\x89PNG")
    assert "<svg" in files["--plot-curve"].read_text()
    drawn = files["--draw"].read_text().replace("&#160;", " ")
    assert "deep(6), 512×64" in drawn
    assert "orange: recomputed" in drawn  # the plan's schedule, not the chain alone


def test_a_drawing_shows_what_the_plan_inverts(nets: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--model", f"{nets}:flow", "--input", "256x64", "--device", "cpu", "--activations-only")
    picture = tmp_path / "net.svg"
    plan = answer(capsys, *asked, "--budget", "720KiB", "--draw", str(picture))
    inverted = [item for item in plan["schedule"].split() if ":1" in item]
    assert inverted, plan["schedule"]
    assert "dark blue: inverted" in (drawn := picture.read_text().replace("&#160;", " "))
    assert "inverted <" in drawn  # alone or behind "recomputed, ": that depends on what was measured


# ---------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input", "8x64", "--budget", "10KiB"], r"mem_limit 10.0 KiB is below the minimum"),
        (["--input", "8x64", "--budget", "lots"], "memory limit 'lots' cannot be read"),
        (["--input", "8x64", "--device", "tpu"], "device 'tpu' is unknown: expected cpu, cuda or meta"),
        (["--input", "8x64", "--optimizer", "magic"], "optimizer 'magic' is unknown: expected one of adadelta"),
        (["--input", "8x64", "--optimizer", "adamw:fast=1"], "optimizer 'adamw:fast=1' cannot be made"),
        (["--input", "8x64", "--model-arg", "colour=1"], "cannot be called"),
        (["--input", "8x64", "--device", "cpu", "--gpu", "T4"], "expected no --device cpu"),
        (["--input", "8x63"], "must have same reduction dim"),
        (["--input", "8x64", "--plot", "/no/such/folder/a.png"], "the picture cannot be written"),
        (["--input", "8x64", "--draw", "/no/such/folder/a.svg"], "the picture cannot be written"),
        (["--input", "8x64", "--plot", "picture.nonsense"], "expected a name that ends in"),
        (["--input", "8x64", "--optimizer", "adamv"], "or none. Did you mean adam?"),
        (["--input", "8x64", "--offload", "disk:/tmp"], "expected --offload host, or the speed of the link"),
        (["--input", "8x64", "--device", "cpu", "--offload"], "these tensors are on 'cpu': expected offload=\"disk:"),
        (["--input", "8x64", "--offload", "0GB/s"], "bandwidth of offload is '0GB/s': expected a positive number"),
        (["--input", "8x64", "--budgte", "1GiB"], "unrecognized arguments: --budgte 1GiB. Did you mean --budget?"),
    ],
)
def test_an_error_is_a_message_and_status_2(
    nets: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    device = [] if "--device" in arguments else ["--device", "meta"]
    assert main(["plan", "--model", f"{nets}:deep", *device, *arguments]) == 2
    shown = capsys.readouterr()
    assert message.lower() in shown.err.lower()
    assert shown.err.splitlines()[-1].startswith(("error: ", "lightning-rotor plan: error: "))
    assert "Traceback" not in shown.err


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("no.such.thing", "no.such cannot be imported: No module named 'no'. Expected package.module.name, such as"),
        ("no.such.thing", "or file.py:name. Try pip install no if that is a package"),
        (
            "lacking.py:net",
            "lacking.py cannot be imported: No module named 'absent_package'. Expected package",
        ),
        ("other.net", "other cannot be imported: No module named 'absent_package'. Expected package"),
        ("torch.nn.Linearr", "that makes a module. Did you mean Linear?"),
        ("torch.nn:Linearr", "torch.nn has no 'Linearr'"),  # as entry points are written
        ("torch.nnn.Linear", "or file.py:name. Did you mean nn?"),
        ("torch.zzzzz.Linear", "or file.py:name. torch has no module 'zzzzz'"),
        ("nets.py:absent", "has no 'absent'"),
        ("absent.py:deep", "there is no file 'absent.py'"),
        ("nets.py:number", "expected a class or function that makes a module"),
        ("builtins.dict", "makes dict: expected a torch.nn.Module"),
        ("nets.py:Broken", "the user's own mistake"),
        (
            "nets.py:words",
            "the model looks up token ids in '0', and no input holds whole numbers: expected a type behind the shape of "
            "that input, such as --input 8x64:int64 (Expected tensor for",
        ),
    ],
)
def test_models_that_are_none_are_named(
    nets: str, model: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(Path(nets).parent)
    for name in ("lacking.py", "other.py"):
        Path(name).write_text("import absent_package.part\n")
    assert main(["plan", "--model", model, "--input", "8x64"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [[], ["plan"], ["plan", "--model", "a.b", "--input", "8xx"], ["plan", "--gpu", "Z"]]
)
def test_a_wrong_command_line_is_one_line_that_says_who_shows_how_it_is_used(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    command = " ".join(["lightning-rotor", *arguments[:1]])
    assert line.startswith(f"{command}: error: ")
    assert line.endswith(f"{command} --help shows how it is used")


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("option", "name", "message"),
    [
        ("--plot", "missing/step.png", "there is no folder 'missing'"),
        ("--plot-curve", "curve", "'curve' has no ending"),
        ("--plot-curve", "curve.jpeg2", "'curve.jpeg2' ends in '.jpeg2'"),
        ("--draw", "net.png", "'net.png' ends in '.png'"),
        ("--draw", "folder.svg", "'folder.svg' cannot be written to"),
    ],
)
def test_where_pictures_go_is_checked_before_anything_is_measured(
    device: str, option: str, name: str, message: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder.svg").mkdir()
    # This model cannot even be imported.
    asked = ["plan", "--model", "no.such.thing", "--input", "8", "--device", device, option, name]
    assert main(asked) == 2
    assert capsys.readouterr().err == (
        f"error: the picture cannot be written: {message}. Expected a name that ends in .png, .svg or .pdf "
        "(.svg for --draw), in a folder that exists\n"
    )


def test_advice_suggests_token_ids_too(nets: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "--model", f"{nets}:words", "--input", "8x64", "--devices", "2"]) == 2
    assert "such as --input 8x64:int64 (" in capsys.readouterr().err


def test_a_budget_far_above_leaves_the_curve_in_the_middle() -> None:
    roomy = plan(random_chain(random.Random(0), 9, "cnn"), 2**50)
    curve = roomy.frontier()
    (axes,) = plot_frontier(curve).axes
    left, right = axes.get_xlim()
    unit, _ = size_unit(curve[-1].peak_bytes)
    assert left * unit <= curve[0].peak_bytes
    assert curve[-1].peak_bytes - curve[0].peak_bytes > 0.5 * (right - left) * unit


@pytest.mark.parametrize("number", ["0", "-1", "nan", "inf", "fast"])
@pytest.mark.parametrize("option", ["--flops", "--bandwidth", "--slots"])
def test_numbers_that_are_not_positive_are_refused(
    option: str, number: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--model", "a.b", "--input", "8x8", f"{option}={number}"]) == 2
    said = capsys.readouterr().err
    assert f"argument {option}: '{number}'" in said
    assert "expected a positive" in said


def test_help_calls_the_program_as_it_was_called(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--help"], program="python -m lightning_rotor") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: python -m lightning_rotor plan ")
    assert "\n  python -m lightning_rotor plan --model torchvision" in shown


def test_pictures_without_matplotlib_are_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["plan", "--model", "no.such.thing", "--input", "8", "--plot", "plan.png"]) == 2
    assert capsys.readouterr().err == (
        "error: drawing needs matplotlib, which is not installed: pip install matplotlib\n"
    )


def test_a_traceback_comes_on_request(nets: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", f"{nets}:Broken", "--input", "8x64", "--traceback"]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_offers_an_estimate(nets: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", f"{nets}:deep", "--input", "8x64", "--device", "cuda"]) == 2
    assert "use --device meta with --gpu" in capsys.readouterr().err


@pytest.mark.parametrize(("model", "batch"), [("resnet50", 96), pytest.param("resnet101", 64, marks=pytest.mark.wide)])
def test_as_a_program_it_plans_a_model_of_torchvision(tmp_path: Path, model: str, batch: int) -> None:
    arguments = f"plan --model torchvision.models.{model} --input {batch}x3x224x224 --budget 4GiB --device meta --json"
    output, errors = run_python("-m", "lightning_rotor", *arguments.split(), cwd=tmp_path)
    assert errors == ""
    found = json.loads(output)
    assert found["peak_bytes"] <= found["budget_bytes"] == 4 * 2**30
    assert found["plain_peak_bytes"] > 8 * 2**30
    assert 0.05 < found["overhead"] < 0.3
