"""Series: darts, pytorch-forecasting, neuralforecast, chronos-forecasting. The first three bring LightningModules of their own."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch

from benchmarks.project_programs.program import STEPS, Run, Task, program


def waves(length: int = 400) -> np.ndarray:
    """Three noisy waves."""
    time = np.arange(length)[:, None]
    return np.sin(time / np.array([5.0, 9.0, 14.0])) + 0.1 * np.random.default_rng(0).standard_normal((length, 3))


def fit_darts(run: Run, kind: str, **settings: Any) -> None:
    """Fit a forecasting model of darts, which makes its Trainer of pytorch_lightning."""
    from darts import TimeSeries, models

    series = TimeSeries.from_values(waves(4000).astype(np.float32))
    model = getattr(models, kind)(
        input_chunk_length=48,
        output_chunk_length=12,
        batch_size=128,
        n_epochs=10,
        random_state=0,
        pl_trainer_kwargs=run.settings,
        **settings,
    )
    model.fit(series, verbose=False)


@program("darts")
def darts_tcn(run: Run) -> None:
    """TCNModel of darts, its own LightningModule."""
    fit_darts(run, "TCNModel", dropout=0.1, weight_norm=True)


@program("darts")
def darts_tft(run: Run) -> None:
    """TFTModel of darts, with quantiles and relative positions."""
    fit_darts(run, "TFTModel", hidden_size=16, lstm_layers=1, num_attention_heads=4, add_relative_index=True)


@program("darts")
def darts_nbeats(run: Run) -> None:
    """NBEATSModel of darts: blocks that subtract from their input."""
    fit_darts(run, "NBEATSModel", num_stacks=3, num_blocks=2, num_layers=2, layer_widths=64)


@program("darts")
def darts_transformer(run: Run) -> None:
    """TransformerModel of darts."""
    fit_darts(
        run, "TransformerModel", d_model=32, nhead=4, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=64
    )


def forecasting_data() -> tuple[Any, Any]:
    """A TimeSeriesDataSet of pytorch-forecasting whose windows have lengths drawn at random, and its loader."""
    import pandas as pd
    from pytorch_forecasting import TimeSeriesDataSet

    frames = [
        pd.DataFrame({"time": range(120), "group": str(k), "value": waves(120)[:, k], "price": np.arange(120) % 7.0})
        for k in range(3)
    ]
    data = TimeSeriesDataSet(
        pd.concat(frames, ignore_index=True),
        time_idx="time",
        target="value",
        group_ids=["group"],
        max_encoder_length=40,
        min_encoder_length=20,
        max_prediction_length=10,
        static_categoricals=["group"],
        time_varying_known_reals=["time", "price"],
        time_varying_unknown_reals=["value"],
        randomize_length=True,
    )
    return data, data.to_dataloader(train=True, batch_size=32, num_workers=0)


@program("pytorch-forecasting")
def temporal_fusion(run: Run) -> None:
    """TemporalFusionTransformer of pytorch-forecasting, windows of random lengths."""
    from pytorch_forecasting import QuantileLoss, TemporalFusionTransformer

    data, loader = forecasting_data()
    model = TemporalFusionTransformer.from_dataset(
        data,
        hidden_size=16,
        attention_head_size=2,
        dropout=0.1,
        hidden_continuous_size=8,
        loss=QuantileLoss(),
        log_interval=-1,
    )
    run.fit(model, loader, gradient_clip_val=0.1)


@program("pytorch-forecasting")
def nhits_of_forecasting(run: Run) -> None:
    """NHiTS of pytorch-forecasting."""
    import pandas as pd
    from pytorch_forecasting import NHiTS, TimeSeriesDataSet
    from pytorch_forecasting.metrics import SMAPE

    frames = [pd.DataFrame({"time": range(120), "group": str(k), "value": waves(120)[:, k]}) for k in range(3)]
    data = TimeSeriesDataSet(
        pd.concat(frames, ignore_index=True), time_idx="time", target="value", group_ids=["group"], max_encoder_length=40,
        max_prediction_length=10, time_varying_unknown_reals=["value"],
    )  # fmt: skip
    model = NHiTS.from_dataset(data, hidden_size=64, loss=SMAPE(), log_interval=-1)
    run.fit(model, data.to_dataloader(train=True, batch_size=32, num_workers=0))


def fit_neuralforecast(run: Run, kind: str, **settings: Any) -> None:
    """Fit a model of neuralforecast, which makes its Trainer of pytorch_lightning and cuts windows at random."""
    import pandas as pd
    from neuralforecast import NeuralForecast, models

    names = (
        "logger",
        "enable_checkpointing",
        "enable_progress_bar",
        "enable_model_summary",
        "callbacks",
        "accelerator",
        "devices",
    )
    trainer = {key: value for key, value in run.settings.items() if key in names}
    model = getattr(models, kind)(
        h=12, input_size=48, max_steps=STEPS, windows_batch_size=64, batch_size=4, random_seed=0, **trainer, **settings
    )
    dates = pd.date_range("2020-01-01", periods=400, freq="h")
    frame = pd.concat(
        [pd.DataFrame({"unique_id": f"wave {k}", "ds": dates, "y": waves()[:, k]}) for k in range(3)], ignore_index=True
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        NeuralForecast(models=[model], freq="h").fit(df=frame)


@program("neuralforecast")
def patch_tst(run: Run) -> None:
    """PatchTST of neuralforecast, windows drawn at random in the training step."""
    fit_neuralforecast(
        run, "PatchTST", hidden_size=32, n_heads=4, encoder_layers=3, linear_hidden_size=64, patch_len=8, stride=4
    )


@program("neuralforecast")
def nhits(run: Run) -> None:
    """NHITS of neuralforecast, windows drawn at random in the training step."""
    fit_neuralforecast(run, "NHITS", mlp_units=[[64, 64]] * 3)


@program("chronos-forecasting")
def chronos_bolt(run: Run) -> None:
    """Chronos-Bolt's T5 on patches of windows that are cut at random from long series."""
    from chronos.chronos_bolt import ChronosBoltModelForForecasting
    from transformers import T5Config

    class Windows(Task):
        def training_step(self, series: torch.Tensor, batch_idx: int) -> torch.Tensor:
            start = int(torch.randint(0, series.shape[1] - 140, ()))
            length = 64 + 16 * int(torch.randint(0, 4, ()))
            context, target = series[:, start : start + length], series[:, start + length : start + length + 16]
            return self.net(context=context, target=target).loss

    config = T5Config(
        vocab_size=2, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0, pad_token_id=0
    )
    config.chronos_config = {
        "context_length": 128, "prediction_length": 16, "input_patch_size": 8, "input_patch_stride": 8, "quantiles": [0.1, 0.5, 0.9],
        "use_reg_token": True,
    }  # fmt: skip
    series = torch.from_numpy(waves(400).T.astype(np.float32)).repeat(8, 1)
    run.fit(Windows(ChronosBoltModelForForecasting(config)), [series] * STEPS)
