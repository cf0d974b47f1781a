"""The table and the picture of :mod:`frontier`."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

TITLES = {
    "gpt8": "GPT, 8 blocks",
    "gpt24": "GPT, 24 blocks",
    "resnet101": "ResNet-101",
    "densenet121": "DenseNet-121",
    "vgg19": "VGG-19",
    "uneven": "uneven convolutions",
    "unet": "U-Net",
    "vit": "ViT",
    "gpt2": "GPT-2 (Hugging Face)",
    "regnet": "RegNetX-32",
    "mixer": "MLP-Mixer",
    "transformer": "nn.Transformer",
}
NAMES = {
    "ours": "lightning-rotor",
    "ours-compiled": "lightning-rotor, compiled blocks",
    "ours-whole": "lightning-rotor, compiled whole",
    "block": "checkpoint every block",
    "sequential": "checkpoint_sequential",
    "selective": "selective checkpoint",
    "sac-ilp": "torch's sac_ilp, its policies",
    "compile-block": "compile per block, budgets",
    "compile": "compile whole, budgets",
}
# Paul Tol's bright scheme, and a shape for those who see no colours.
STYLES = {
    "ours": ("#222222", "o"),
    "ours-compiled": ("#EE7733", "o"),
    "ours-whole": ("#228833", "o"),
    "block": ("#EE6677", "D"),
    "sequential": ("#CCBB44", "s"),
    "selective": ("#AA3377", "P"),
    "sac-ilp": ("#BBBBBB", "X"),
    "compile-block": ("#4477AA", "^"),
    "compile": ("#66CCEE", "v"),
}
OURS = ("ours", "ours-compiled", "ours-whole")
NOISE = 0.02


def table(rows: dict[str, Any]) -> str:
    """Every point, and whether ours is as fast at that peak."""
    first = next(iter(rows.values()))
    lines = [
        "# Memory against time",
        "",
        f"{first['device']}, {first['machine'].partition(',')[0]}; torch {first['torch']}; `python -m benchmarks.frontier`. "
        "Load: of the whole machine at the end of a run, which has one core.",
        "Peak and time are ratios to plain eager. *Ours*: the fastest of our points whose peak is at most that of the row, and with eager's bits",
        f"if the row has them; **slower** where it takes more than {NOISE:.0%} more of eager's time than the row does. Bits: gradients equal",
        "eager's to the bit; else the largest difference by the largest gradient. Rounds: interleaved, and final ones of the others and of ours that",
        "were the fastest, or take the most memory that fits, at their peaks; then these count.",
        "",
        *body(rows),
        "",
    ]
    return "\n".join(lines)


def body(rows: dict[str, Any]) -> list[str]:
    """What all workloads show together, and each point."""
    lines = _summary(rows)
    for name, row in rows.items():
        points = [point for point in row["points"] if "failed" not in point]
        lines += [
            "",
            f"## {TITLES[name]}",
            "",
            f"Eager: {row['eager_peak_bytes'] / 1e6:.0f} MB above weights and input, {row['eager_seconds']:.2f} s a step.",
            "",
            "| method | setting | peak | time | bits | ours at that peak | |",
            "|---|---|--:|--:|:-:|--:|---|",
        ]
        for point in points:
            verdict, best = _judged(point, points)
            if not point.get("final", True):
                verdict = f"{row['rounds']} rounds only"
            same = "yes" if point["same_bits"] else f"off by {point['off']:.0e}"
            ours = "" if best is None else f"{best:.3f}"
            method = NAMES.get(point["method"], point["method"])
            lines.append(
                f"| {method} | {point['setting']} | {point['peak']:.3f} | {point['time']:.3f} | {same} | {ours} | {verdict} |"
            )
        for point in row["points"]:
            if "failed" in point:
                lines.append(f"| {NAMES[point['method']]} | {point['setting']} | | | | | failed: {point['failed']} |")
        lines += [f"| {NAMES[method]} | | | | | | not run |" for method in row.get("left_out", ())]
    return lines


def _summary(rows: dict[str, Any]) -> list[str]:
    """What all workloads show together."""
    lines = [
        "| workload | load | rounds | points of others | ours slower | by at most | of these with eager's bits | eager again "
        "| real peak / predicted |",
        "|---|--:|---|--:|--:|--:|--:|--:|---|",
    ]
    for name, row in rows.items():
        points = [point for point in row["points"] if "failed" not in point]
        others = [point for point in points if _is_others(point)]
        slower = [(point, best) for point in others for verdict, best in [_judged(point, points)] if verdict]
        most = max((best - point["time"] for point, best in slower if best is not None), default=0.0)
        exact = sum(point["same_bits"] for point, _ in slower)
        noise = next(point["time"] for point in points if point["setting"] == "again")
        hits = [point["peak_bytes"] / point["predicted_bytes"] for point in points if point["predicted_bytes"]]
        spread = f"{min(hits):.4f} to {max(hits):.4f}" if hits else ""
        load = row["machine"].rpartition(" ")[2]
        rounds = f"{row['rounds']} + {row['final_rounds']}" if "final_rounds" in row else row["rounds"]
        lines.append(
            f"| {TITLES[name]} | {load} | {rounds} | {len(others)} | {len(slower)} | {most:.1%} | {exact} | {noise:.3f} "
            f"| {spread} |"
        )
    return [*lines, *_beside_blocks(rows)]


def _beside_blocks(rows: dict[str, Any]) -> list[str]:
    """Our overhead at the peaks of checkpoints around every block, by theirs, with eager's bits and with any."""
    exact, all_shares = [], []
    for row in rows.values():
        points = [point for point in row["points"] if "failed" not in point and point.get("final", True)]
        for block in (point for point in points if point["method"] == "block"):
            for shares, wanted in ((exact, block), (all_shares, {**block, "same_bits": False})):
                best = _fastest_of_ours(wanted, points)
                if best is not None:
                    shares.append((best["time"] - 1) / (block["time"] - 1))
    if not exact:
        return []
    compiled = ""
    if any(point["method"] in OURS[1:] for row in rows.values() for point in row["points"]):
        compiled = f", and {median(all_shares):.0%} where compiled stages may be chosen as well"
    return [
        "",
        f"At the peaks of a checkpoint around every block ({len(exact)} workloads), ours takes {median(exact):.0%} of its overhead in the",
        f"median with eager's bits{compiled}.",
    ]


def _judged(point: dict[str, Any], points: list[dict[str, Any]]) -> tuple[str, float | None]:
    """For a point of another method, whether ours is behind it, and the time of ours at its peak."""
    if not _is_others(point):
        return "", None
    best = _fastest_of_ours(point, [each for each in points if each.get("final", True)])
    if best is None:
        return "none fits", None
    return "**slower**" if best["time"] > point["time"] + NOISE else "", best["time"]


def finalists(points: list[dict[str, Any]]) -> list[bool]:
    """For each point, whether it is timed in the final rounds.

    All that are not ours are; and of ours, for each of their peaks, the fastest so far and those of each kind that take most memory.
    """
    working = [point for point in points if "failed" not in point]
    chosen = []
    for point in filter(_is_others, working):
        chosen.append(_fastest_of_ours(point, working))
        for method in OURS:
            fitting = [each for each in _ours_at(point, working) if each["method"] == method]
            chosen.append(max(fitting, key=lambda each: each["peak"], default=None))
    return ["failed" not in point and (point["method"] not in OURS or point in chosen) for point in points]


def _is_others(point: dict[str, Any]) -> bool:
    return point["method"] not in (*OURS, "eager")


def _ours_at(point: dict[str, Any], points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that take no more memory, and have eager's bits if this one has them. Plain eager execution is a plan of ours, too."""
    mine = [each for each in points if not _is_others(each) and each["peak"] <= point["peak"] + 5e-4]
    return [each for each in mine if each["same_bits"]] if point["same_bits"] else mine


def _fastest_of_ours(point: dict[str, Any], points: list[dict[str, Any]]) -> dict[str, Any] | None:
    return min(_ours_at(point, points), key=lambda each: each["time"], default=None)


def picture(rows: dict[str, Any], path: Path) -> None:
    """Peak against time, a panel for each workload; without what was timed in the first few rounds only."""
    import matplotlib.pyplot as plt

    count = len(rows)
    wide = min(count, 4 if count <= 12 else 5)
    figure, axes = plt.subplots(-(-count // wide), wide, figsize=(3.1 * wide, 2.9 * -(-count // wide)), squeeze=False)
    for panel in axes.flat[count:]:
        panel.set_axis_off()
    for panel, (name, row) in zip(axes.flat, rows.items(), strict=False):
        for method, (colour, marker) in reversed(STYLES.items()):
            points = sorted(
                (point["peak"], point["time"])
                for point in row["points"]
                if point["method"] == method and "failed" not in point and point.get("final", True)
            )
            if points:
                panel.plot(
                    *zip(*points, strict=True),
                    marker + ("-" if method in OURS else ""),
                    color=colour,
                    markersize=4,
                    linewidth=1.2,
                    label=NAMES[method],
                )
        panel.plot(1, 1, "*", color="#222222", markersize=9, label="plain eager")
        panel.set_title(TITLES[name], fontsize=9)
        panel.margins(0.08)
        panel.grid(alpha=0.25, linewidth=0.5)
        panel.tick_params(labelsize=7)
    for panel in axes.flat[max(count - wide, 0) : count]:
        panel.set_xlabel("peak / eager's peak", fontsize=8)
    for panel in axes[:, 0]:
        panel.set_ylabel("time / eager's time", fontsize=8)
    known: dict[str, Any] = {}
    for panel in axes.flat[:count]:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            known.setdefault(label, handle)
    figure.legend(known.values(), known.keys(), loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.set_layout_engine("constrained")
    figure.savefig(path, dpi=170)
    plt.close(figure)
