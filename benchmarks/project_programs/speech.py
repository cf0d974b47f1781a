"""Sound: torchaudio, speechbrain, and transformers' Whisper and wav2vec 2.0."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.project_programs.program import STEPS, OwnLoss, Run, Task, program

WORDS = 64


@program("transformers")
def whisper_layerdrop(run: Run) -> None:
    """Whisper whose layers are skipped at random, also between the first and the last."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=WORDS, d_model=64, encoder_layers=3, decoder_layers=3, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=128, decoder_ffn_dim=128, max_source_positions=100, max_target_positions=32, num_mel_bins=40, encoder_layerdrop=0.3,
        decoder_layerdrop=0.3, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    batches = [
        {"input_features": torch.randn(4, 40, 200), "labels": torch.randint(3, WORDS, (4, 24))} for _ in range(STEPS)
    ]
    run.fit(OwnLoss(WhisperForConditionalGeneration(config)), batches)


@program("transformers")
def wav2vec_ctc(run: Run) -> None:
    """Wav2vec 2.0 with CTC: masked spans of time, layerdrop, a frozen feature encoder."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    config = Wav2Vec2Config(
        vocab_size=WORDS, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128, conv_dim=(32, 32, 32),
        conv_stride=(5, 4, 4), conv_kernel=(10, 8, 4), num_feat_extract_layers=3, num_conv_pos_embeddings=16, layerdrop=0.1,
        mask_time_length=4, ctc_loss_reduction="mean", pad_token_id=0,
    )  # fmt: skip
    net = Wav2Vec2ForCTC(config)
    net.freeze_feature_encoder()
    batches = [{"input_values": torch.randn(4, 8000), "labels": torch.randint(1, WORDS, (4, 10))} for _ in range(STEPS)]
    run.fit(OwnLoss(net), batches)


@program("torchaudio")
def conformer_ctc(run: Run) -> None:
    """Conformer of torchaudio on spectrograms of different lengths, with CTC."""
    import torchaudio
    from torch import nn

    class Recognizer(Task):
        def __init__(self) -> None:
            super().__init__(torchaudio.models.Conformer(40, 4, 64, 3, 15, dropout=0.1))
            self.out = nn.Linear(40, WORDS)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            frames, lengths, words = batch
            found, found_lengths = self.net(frames, lengths)
            scores = self.out(found).log_softmax(-1).transpose(0, 1)
            return F.ctc_loss(scores, words, found_lengths, torch.full((len(words),), words.shape[1]))

    batches: list[Any] = []
    for number in range(STEPS):
        length = 100 + number * 13 % 40
        lengths = torch.tensor([length, length - 10, length - 20, length - 30])
        batches.append((torch.randn(4, length, 40), lengths, torch.randint(1, WORDS, (4, 8))))
    run.fit(Recognizer(), batches)


@program("torchaudio")
def conv_tasnet(run: Run) -> None:
    """ConvTasNet of torchaudio: two speakers are told apart."""
    import torchaudio

    class Separation(Task):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            mixed, sources = batch
            return F.l1_loss(self.net(mixed), sources)

    net = torchaudio.models.ConvTasNet(
        num_sources=2,
        enc_kernel_size=16,
        enc_num_feats=64,
        msk_num_feats=32,
        msk_num_hidden_feats=64,
        msk_num_layers=4,
        msk_num_stacks=2,
    )
    run.fit(Separation(net), [(torch.randn(2, 1, 4000), torch.randn(2, 2, 4000)) for _ in range(STEPS)])


@program("speechbrain")
def ecapa_speakers(run: Run) -> None:
    """ECAPA-TDNN of speechbrain: features, normalization, embedding and an additive margin."""
    from speechbrain.lobes.features import Fbank
    from speechbrain.lobes.models.ECAPA_TDNN import ECAPA_TDNN, Classifier
    from speechbrain.nnet.losses import AdditiveAngularMargin, LogSoftmaxWrapper
    from speechbrain.processing.features import InputNormalization

    class Speakers(Task):
        def __init__(self) -> None:
            super().__init__(ECAPA_TDNN(40, channels=[64, 64, 64, 64, 192], attention_channels=32, lin_neurons=48))
            self.features, self.normalize = Fbank(n_mels=40), InputNormalization(norm_type="sentence", std_norm=False)
            self.classifier = Classifier(48, out_neurons=10)
            self.loss = LogSoftmaxWrapper(AdditiveAngularMargin(margin=0.2, scale=30))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            sound, lengths, speakers = batch
            with torch.no_grad():
                features = self.normalize(self.features(sound), lengths)
            return self.loss(self.classifier(self.net(features, lengths)), speakers[:, None], lengths)

    run.fit(
        Speakers(),
        [(torch.randn(4, 8000), torch.tensor([1.0, 0.9, 0.8, 0.7]), torch.randint(10, (4,))) for _ in range(STEPS)],
    )


@program("speechbrain")
def transformer_asr(run: Run) -> None:
    """TransformerASR of speechbrain: encoder on frames, decoder on words, CTC and cross entropy."""
    from speechbrain.lobes.models.transformer.TransformerASR import TransformerASR
    from torch import nn

    class Recognizer(Task):
        def __init__(self) -> None:
            super().__init__(
                TransformerASR(
                    tgt_vocab=WORDS,
                    input_size=40,
                    d_model=64,
                    nhead=4,
                    num_encoder_layers=3,
                    num_decoder_layers=2,
                    d_ffn=128,
                )
            )
            self.ctc, self.words = nn.Linear(64, WORDS), nn.Linear(64, WORDS)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            frames, lengths, words = batch
            encoded, decoded = self.net(frames, words[:, :-1], lengths, pad_idx=0)
            scores = self.ctc(encoded).log_softmax(-1).transpose(0, 1)
            ctc = F.ctc_loss(
                scores, words[:, 1:], (lengths * len(scores)).long(), torch.full((len(words),), words.shape[1] - 1)
            )
            return 0.3 * ctc + 0.7 * F.cross_entropy(self.words(decoded).transpose(1, 2), words[:, 1:])

    batches = [
        (torch.randn(4, 120, 40), torch.tensor([1.0, 0.9, 0.8, 0.7]), torch.randint(1, WORDS, (4, 12)))
        for _ in range(STEPS)
    ]
    run.fit(Recognizer(), batches)
