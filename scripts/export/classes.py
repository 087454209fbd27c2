"""What diffusers opens: the denoiser and the autoencoder as models, and sampling as a pipeline.

`scripts.export` copies each class, with all that it needs, into the exported folder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from diffusers import AutoencoderTiny, ConfigMixin, DiffusionPipeline, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.pipelines.pipeline_utils import ImagePipelineOutput
from PIL import Image
from torch import Tensor, nn

from accel.kernels.counter_noise import Purpose, counter_normal
from common.errors import UserError
from models.autoencoders import add_global_branch
from models.block import Norm
from models.denoiser import Denoiser
from models.images import select_rgb, to_uint8
from models.sampler import STEP_STRIDE, make_guided_velocity, sample


class FastlatentTransformer(Denoiser, ModelMixin, ConfigMixin):
    """The velocity ε - z of x = (1-t)·z + t·ε, from latents x (B, C, H, W), times t (B,) and labels
    y (B,).

    t = 1 is noise; y is int64, and `num_classes` is the label of no class. `mixer` and `mlp` say
    the class of a layer, as "name", and its arguments. `latents` is for the pipeline: statistics,
    names of classes, how samples were drawn.
    """

    @register_to_config
    def __init__(
        self,
        *,
        channels: int,
        height: int,
        width: int,
        num_classes: int,
        dim: int,
        depth: int,
        head_dim: int,
        patch_size: int,
        mixer: dict[str, Any],
        mlp_ratio: float = 0.0,
        drop_path: float = 0.0,
        eps: float = 1e-6,
        mlp: dict[str, Any] | None = None,
        norm: Norm = "rms",
        time_scale: float = 1000.0,
        latents: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(
            channels=channels,
            height=height,
            width=width,
            num_classes=num_classes,
            dim=dim,
            depth=depth,
            head_dim=head_dim,
            patch_size=patch_size,
            mixer=make_layer(mixer),
            mlp_ratio=mlp_ratio,
            drop_path=drop_path,
            eps=eps,
            norm=norm,
            time_scale=time_scale,
            **({"mlp": make_layer(mlp)} if mlp else {}),
        )
        with torch.no_grad():
            self.init_buffers()  # which no file holds

    def forward(
        self, x: Tensor, t: Tensor, y: Tensor, drop_uniforms: Tensor | None = None
    ) -> Tensor:
        """The velocity. Weights in 16 bits compute products in that type, and all else in fp32; it
        is fp32 then."""
        if self.dtype == torch.float32:
            return super().forward(x, t, y, drop_uniforms)
        with torch.autocast(x.device.type, self.dtype):
            return super().forward(x.float(), t, y, drop_uniforms).float()


def make_layer(node: dict[str, Any]) -> Callable[..., nn.Module]:
    """What builds a layer: the class called "name", which stands in the same exported file, with
    the other values as arguments."""
    arguments = {key: value for key, value in node.items() if key != "name"}
    return partial(globals()[node["name"]], **arguments)


class FastlatentAutoencoder(AutoencoderTiny):
    """AutoencoderTiny with the global branches of TAEF2, without which diffusers' own class decodes
    wrong colours.

    `sizes` are the arguments of AutoencoderTiny. `branches` names the blocks that have a branch,
    each with the shape (hidden channels, channels) of its first convolution.
    """

    @register_to_config
    def __init__(self, *, sizes: dict[str, Any], branches: dict[str, list[int]]) -> None:
        super().__init__(**sizes)
        for name, (hidden, channels) in branches.items():
            add_global_branch(self.get_submodule(name), hidden, channels)


class FastlatentPipeline(DiffusionPipeline):
    """Draws images of classes. Equal seeds, labels and settings give equal images.

    Without `vae` the latents are shown as they are where they are pixels; other latents need
    output_type="latent".
    """

    _optional_components = ["vae"]  # noqa: RUF012 - the base class has it so

    def __init__(self, transformer: Any, vae: Any = None) -> None:
        super().__init__()
        self.register_modules(transformer=transformer, vae=vae)

    @torch.no_grad()
    def __call__(
        self,
        class_labels: Sequence[int | str] | int | str,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        guidance_interval: tuple[float, float] | None = None,
        solver: str | None = None,
        shift: float | None = None,
        seed: int = 0,
        latents: Tensor | None = None,
        output_type: str = "pil",
    ) -> ImagePipelineOutput:
        """One image for each label, the number or the name of a class.

        What is None is as the model itself was sampled in training: steps, guidance (1: none), the
        times in which it is on, the solver (euler, heun, ab2, sde), and the timestep shift.
        `latents` (N, C, H, W) replaces the noise of `seed`. `output_type` is "pil", "np" (uint8, N
        × H × W × 3) or "latent" (as the autoencoder decodes them). ValueError for a class or a
        value that there is not.
        """
        facts = self.transformer.config.latents
        given = {
            "steps": num_inference_steps,
            "guidance": guidance_scale,
            "guidance_interval": guidance_interval,
            "solver": solver,
            "shift": shift,
        }
        how = facts["sampling"] | {key: value for key, value in given.items() if value is not None}
        if output_type not in ("pil", "np", "latent"):
            raise UserError(f"output_type={output_type} is unknown; choose pil, np or latent.")
        if output_type != "latent":
            check_decoder(self.vae, facts)
        asked = [class_labels] if isinstance(class_labels, int | str) else class_labels
        drawn = self.draw(find_class_numbers(asked, facts["class_names"]), how, seed, latents)
        if output_type == "latent":
            return ImagePipelineOutput(images=drawn)  # pyright: ignore[reportArgumentType]
        if self.vae is None:
            decoded = select_rgb(drawn)
        else:
            decoded = self.vae.decode(drawn.to(self.vae.dtype)).sample.float()
        images = to_uint8(decoded)
        if output_type == "pil":
            images = [Image.fromarray(image) for image in images]
        return ImagePipelineOutput(images=images)

    def draw(
        self, labels: list[int], how: dict[str, Any], seed: int, latents: Tensor | None
    ) -> Tensor:
        """Latents as the autoencoder decodes them, from the noise of `seed` or from `latents`."""
        model = self.transformer
        device = self._execution_device
        shape = (model.channels, model.grid[0] * model.patch_size, model.grid[1] * model.patch_size)
        label = torch.tensor(labels, device=device)
        position = torch.arange(len(labels), device=device)

        def fresh(step: int) -> Tensor:
            return counter_normal(seed, Purpose.SAMPLE_STEP, position + step * STEP_STRIDE, shape)

        if latents is None:
            noise = counter_normal(seed, Purpose.SAMPLE, position, shape)
        else:
            noise = latents.to(device)
        low, high = how["guidance_interval"]
        velocity = make_guided_velocity(
            model, label, model.num_classes, how["guidance"], (low, high)
        )
        found = sample(velocity, noise, how["steps"], how["solver"], how["shift"], fresh)
        facts = model.config.latents
        std = torch.tensor(facts["std"], device=device).view(-1, 1, 1)
        return found.float() * std + torch.tensor(facts["mean"], device=device).view(-1, 1, 1)


def check_decoder(vae: Any, facts: dict[str, Any]) -> None:
    """ValueError where there is no `vae` for latents that are no pixels, or one that decodes them
    wrongly."""
    needed = facts["autoencoder"]
    parameters = () if vae is None else vae.named_parameters()
    stock = vae is None or isinstance(vae, AutoencoderTiny)
    if facts["global_branches"] and stock and not any(".pool." in name for name, _ in parameters):
        raise UserError(
            f"vae: these latents need {needed} with its global branches. AutoencoderTiny of "
            "diffusers drops them and decodes wrong colours; export with "
            "include_autoencoder=true and give no vae=, or take output_type='latent'."
        )
    if vae is None and needed:
        raise UserError(f"there is no vae to decode with; load {needed} and give it as vae=.")


def find_class_numbers(labels: Sequence[int | str], names: list[str]) -> list[int]:
    """Classes as their numbers; ValueError for one that the model does not know. Without classes
    every label is 0."""
    count = max(1, len(names))
    for label in labels:
        if (label not in names) if isinstance(label, str) else not 0 <= label < count:
            told = ", ".join(names[:20]) or "none, use 0"
            raise UserError(f"class_labels: {label!r} is no class; there are {told}.")
    return [names.index(label) if isinstance(label, str) else int(label) for label in labels]
