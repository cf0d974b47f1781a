"""What models of each kind gain, from results that are there: ``python -m benchmarks.kinds``, a second.

Writes ``benchmarks/results/kinds.md``, whose tables README and docs/index.md show, and the picture ``docs/rivals.png``. Nothing is measured.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.frontier_report import NAMES, STYLES, TITLES

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PICTURE = HERE.parent / "docs" / "rivals.png"
OVERHEADS = (0.05, 0.10, 0.20)

# Models whose memory against time was measured whole (frontier_cpu.json).
CURVES = {
    "language": ("gpt8", "gpt24", "gpt2", "transformer"),
    "vision, attention": ("vit", "mixer"),
    "vision, convolutions": ("resnet101", "densenet121", "unet", "uneven"),
    "vision, mostly weights": ("vgg19", "regnet"),
}
# Programs of other packages, each at one limit at which something is recomputed (projects.jsonl).
PROGRAMS = {
    "diffusion": "generation",
    "speech": "speech",
    "forecasting": "forecasting",
    "graphs": "graphs",
    "physics": "science",
}
PANELS = ("gpt24", "gpt2", "vit", "densenet121")


def curve_table(rows: dict[str, Any], first_batches: dict[str, float]) -> list[str]:
    """Least and most that models of a kind save at an overhead, with the bits of plain training."""
    lines = [
        "| kind of model | peak saved for 5 % more time | for 10 % | for 20 % | first batch |",
        "|---|--:|--:|--:|--:|",
    ]
    for kind, names in CURVES.items():
        saved = [spread(percent(_saved(rows[name]["points"], each)) for name in names) for each in OVERHEADS]
        steps = spread(round(first_batches[name]) for name in names)
        lines.append(f"| {kind} | {' | '.join(f'{each} %' for each in saved)} | {steps} steps |")
    return lines


def program_table(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Medians of what programs of a kind save, and at which time."""
    lines = [
        "| kind of program | tried | peak saved | time of a later step | first batch |",
        "|---|--:|--:|--:|--:|",
    ]
    for kind, file in PROGRAMS.items():
        found = [row for name in programs_of(file) if (row := rows.get(name)) and "later" in row.get("middle", {})]
        saved = percent(median(1 - row["middle"]["peak"] / row["plain_peak"] for row in found))
        times = sorted(row["middle"]["later"] for row in found)
        first = median((row.get("room") or row["middle"])["first"] for row in found)
        lines.append(
            f"| {kind} | {len(found)} | {saved} % | {median(times):.1f} of plain ({_times(times[0])} to {_times(times[-1])}) "
            f"| {first:.0f} s |"
        )
    return lines


def programs_of(file: str) -> list[str]:
    """Names of the programs in a file of ``benchmarks/project_programs``, without importing their packages."""
    text = (HERE / "project_programs" / f"{file}.py").read_text(encoding="utf-8")
    return re.findall(r"^@program\(.*?\)\n(?:@.*\n)*def (\w+)", text, re.MULTILINE)


def _saved(points: Iterable[dict[str, Any]], overhead: float) -> float:
    """Most that a plan with the bits of plain training saves at an overhead; nothing if each takes longer."""
    ours = [each for each in points if each["method"] == "ours" and "failed" not in each and each["same_bits"]]
    return max((1 - each["peak"] for each in ours if each["time"] <= 1 + overhead), default=0.0)


def _times(ratio: float) -> str:
    return f"{ratio:.1f}" if ratio < 10 else f"{ratio:.0f}"


def percent(share: float) -> int:
    """A share in percent."""
    return round(100 * max(share, 0))


def spread(values: Iterable[int]) -> str:
    """The least and the most."""
    least, *_, most = sorted(values)
    return str(least) if least == most else f"{least} to {most}"


def first_batches() -> dict[str, float]:
    """Duration of the first batch by model, in plain steps, as first_batch.md has it."""
    found = {}
    for line in (RESULTS / "first_batch.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 8 and cells[1].isdigit():
            found[cells[0]] = float(cells[4].removesuffix(" s")) / float(cells[2].removesuffix(" s"))
    return found


def newest() -> dict[str, dict[str, Any]]:
    """The last line of each program in projects.jsonl."""
    lines = (RESULTS / "projects.jsonl").read_text(encoding="utf-8").splitlines()
    return {row["name"]: row for row in map(json.loads, lines)}


def tables() -> tuple[list[str], list[str]]:
    """Both tables."""
    curves = json.loads((RESULTS / "frontier_cpu.json").read_text(encoding="utf-8"))
    return curve_table(curves, first_batches()), program_table(newest())


def document() -> str:
    """The page of results."""
    curves, programs = tables()
    return "\n".join(
        [
            "# What a model like mine gains",
            "",
            "`python -m benchmarks.kinds`, from results that are there; CPU, one thread, machines that others use.",
            "",
            "From [memory against time](frontier_cpu.md): plans with the bits of plain training. Peaks are of activations and new",
            "gradients, times are measured, both beside plain training; two numbers are the least and the most of the models of a",
            "kind. *First batch*: with measuring and planning, in plain steps ([table](first_batch.md)).",
            "",
            *(f"- {kind}: {', '.join(TITLES[name] for name in names)}" for kind, names in CURVES.items()),
            "",
            *curves,
            "",
            "From [programs of other packages](projects.md), small ones with steps of 10 to 240 ms: each at one limit, 70 % of what can be saved.",
            "Medians of a kind, and the least and the most; peaks are of the whole process, times of the processor. Steps that take many",
            "times a plain one mostly have sizes that change, or layers that are drawn at random: each is planned or watched.",
            "",
            *programs,
            "",
        ]
    )


def draw(rows: dict[str, Any], path: Path) -> None:
    """Peak against time of a few models: what computes the bits of plain training, in one row of panels."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(PANELS), figsize=(2.9 * len(PANELS), 3.1), layout="constrained")
    for panel, name in zip(axes, PANELS, strict=True):
        for method, (colour, marker) in reversed(STYLES.items()):
            points = sorted(
                (100 * point["peak"], 100 * (point["time"] - 1))
                for point in rows[name]["points"]
                if point["method"] == method
                and "failed" not in point
                and point.get("final", True)
                and point["same_bits"]
            )
            if points and (method == "ours" or not method.startswith("ours")):
                line = "-" if method == "ours" else ""
                panel.plot(*zip(*points, strict=True), marker + line, color=colour, markersize=5, label=NAMES[method])
        panel.plot(100, 0, "*", color="#222222", markersize=11, label="plain training")
        panel.set_title(TITLES[name], fontsize=10)
        panel.set_xlim(left=0)
        panel.set_ylim(bottom=-2)
        panel.grid(alpha=0.25, linewidth=0.5)
        panel.set_xlabel("peak memory, % of plain", fontsize=9)
        panel.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("time added, %", fontsize=9)
    known = {label: handle for panel in axes for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    figure.legend(known.values(), known.keys(), loc="outside lower center", ncols=6, fontsize=9, frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    """Write the page, and the picture if there is matplotlib."""
    (RESULTS / "kinds.md").write_text(document(), encoding="utf-8")
    if find_spec("matplotlib"):
        draw(json.loads((RESULTS / "frontier_cpu.json").read_text(encoding="utf-8")), PICTURE)


if __name__ == "__main__":
    main()
