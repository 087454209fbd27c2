"""Loads the model of a trained run, or of a copied weights file, and draws samples from the model.

Letters: N and B samples, C channels, H W height and width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from accel.device_memory import refuse_large_batch
from accel.ledger import Ledger, LedgerRow
from accel.stack import SAME_BYTES, TECHNIQUES, AccelerationStack
from accel.techniques.compilation import Compile
from accel.techniques.cuda_graph import CudaGraph
from common.condition import TextEncoder
from common.config.compose import apply_schema, read_config
from common.config.schema import RuntimeConfig, SamplingConfig
from common.environment import pick_device
from common.errors import UserError
from common.files import hash_content
from data.spec import LatentSpec
from models.denoiser import Denoiser
from models.images import Autoencoder, to_uint8
from models.requested_conditions import find_class_numbers, pair_conditions
from models.sampler import check_internal_guidance
from training.checkpoint.load import find_weights_file, read_newest
from training.drawing import Conditions, SampleStream, check_guidance
from training.inputs import find_text_level, prove_kernels
from training.weights.adapter_file import OpenedModel, load_model
from training.weights.pretrained import build_autoencoder, build_text_encoder

QUICK_START_RUNTIME = MappingProxyType({Compile.key: Compile.off})
"""Runtime key -> value with which sampling starts quickly: compiling a model takes longer than it
saves for a few samples."""


@dataclass(frozen=True)
class TrainedModel:
    """A trained denoiser, with the autoencoder that decodes the latents it draws."""

    model: Denoiser
    forward: Callable[..., Tensor]
    """The model's forward pass, with the techniques of `stack` applied."""
    stack: AccelerationStack
    opened: OpenedModel
    """The weights file, its hash, and the description of the weights in its header."""
    autoencoder: Autoencoder
    sampling: SamplingConfig
    """Configuration `sampling` of the trained run; default values if only a weights file was
    loaded, not its run."""
    device: torch.device
    runtime: RuntimeConfig
    data: dict[str, Any] | None
    """Configuration `data` of the trained run; None if only a weights file was loaded, not its
    run."""
    text_encoder_path: str | None = None
    """Path of the text encoder, if its folder was moved; None: the place that `spec` names."""

    @property
    def spec(self) -> LatentSpec:
        return self.opened.description.spec

    @property
    def file(self) -> Path:
        return self.opened.file

    @property
    def text_level(self) -> str:
        """Says what the model reads of captions: "none", "pooled" or "tokens"."""
        return find_text_level(self.opened.description.model)

    @property
    def conditioning(self) -> str:
        """Says what conditions the model: "class", "text" or "class_and_text"."""
        return self.opened.description.model.get("conditioning", "class")

    @cached_property
    def text_encoder(self) -> TextEncoder:
        """The encoder of the captions. Raises UserError if it is absent, or another one."""
        assert self.spec.text is not None
        return build_text_encoder(self.spec.text, self.text_encoder_path)

    def make_conditions(
        self,
        labels: Sequence[int | str],
        prompts: Sequence[str] = (),
        say: Callable[[str], None] = print,
    ) -> Conditions:
        """Returns the conditions for samples of these labels, prompts, or pairs of both. Calls
        `say` with a note for each prompt that is cut. Raises UserError for an unknown label, and
        if the model needs other conditions."""
        labels, prompts = pair_conditions(self.conditioning, labels, prompts)
        numbers = find_class_numbers(labels, self.spec.names, self.spec.num_classes)
        classes = Conditions.of_classes(self.spec, numbers, numbers, self.device)
        if not prompts:
            return classes

        # Encode the prompts, and say which of them have more tokens than the model reads.
        assert self.spec.text is not None
        limit = self.spec.text.max_tokens if self.text_level == "tokens" else 0
        read = limit or self.text_encoder.max_length
        for prompt, count in zip(prompts, self.text_encoder.count_tokens(prompts), strict=True):
            if count > read:
                what = "attention reads" if limit else "the text encoder reads"
                say(f"note: {prompt[:60]!r} has {count} tokens, and {what} {read}")
        text = self.text_encoder.to(self.device).encode(prompts, limit)
        self.text_encoder.cpu()  # sampling needs the memory
        source = {"prompts": hash_content([numbers, *prompts])}
        return Conditions(source, classes.labels, text.numbers, prompts, text)

    @property
    def weights(self) -> dict[str, Any]:
        """Dict with the file, sha256, kind ("ema" or "model") and training step of the weights."""
        description = self.opened.description
        return {
            "file": str(self.file),
            "sha256": self.opened.sha256,
            "kind": description.weights,
            "step": description.step,
        }

    def change_sampling(self, **changes: Any) -> SamplingConfig:
        """Returns the run's configuration `sampling` with the values of `changes`. Raises
        UserError if a value is invalid."""
        known = asdict(self.sampling)
        for name in changes.keys() - known.keys():
            raise TypeError(
                f"sample() got an unexpected keyword argument {name!r}; besides labels, prompts, "
                f"seed and batch_size it takes {', '.join(known)}"
            )
        sampling = apply_schema(
            SamplingConfig, known | changes, [f"{key}={value}" for key, value in changes.items()]
        )
        sampling.check()
        check_guidance(self.spec, self.text_level, sampling.guidance)
        check_internal_guidance(self.model, sampling.internal_guidance)
        return sampling

    def sample_latents(
        self,
        labels: Sequence[int | str] = (),
        seed: int = 0,
        batch_size: int = 64,
        prompts: Sequence[str] = (),
        **changes: Any,
    ) -> Float[Tensor, "N C H W"]:
        """Draws the latents of one image for each label, which is the number or the name of a
        class, or for each of `prompts`; a model of classes and captions takes both, in pairs.

        `changes` replace values of `sampling`, such as steps=50 or guidance=2.0. Calls with equal
        arguments return equal latents, not normalised, as `decode` reads them. Raises UserError
        for an unknown label or an invalid value.
        """
        if batch_size < 1:
            raise UserError(f"batch_size={batch_size} must be at least 1.")
        sampling = self.change_sampling(**changes)
        conditions = self.make_conditions(labels, prompts)

        stream = SampleStream(self.forward, self.spec, sampling, conditions, seed, batch_size)
        positions = torch.arange(len(conditions.labels), device=self.device)
        return torch.cat([stream.draw(position)[1] for position in positions.split(batch_size)])

    def decode(
        self, latents: Float[Tensor, "N C H W"], batch_size: int = 64
    ) -> UInt8[np.ndarray, "N H W 3"]:
        """Decodes latents to images, as uint8 values."""
        parts = latents.to(self.device).split(batch_size)
        return np.concatenate([to_uint8(self.autoencoder.decode(part)) for part in parts])

    def sample(
        self, labels: Sequence[int | str] = (), batch_size: int = 64, **arguments: Any
    ) -> UInt8[np.ndarray, "N H W 3"]:
        """Draws images as uint8 values, with the arguments of `sample_latents`."""
        latents = self.sample_latents(labels, batch_size=batch_size, **arguments)
        return self.decode(latents, batch_size)

    @torch.no_grad()
    def warm_up(self, conditions: Conditions, batch_size: int, guidance: float) -> Ledger:
        """Runs the model with a batch as large as sampling uses, `batch_size` or with guidance
        twice that, and with the first texts of `conditions`. Returns the ledger, which says which
        techniques were active."""

        def run(samples: int) -> Tensor:
            count = samples * (1 if guidance == 1.0 else 2)
            x = torch.zeros(count, *self.spec.shape, device=self.device)
            t = torch.full((count,), 0.5, device=self.device)
            condition = conditions(torch.arange(samples, device=self.device))
            return self.forward(x, t, condition.repeat(count // samples).y)[:samples]

        refuse_large_batch(
            batch_size, self.device, lambda n: self.autoencoder.decode(run(n).float())
        )
        ledger = self.stack.warm_up(lambda: run(batch_size), self.model.blocks)
        ledger.append(
            LedgerRow(
                CudaGraph.key,
                self.runtime.cuda_graph,
                False,
                "sampling captures no graph: no GPU has proved one yet",
            )
        )
        return ledger


def load_run(
    path: str | Path,
    encoder: str | None = None,
    device: str | torch.device = "auto",
    key: str = "run_dir",
    runtime: Mapping[str, Any] = QUICK_START_RUNTIME,
    batch_size: int = 64,
    adapter: str | None = None,
) -> TrainedModel:
    """Loads the averaged weights of a run, a checkpoint or a .safetensors file, and returns the
    model ready to sample.

    `encoder` is the path of the autoencoder, if its folder was moved; `key` is the name of the key
    for `path` in messages. Merges `adapter` into the weights. If the run itself trained an adapter,
    merges this adapter too; its base model must still be at the same path. The model uses the run's
    own runtime keys, except those in `runtime`; its ledger names techniques that this machine
    cannot run. Fused kernels are chosen for batches of twice `batch_size`, as guidance needs. Like
    training, sets process-wide flags (TF32, deterministic cuDNN). Raises UserError if the weights
    are absent or damaged, or if the autoencoder is not the one that made the latents.
    """
    chosen = pick_device(device) if isinstance(device, str) else device
    opened = read_newest(
        str(path), lambda: load_model(find_weights_file(str(path), key), chosen, adapter)
    )
    model = opened.model
    spec = opened.description.spec
    autoencoder = build_autoencoder(spec, chosen, encoder)

    # If the weights are in a run folder, use that run's configuration of sampling and runtime.
    folder = find_run_folder(opened.file)
    config = folder / "config.yaml" if folder else None
    run = read_config(config) if config and config.is_file() else {}
    for name in ("sampling", "runtime"):
        if not isinstance(run.get(name, {}), dict):
            raise UserError(f"{config}: {name} has no keys; restore it.")
    sampling = apply_schema(SamplingConfig, run.get("sampling", {}), [])
    values = run.get("runtime", {}) | {"on_unavailable": "degrade", "parallel": {}} | dict(runtime)
    settings = apply_schema(
        RuntimeConfig, values, [f"runtime.{name}={value}" for name, value in runtime.items()]
    )
    settings.check()

    stack = AccelerationStack(
        settings.values(),
        chosen,
        on_unavailable=settings.on_unavailable,
        only=[kind.key for kind in TECHNIQUES if "sampling" in kind.used_in],
        same_bytes=SAME_BYTES,
    )
    stack.on_process()
    prove_kernels(stack, model, spec, 2 * batch_size, folder)
    model = stack.on_model(model)
    step: Any = SimpleNamespace(forward=model)
    forward = stack.on_step(step).forward
    return TrainedModel(
        model, forward, stack, opened, autoencoder, sampling, chosen, settings, run.get("data")
    )


def find_run_folder(weights: Path) -> Path | None:
    """Returns the run folder that contains the file `weights`, or None if the file is not in a run
    folder."""
    if weights.parent.name == "averages":
        return weights.parents[1]
    return weights.parents[2] if weights.parent.parent.name == "checkpoints" else None
