"""Pictures from noise: diffusers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.project_programs.program import STEPS, Run, Task, program

WORDS, TEXT = 100, 32


def small_unet(channels: int = 4) -> Any:
    """A conditioned U-Net as Stable Diffusion's, small."""
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=16, in_channels=channels, out_channels=channels, layers_per_block=1, block_out_channels=(32, 64), norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=TEXT,
        attention_head_dim=8,
    )  # fmt: skip


def small_vae() -> Any:
    """An autoencoder as Stable Diffusion's, small."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(16, 32), norm_num_groups=8, latent_channels=4, down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip


def small_text_encoder() -> Any:
    """CLIP's text encoder, small."""
    from transformers import CLIPTextConfig, CLIPTextModel

    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=WORDS, hidden_size=TEXT, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=16,
            eos_token_id=2,
        )
    )  # fmt: skip


def captioned() -> list[dict[str, torch.Tensor]]:
    """Batches of pictures and captions."""
    return [
        {
            "pixel_values": torch.randn(4, 3, 32, 32),
            "input_ids": torch.randint(3, WORDS, (4, 16)),
            "conditioning": torch.rand(4, 3, 32, 32),
        }
        for _ in range(STEPS)
    ]


class TextToImage(Task):
    """The training step of diffusers' examples: encode, add noise, predict it."""

    def __init__(self, unet: nn.Module) -> None:
        from diffusers import DDPMScheduler

        super().__init__(unet)
        self.vae, self.text_encoder = small_vae(), small_text_encoder()
        self.vae.requires_grad_(False)
        self.text_encoder.requires_grad_(False)
        self.noise_scheduler = DDPMScheduler(num_train_timesteps=1000)

    def noisy(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Latents with noise, the noise, and how much of it."""
        latents = self.vae.encode(batch["pixel_values"]).latent_dist.sample() * self.vae.config.scaling_factor
        noise = torch.randn_like(latents)
        timesteps = torch.randint(0, self.noise_scheduler.config.num_train_timesteps, (latents.shape[0],)).long()
        return self.noise_scheduler.add_noise(latents, noise, timesteps), noise, timesteps

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """How far the predicted noise is from the real one."""
        noisy, noise, timesteps = self.noisy(batch)
        states = self.text_encoder(batch["input_ids"], return_dict=False)[0]
        predicted = self.net(noisy, timesteps, states, return_dict=False)[0]
        return F.mse_loss(predicted.float(), noise.float(), reduction="mean")


@program("diffusers")
def text_to_image(run: Run) -> None:
    """U-Net with frozen VAE and text encoder (examples/text_to_image)."""
    run.fit(TextToImage(small_unet()), captioned())


@program("diffusers")
def textual_inversion(run: Run) -> None:
    """Only one word's embedding learns, through frozen text encoder and U-Net (examples/textual_inversion)."""

    class Inversion(TextToImage):
        def __init__(self) -> None:
            super().__init__(small_unet())
            self.net.requires_grad_(False)
            self.text_encoder.get_input_embeddings().requires_grad_(True)
            self.before = self.text_encoder.get_input_embeddings().weight.detach().clone()

        def on_before_zero_grad(self, optimizer: Any) -> None:
            weight = self.text_encoder.get_input_embeddings().weight
            with torch.no_grad():
                weight[:-1] = self.before[:-1]

    run.fit(Inversion(), captioned())


@program("diffusers")
def controlnet(run: Run) -> None:
    """ControlNet, whose outputs go into a frozen U-Net (examples/controlnet)."""
    from diffusers import ControlNetModel

    class Controlled(TextToImage):
        def __init__(self) -> None:
            super().__init__(small_unet())
            self.controlnet = ControlNetModel.from_unet(self.net, conditioning_embedding_out_channels=(8, 16))
            self.net.requires_grad_(False)

        def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
            noisy, noise, timesteps = self.noisy(batch)
            states = self.text_encoder(batch["input_ids"], return_dict=False)[0]
            down, mid = self.controlnet(
                noisy, timesteps, encoder_hidden_states=states, controlnet_cond=batch["conditioning"], return_dict=False
            )
            predicted = self.net(
                noisy,
                timesteps,
                encoder_hidden_states=states,
                down_block_additional_residuals=list(down),
                mid_block_additional_residual=mid,
                return_dict=False,
            )[0]
            return F.mse_loss(predicted.float(), noise.float(), reduction="mean")

    run.fit(Controlled(), captioned())


@program("diffusers")
def dit(run: Run) -> None:
    """DiT on classes, with timesteps of a DDPM."""
    from diffusers import DDPMScheduler, DiTTransformer2DModel

    class Denoising(Task):
        def __init__(self) -> None:
            super().__init__(
                DiTTransformer2DModel(
                    num_attention_heads=4, attention_head_dim=16, in_channels=4, out_channels=4, num_layers=3, sample_size=16, patch_size=2,
                    num_embeds_ada_norm=1000, norm_num_groups=1,
                )
            )  # fmt: skip
            self.noise_scheduler = DDPMScheduler()

        def training_step(self, latents: torch.Tensor, batch_idx: int) -> torch.Tensor:
            noise = torch.randn_like(latents)
            timesteps = torch.randint(0, 1000, (len(latents),))
            noisy = self.noise_scheduler.add_noise(latents, noise, timesteps)
            classes = torch.randint(0, 10, (len(latents),))
            return F.mse_loss(self.net(noisy, timestep=timesteps, class_labels=classes).sample, noise)

    run.fit(Denoising(), [torch.randn(4, 4, 16, 16) for _ in range(STEPS)])


@program("diffusers")
def flux_flow_matching(run: Run) -> None:
    """Flux's transformer with flow matching, gradient checkpointing of diffusers off."""
    from diffusers import FluxTransformer2DModel

    class Flow(Task):
        def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
            latents, noise = batch["latents"], torch.randn_like(batch["latents"])
            sigmas = torch.sigmoid(torch.randn(len(latents)))
            noisy = (1 - sigmas[:, None, None]) * latents + sigmas[:, None, None] * noise
            predicted = self.net(
                hidden_states=noisy,
                timestep=sigmas,
                encoder_hidden_states=batch["text"],
                pooled_projections=batch["pooled"],
                txt_ids=batch["text_ids"],
                img_ids=batch["image_ids"],
                return_dict=False,
            )[0]
            return F.mse_loss(predicted, noise - latents)

    net = FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=2, attention_head_dim=16, num_attention_heads=4, joint_attention_dim=TEXT,
        pooled_projection_dim=TEXT, guidance_embeds=False, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    batches = [
        {
            "latents": torch.randn(2, 64, 16),
            "text": torch.randn(2, 16, TEXT),
            "pooled": torch.randn(2, TEXT),
            "text_ids": torch.zeros(16, 3),
            "image_ids": torch.cartesian_prod(torch.zeros(1), torch.arange(8.0), torch.arange(8.0)),
        }
        for _ in range(STEPS)
    ]
    run.fit(Flow(net), batches)


@program("diffusers")
def vae_with_discriminator_free_loss(run: Run) -> None:
    """AutoencoderKL trained as a VAE: encode, sample, decode, with the KL part of the loss."""

    class Autoencoder(Task):
        def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
            posterior = self.net.encode(batch["pixel_values"]).latent_dist
            rebuilt = self.net.decode(posterior.sample()).sample
            return F.mse_loss(rebuilt, batch["pixel_values"]) + 1e-6 * posterior.kl().mean()

    run.fit(Autoencoder(small_vae()), captioned())
