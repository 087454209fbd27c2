"""Classes for diffusers: the denoiser and the autoencoder as models, and sampling as a pipeline.

`scripts.export` copies each class, with all definitions that it needs, into the exported folder.
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

from accel.kernels.counter_noise.draws import Purpose, counter_normal
from common.condition import Condition, EncodedText
from common.errors import UserError
from models.autoencoders import ByteAutoencoder, PixelAutoencoder, add_global_branch, decode_raw
from models.block import Norm
from models.denoiser import Denoiser, Prediction
from models.images import to_uint8
from models.requested_conditions import find_class_numbers, pair_conditions
from models.sampler import check_internal_guidance, draw_normalised
from models.text import Conditioning


class FastlatentTransformer(Denoiser, ModelMixin, ConfigMixin):
    """Computes the velocity ε - z of x = (1-t)·z + t·ε, from latents x (B, C, H, W), times t (B,)
    and labels y (B,).

    t = 1 is noise; y is int64, and the label `num_classes` stands for "no class". `mixer`,
    `attention` and `mlp` each describe a layer: the key "name" has the name of the layer's class,
    all other keys are its keyword arguments. Only the pipeline uses `latents`, which has the
    statistics of the latents, the class names, and the settings of the sampler; only diffusers'
    AutoModel uses `auto_map`, which names this class.
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
        attention_every: int = 0,
        attention: dict[str, Any] | None = None,
        mlp_ratio: float = 0.0,
        drop_path: float = 0.0,
        internal_block: int = 0,
        eps: float = 1e-6,
        mlp: dict[str, Any] | None = None,
        norm: Norm = "rms",
        time_scale: float = 1000.0,
        conditioning: Conditioning = "class",
        text_tokens: bool = False,
        text: dict[str, Any] | None = None,
        prediction: Prediction = "velocity",
        patch_rank: int = 0,
        latents: dict[str, Any] | None = None,
        auto_map: dict[str, str] | None = None,
    ) -> None:
        # `register_to_config` has put all arguments into `config`, beside keys of its own, which
        # begin with _. Leave out layers that are not given, so that the model has its defaults.
        arguments = {
            key: value
            for key, value in self.config.items()
            if key not in ("latents", "auto_map") and not key.startswith("_")
        }
        for key in ("mixer", "attention", "mlp"):
            node = arguments.pop(key)
            if node:
                arguments[key] = make_layer(node)
        super().__init__(**arguments)
        with torch.no_grad():
            self.init_buffers()

    def forward(
        self,
        x: Tensor,
        t: Tensor,
        y: Tensor | Condition,
        drop_uniforms: Tensor | None = None,
        internal_guidance: float | None = None,
    ) -> Tensor:
        """Computes the velocity (B, C, H, W) in fp32. If the weights have 16 bits, matrix products
        run in the dtype of the weights; all other operations run in fp32."""
        if self.dtype == torch.float32:
            return super().forward(x, t, y, drop_uniforms, internal_guidance)
        with torch.autocast(x.device.type, self.dtype):
            velocity = super().forward(x.float(), t, y, drop_uniforms, internal_guidance)
        return velocity.float()


def make_layer(node: dict[str, Any]) -> Callable[..., nn.Module]:
    """Returns a function that builds a layer. In `node` the key "name" has the name of the layer's
    class, which the same exported file defines; all other keys are keyword arguments of the
    class."""
    arguments = {key: value for key, value in node.items() if key != "name"}
    return partial(globals()[node["name"]], **arguments)


class FastlatentAutoencoder(AutoencoderTiny):
    """AutoencoderTiny with the global branches of TAEF2; diffusers' own class has no such branches
    and decodes wrong colours. `sizes` are the arguments of AutoencoderTiny. `branches` maps each
    block that has a branch to the shape (hidden channels, channels) of the branch's first
    convolution."""

    @register_to_config
    def __init__(self, *, sizes: dict[str, Any], branches: dict[str, list[int]]) -> None:
        super().__init__(**sizes)
        for name, (hidden, channels) in branches.items():
            add_global_branch(self.get_submodule(name), hidden, channels)


class FastlatentPipeline(DiffusionPipeline):
    """Draws images of classes or prompts. Equal seeds, labels, prompts and settings give equal
    images.

    Without `vae`, latents that are pixels become images; other latents need
    output_type="latent". `text_encoder_path` is the place of the text encoder, if it is another
    than in training. Only AutoModel of diffusers uses `auto_map`, which names the class of the
    transformer.
    """

    _optional_components = ["vae"]  # noqa: RUF012 - the base class has it so

    def __init__(
        self,
        transformer: Any,
        vae: Any = None,
        text_encoder_path: str | None = None,
        auto_map: dict[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.register_modules(transformer=transformer, vae=vae)
        self.text_encoder_path = text_encoder_path

    @torch.no_grad()
    def __call__(
        self,
        class_labels: Sequence[int | str] | int | str = (),
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        guidance_interval: tuple[float, float] | None = None,
        internal_guidance: float | None = None,
        internal_interval: tuple[float, float] | None = None,
        solver: str | None = None,
        shift: Any = None,
        seed: int = 0,
        latents: Tensor | None = None,
        output_type: str = "pil",
        prompt: Sequence[str] | str | None = None,
        height: int | None = None,
        width: int | None = None,
    ) -> ImagePipelineOutput:
        """Draws one image for each label, the number or the name of a class, or for each prompt. A
        model of captions alone takes prompts in place of labels; one of classes and captions takes
        pairs of both.

        Settings that are None take their values from training: steps, guidance (1: none) and the
        interval of times with guidance, the same two of internal guidance, the solver (euler, heun,
        ab2, sde), and the timestep shift, a number or "auto".
        `latents` (N, C, H, W) replaces the noise of `seed`. `output_type` is "pil", "np" (uint8, N
        × H × W × 3) or "latent" (raw, ready to decode). `height` and `width`, in pixels, may only
        be those of training. Raises UserError for an unknown class or value.
        """
        facts = self.transformer.config.latents
        settings = {
            "steps": num_inference_steps,
            "guidance": guidance_scale,
            "guidance_interval": guidance_interval,
            "internal_guidance": internal_guidance,
            "internal_interval": internal_interval,
            "solver": solver,
            "shift": shift,
        }
        settings = facts["sampling"] | {k: v for k, v in settings.items() if v is not None}
        if output_type not in ("pil", "np", "latent"):
            raise UserError(f"output_type={output_type} is unknown; choose pil, np or latent.")
        size = facts["size"]
        wanted = [size[0] if height is None else height, size[1] if width is None else width]
        if wanted != size:
            raise UserError(
                f"height={wanted[0]} and width={wanted[1]}: this model was trained on images of "
                f"{size[0]}×{size[1]} pixels, height before width; leave both out."
            )
        if output_type != "latent":
            check_decoder(self.vae, facts)

        # A model of captions alone takes the first argument as prompts.
        labels: Any = class_labels
        conditioning = self.transformer.config.conditioning
        if conditioning == "text" and prompt is None:
            prompt = labels
            labels = None
        labels, prompts = pair_conditions(conditioning, labels, prompt)
        names = facts["class_names"]
        numbers = find_class_numbers(labels, names, len(names))
        drawn = self.draw(numbers, settings, seed, latents, prompts)
        if output_type == "latent":
            return ImagePipelineOutput(images=drawn)  # pyright: ignore[reportArgumentType]
        if self.vae is None:
            pixels = ByteAutoencoder() if facts["is_bytes"] else PixelAutoencoder()
            decoded = pixels.decode(drawn)
        else:
            decoded = decode_raw(self.vae, drawn.to(self.vae.dtype))

        images = to_uint8(decoded)
        if output_type == "pil":
            images = [Image.fromarray(image) for image in images]
        return ImagePipelineOutput(images=images)

    def encode(self, prompts: Sequence[str]) -> EncodedText:
        """Encodes prompts by the text encoder that encoded the captions; opens it at the first
        call. Raises UserError if its weights are others."""
        facts = self.transformer.config.text
        encoder: Any = getattr(self, "text_encoder", None)
        if encoder is None:
            node = dict(facts["encoder"])
            if self.text_encoder_path:
                if "path" not in node:
                    raise UserError("text_encoder_path: this encoder has no folder; leave it out.")
                node["path"] = self.text_encoder_path
            try:
                encoder = make_layer(node)()
            except ValueError as error:
                hint = "If it is elsewhere: from_pretrained(…, text_encoder_path=<folder>)."
                raise UserError(f"{error} {hint if 'path' in node else ''}") from error
            if encoder.weights_sha256 != facts["encoder_sha256"]:
                raise UserError(f"{node} has other weights than in training.")
            self.text_encoder = encoder
        encoder.to(self._execution_device)
        limit = facts["max_tokens"] if self.transformer.config.text_tokens else 0
        return encoder.encode(prompts, limit)

    def draw(
        self,
        labels: list[int],
        settings: dict[str, Any],
        seed: int,
        latents: Tensor | None,
        prompts: Sequence[str],
    ) -> Tensor:
        """Samples raw latents (N, C, H, W), which the autoencoder can decode, from the noise of
        `seed` or from the noise `latents`."""
        text = self.encode(prompts) if prompts else None
        model = self.transformer
        device = self._execution_device
        shape = (model.channels, model.grid[0] * model.patch_size, model.grid[1] * model.patch_size)
        condition = Condition(torch.tensor(labels, device=device), text)
        position = torch.arange(len(labels), device=device)
        if latents is None:
            noise = counter_normal(seed, Purpose.SAMPLE, position, shape)
        else:
            noise = latents.to(device)
        check_internal_guidance(model, settings["internal_guidance"])
        normalised = draw_normalised(
            model, condition, model.num_classes, noise, position, seed, settings
        )
        facts = model.config.latents
        mean, std = (
            torch.tensor(facts[name], device=device).view(-1, 1, 1) for name in ("mean", "std")
        )
        return normalised.float() * std + mean


def check_decoder(vae: Any, facts: dict[str, Any]) -> None:
    """Raises a UserError if the latents are no pixels and `vae` is None, or if `vae` decodes the
    latents wrongly."""
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
