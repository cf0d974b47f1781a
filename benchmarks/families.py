"""A small model of every family of timm, and twenty of transformers, as a newcomer trains them: one callback, one limit.

    python -m benchmarks.families                       # all that have no result yet; writes benchmarks/results/families.md
    python -m benchmarks.families convnext hub:Bert     # some of them, again

Of a family of timm it is the model with the fewest parameters, with stochastic depth and dropout as they are; models of transformers have small
configurations and random weights. Each trains four steps plainly and four under RotorCallback, in a process of its own, at a limit in the middle
between the least that the error names and the plain peak. Weights and losses are compared bit for bit.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.models import run

RESULTS = Path(__file__).parent / "results"
TABLE = RESULTS / "families.json"
STEPS, BATCH, SMALL_IMAGE, LENGTH, WORDS = 4, 4, 96, 48, 200
LARGEST = 60e6  # parameters; larger ones do not train on two cores

# Sizes of the hub's models; each is known by the names that its configuration has for them.
SIZES = {
    "vocab_size": WORDS, "max_position_embeddings": 64, "n_positions": 64,
    "hidden_size": 64, "n_embd": 64, "d_model": 64, "dim": 64, "embedding_size": 64, "emb_dim": 64,
    "intermediate_size": 128, "d_ff": 128, "ffn_dim": 128, "hidden_dim": 128, "d_inner": 128, "d_kv": 16, "d_head": 16, "head_dim": 16,
    "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
    "num_hidden_layers": 3, "n_layer": 3, "num_layers": 3, "n_layers": 3, "encoder_layers": 2, "decoder_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "num_heads": 4, "n_heads": 4, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "num_key_value_heads": 2, "decoder_start_token_id": 0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "image_size": 32, "patch_size": 8,
}  # fmt: skip
HUB = {
    "Albert": "ForMaskedLM", "Bart": "ForConditionalGeneration", "Bert": "ForMaskedLM", "Bloom": "ForCausalLM", "DeiT": "ForImageClassification",
    "DistilBert": "ForMaskedLM", "Electra": "ForMaskedLM", "Falcon": "ForCausalLM", "GPT2": "LMHeadModel", "GPTNeoX": "ForCausalLM",
    "Gemma": "ForCausalLM", "Llama": "ForCausalLM", "MPNet": "ForMaskedLM", "Mistral": "ForCausalLM", "OPT": "ForCausalLM",
    "Phi": "ForCausalLM", "Qwen2": "ForCausalLM", "Roberta": "ForMaskedLM", "T5": "ForConditionalGeneration", "ViT": "ForImageClassification",
}  # fmt: skip


def of_hub(name: str) -> tuple[Callable[[], Any], dict[str, Any]]:
    """A model of transformers, and a batch as its documentation shows it."""
    import torch
    import transformers

    config = getattr(transformers, f"{name}Config")
    known = config().to_dict()
    settings = config(**{key: value for key, value in SIZES.items() if key in known or key == "decoder_start_token_id"})
    build = getattr(transformers, name + HUB[name])
    if "image_size" in known:
        batch = {"pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": torch.randint(2, (BATCH,))}
    else:
        ids = torch.randint(3, WORDS, (BATCH, LENGTH))
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
    return lambda: build(settings), batch


def of_timm(family: str) -> tuple[Callable[[], Any], dict[str, Any]]:
    """The smallest model of a family, and images of the smallest size that it takes."""
    import timm
    import torch

    def parameters(name: str) -> float:
        try:
            with torch.device("meta"):
                return sum(each.numel() for each in timm.create_model(name).parameters())
        except Exception:  # some cannot be made there
            return float("inf")

    names = sorted(timm.list_models(module=family), key=len)
    name = min(names[:12], key=parameters)
    if parameters(name) > LARGEST:
        raise ValueError(f"{name} has {parameters(name):,.0f} parameters")
    settings = timm.get_pretrained_cfg(name, allow_unregistered=True)
    size = settings.input_size[-1] if settings is not None else 224
    if settings is not None and not settings.fixed_input_size:
        size = min(size, SMALL_IMAGE)
    batch = {"x": torch.randn(BATCH, 3, size, size), "labels": torch.randint(5, (BATCH,))}
    return lambda: timm.create_model(name, num_classes=5), batch


def measure(name: str) -> dict[str, Any]:
    """Train a model plainly and under a plan."""
    import lightning.pytorch as L
    import torch
    import torch.nn.functional as F
    from torch.utils.data import DataLoader

    from benchmarks.steps import Followed, Peaks
    from lightning_rotor import BudgetError, RotorCallback

    torch.set_num_threads(1)
    torch.manual_seed(0)
    is_hub = name.startswith("hub:")
    build, batch = of_hub(name.removeprefix("hub:")) if is_hub else of_timm(name)

    class Task(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = build().train()
            self.losses: list[torch.Tensor] = []

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = self.net(**batch).loss if is_hub else F.cross_entropy(self.net(batch["x"]), batch["labels"])
            self.losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)

    def train(*callbacks: L.Callback) -> Task:
        L.seed_everything(0, verbose=False)
        task = Task()
        L.Trainer(
            accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, callbacks=list(callbacks),
        ).fit(task, DataLoader([batch] * STEPS, batch_size=None))  # fmt: skip
        return task

    peaks = Peaks()
    plain = train(peaks)
    plain_peak = max(peaks.peaks[1:])
    try:
        train(RotorCallback("10KiB", show_table=False))
        raise AssertionError("10 KiB were enough")
    except BudgetError as error:
        least = error.minimum_bytes
    limit = (least + plain_peak) // 2
    rotor = RotorCallback(limit, show_table=False)
    followed = Followed(rotor)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning_rotor").addHandler(handler)
    logging.getLogger("lightning_rotor").setLevel(logging.INFO)
    task = train(rotor, followed)
    same = all(map(torch.equal, plain.state_dict().values(), task.state_dict().values()))
    same = same and all(map(torch.equal, plain.losses, task.losses))
    plan = rotor.plan
    assert plan is not None
    peak = max(each for each in followed.peaks[1:] if each is not None)
    return {
        "model": type(task.net).__name__,
        "plain": plain_peak,
        "least": least,
        "limit": limit,
        "peak": peak,
        "kept": peak <= limit,
        "stages": sum(len(call.chain) for call in plan.calls),
        "planned": planned(said),
        "overhead": plan.overhead,
        "same": same,
    }


def planned(said: list[str]) -> str:
    """What share of the compute is planned, from the line of the log that says it."""
    line = next(each for each in said if each.startswith("RotorCallback plans"))
    shares = re.findall(r"(\d+) %", line)
    return f"{sum(map(int, shares))} %" if shares else "all"


def families() -> list[str]:
    """Names of all models to try."""
    import timm

    return [*(name for name in timm.list_modules() if timm.list_models(module=name)), *(f"hub:{name}" for name in HUB)]


def markdown(rows: dict[str, Any]) -> str:
    """The table."""
    import timm
    import torch
    import transformers

    from lightning_rotor.units import format_bytes

    good = [row for row in rows.values() if "failed" not in row]
    lines = [
        "# Families of timm and models of transformers",
        "",
        f"`python -m benchmarks.families`, torch {torch.__version__}, timm {timm.__version__}, transformers {transformers.__version__}, "
        f"{platform.machine()}, one thread, batch {BATCH}, {STEPS} steps.",
        f"{len(good)} of {len(rows)} trained: {sum(row['same'] for row in good)} with the same bits as plain training, "
        f"{sum(row['kept'] for row in good)} inside the limit from the second step on. Least is",
        "the minimum that the error for a smaller limit names; the limit is halfway from there to the plain peak.",
        "",
        "| family | class | plain peak | least | limit | peak | stages | overhead | planned | limit kept | same bits |",
        "|---|---|---:|---:|---:|---:|---:|---:|---|---|---|",
    ]
    for name, row in rows.items():
        if "failed" in row:
            lines.append(f"| {name} | **{row['failed']}** | | | | | | | | | |")
            continue
        sizes = " | ".join(format_bytes(row[key]) for key in ("plain", "least", "limit", "peak"))
        answers = " | ".join("yes" if row[key] else "**no**" for key in ("kept", "same"))
        lines.append(
            f"| {name} | {row['model']} | {sizes} | {row['stages']} | {row['overhead']:.1%} | {row['planned']} | {answers} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run what is asked for, and write the table after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", help="modules of timm.models, and hub:NAME; all without a result by default"
    )
    parser.add_argument("--limit", type=float, default=240, help="seconds for one model")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        warnings.simplefilter("ignore")
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        print(json.dumps(measure(options.names[0])))
        return
    rows: dict[str, Any] = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    for name in options.names or [each for each in families() if each not in rows]:
        rows[name] = run(options.limit, "-m", "benchmarks.families", "--one", name)
        print(f"{name}: {rows[name]}", flush=True)
        rows = dict(sorted(rows.items()))
        TABLE.write_text(json.dumps(rows, indent=1) + "\n")
        (RESULTS / "families.md").write_text(markdown(rows))


if __name__ == "__main__":
    main()
