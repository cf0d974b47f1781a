"""Text, and text with pictures: transformers, peft, sentence-transformers, x-transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.project_programs.program import STEPS, OwnLoss, Run, Task, program

WORDS, LENGTH, BATCH = 256, 96, 4


def sentences(*, length: int = LENGTH, batch: int = BATCH) -> list[dict[str, torch.Tensor]]:
    """Batches of random words, each to be said again."""
    batches = [torch.randint(3, WORDS, (batch, length)) for _ in range(STEPS)]
    return [{"input_ids": words, "attention_mask": torch.ones_like(words), "labels": words} for words in batches]


def small_llama(layers: int = 3) -> nn.Module:
    """A Llama of a few layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


@program("transformers")
def mixtral_with_router_loss(run: Run) -> None:
    """Mixtral whose loss has the router's part (``output_router_logits=True``)."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=WORDS, hidden_size=96, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=4, num_experts_per_tok=2, output_router_logits=True,
    )  # fmt: skip
    run.fit(OwnLoss(MixtralForCausalLM(config)), sentences())


@program("transformers")
def mamba(run: Run) -> None:
    """Mamba, in transformers' own code for processors without its kernels."""
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=WORDS, hidden_size=64, state_size=8, num_hidden_layers=3)
    run.fit(OwnLoss(MambaForCausalLM(config)), sentences(length=32))


@program("transformers")
def t5(run: Run) -> None:
    """T5: encoder, decoder, and labels that are shifted inside."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=WORDS, d_model=96, d_kv=24, d_ff=192, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    run.fit(OwnLoss(T5ForConditionalGeneration(config)), sentences())


@program("transformers")
def llava(run: Run) -> None:
    """LLaVA with a frozen vision tower: pictures stand among the words."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
        projection_dim=64,
    )
    text = LlamaConfig(
        vocab_size=WORDS, hidden_size=96, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4
    )
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=WORDS - 1, image_seq_length=16)
    net = LlavaForConditionalGeneration(config)
    net.model.vision_tower.requires_grad_(False)
    batches: list[dict[str, torch.Tensor]] = []
    for batch in sentences(length=64):
        words = batch["input_ids"].clamp(max=WORDS - 2)
        words[:, 1:17] = WORDS - 1
        batches.append(
            {
                "input_ids": words,
                "attention_mask": batch["attention_mask"],
                "labels": words,
                "pixel_values": torch.randn(BATCH, 3, 32, 32),
            }
        )
    run.fit(OwnLoss(net), batches)


@program("transformers")
def bert_masked(run: Run) -> None:
    """BERT on masked words, with padding of different lengths."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=WORDS, hidden_size=96, num_hidden_layers=3, num_attention_heads=4, intermediate_size=192
    )
    batches = sentences()
    for number, batch in enumerate(batches):
        batch["attention_mask"] = batch["attention_mask"].clone()
        batch["attention_mask"][0, LENGTH - 5 - number :] = 0
        batch["labels"] = batch["labels"].where(torch.rand(BATCH, LENGTH) < 0.15, -100)
    run.fit(OwnLoss(BertForMaskedLM(config)), batches)


@program("transformers")
def gpt2_accumulating(run: Run) -> None:
    """GPT-2, gradients of two batches added up, norms clipped."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=WORDS, n_embd=96, n_layer=3, n_head=4, n_positions=LENGTH)
    run.fit(
        OwnLoss(GPT2LMHeadModel(config)), sentences() + sentences(), accumulate_grad_batches=2, gradient_clip_val=1.0
    )


@program("peft")
def lora(run: Run) -> None:
    """LoRA on the queries and values of a Llama."""
    from peft import LoraConfig, get_peft_model

    run.fit(
        OwnLoss(
            get_peft_model(small_llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
        ),
        sentences(),
    )


@program("peft")
def dora(run: Run) -> None:
    """DoRA on all linear layers of a Llama, with dropout."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, use_dora=True, target_modules="all-linear", lora_dropout=0.1, task_type="CAUSAL_LM")
    run.fit(OwnLoss(get_peft_model(small_llama(), config)), sentences())


@program("peft")
def prefix_tuning(run: Run) -> None:
    """Prefix tuning of a GPT-2: keys and values that are learned come as a cache."""
    from peft import PrefixTuningConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    net = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_embd=96, n_layer=3, n_head=4, n_positions=2 * LENGTH))
    run.fit(OwnLoss(get_peft_model(net, PrefixTuningConfig(num_virtual_tokens=8, task_type="CAUSAL_LM"))), sentences())


@program("peft")
def ia3_of_t5(run: Run) -> None:
    """IA³ on a T5."""
    from peft import IA3Config, get_peft_model
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=WORDS, d_model=96, d_kv=24, d_ff=192, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    net = get_peft_model(T5ForConditionalGeneration(config), IA3Config(task_type="SEQ_2_SEQ_LM"))
    run.fit(OwnLoss(net), sentences())


def sentence_encoder() -> Any:
    """A SentenceTransformer of a small BERT and mean pooling, without a tokenizer's files."""
    from sentence_transformers import SentenceTransformer
    from transformers import BertConfig, BertModel

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = BertConfig(
                vocab_size=WORDS, hidden_size=96, num_hidden_layers=3, num_attention_heads=4, intermediate_size=192
            )
            self.auto_model = BertModel(config, add_pooling_layer=False)

        def forward(self, features: dict[str, torch.Tensor], **_: Any) -> dict[str, torch.Tensor]:
            output = self.auto_model(input_ids=features["input_ids"], attention_mask=features["attention_mask"])
            features["token_embeddings"] = output.last_hidden_state
            return features

    try:
        from sentence_transformers.sentence_transformer.modules import Pooling
    except ImportError:
        from sentence_transformers.models import Pooling
    return SentenceTransformer(modules=[Words(), Pooling(96, "mean")], device="cpu")


def pairs() -> list[tuple[list[dict[str, torch.Tensor]], None]]:
    """Batches of questions and answers."""
    found: list[tuple[list[dict[str, torch.Tensor]], None]] = []
    for first, second in zip(sentences(length=32, batch=8), sentences(length=48, batch=8), strict=True):
        sides = [{key: side[key] for key in ("input_ids", "attention_mask")} for side in (first, second)]
        found.append((sides, None))
    return found


@program("sentence-transformers")
def pairs_ranked(run: Run) -> None:
    """MultipleNegativesRankingLoss: one encoder called for questions and for answers."""
    from sentence_transformers.losses import MultipleNegativesRankingLoss

    class Ranking(Task):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            features, labels = batch
            return self.net(features, labels)

    run.fit(Ranking(MultipleNegativesRankingLoss(sentence_encoder())), pairs())


@program("sentence-transformers")
def triplets(run: Run) -> None:
    """TripletLoss: one encoder called three times."""
    from sentence_transformers.losses import TripletLoss

    class Triplet(Task):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            features, labels = batch
            return self.net([*map(dict, features), dict(features[0])], labels)

    run.fit(Triplet(TripletLoss(sentence_encoder())), pairs())


@program("x-transformers")
def rotary_decoder(run: Run) -> None:
    """Decoder with rotary positions and GLU in an AutoregressiveWrapper."""
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    class Wrapped(Task):
        def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
            return self.net(batch["input_ids"])

    layers = Decoder(dim=96, depth=3, heads=4, rotary_pos_emb=True, ff_glu=True)
    run.fit(
        Wrapped(AutoregressiveWrapper(TransformerWrapper(num_tokens=WORDS, max_seq_len=LENGTH, attn_layers=layers))),
        sentences(),
    )
