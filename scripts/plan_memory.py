"""`python -m scripts.plan memory`: the bytes that a training step takes of a card, and what each measure saves.

The model of the configuration is built with one block and with two, on this machine, and its tensors are counted: what
lasts, after a real update, and what a micro-batch keeps for the backward pass, by a forward pass on PyTorch's fake
tensors, which have shapes and no values. More blocks take as much each. To that comes workspace: a block's backward
pass (what it keeps without checkpointing, and gradients of as many bytes), or the update of the largest part of the
weights, whichever is larger. Fused kernels keep less than the definitions that are counted here. Not counted: the
loader's data, the driver's context, fragmentation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from accel.members import PART, parts_of
from accel.offload_activations import OffloadActivations
from models.denoiser import Denoiser
from scripts.bench.report import table
from scripts.capabilities import pretended
from training.assemble import Training, assemble
from training.components import build_loader
from training.config.compose import compose
from training.memory import kept_at, lasting_bytes
from training.optim import parameter_groups
from training.pretrained import build_on_meta

CPU = torch.device("cpu")
GB = 1e9
DRAWS = 16
"""Bytes an element that drawing the bits of stochastic rounding takes."""
MEASURES = {
    "runtime.weights": "fp32",
    "optim": "adamw",
    "runtime.offload_optimizer": "false",
    "runtime.offload_activations": "false",
    "runtime.gradient_checkpointing": "false",
    "accumulation_steps": "1",
}
"""Key -> its value without the measure."""


@dataclass(frozen=True)
class MemoryConfig:
    """What to compare with; any other word is an override of the training configuration."""

    card_gb: float = 12.0


class Needs(NamedTuple):
    """Bytes on the device; `on_host` in the host's memory, `moved` between both in a step."""

    weights: float
    gradients: float
    averages: float
    optimizer: float
    kept: float
    workspace: float
    on_host: float
    moved: float

    @property
    def total(self) -> float:
        return sum(self[:6])


def grown(one: Sequence[float], two: Sequence[float], depth: int) -> list[float]:
    """What `depth` blocks take, from what one and two do."""
    return [a + (b - a) * (depth - 1) for a, b in zip(one, two, strict=True)]


def counted(words: list[str], depth: int) -> tuple[list[float], float]:
    """Of a model of `depth` blocks: bytes that last, that a micro-batch keeps, and that offloading it moves in a step;
    and what the micro-batch keeps where nothing is recomputed or moved."""
    cfg = compose(words).cfg
    micro = cfg.batch_size // cfg.accumulation_steps
    training = small_training(words, depth)
    for parameter in training.step.parameters:
        parameter.grad = torch.zeros_like(parameter)
    training.state.optimizer.step()
    lasting = [float(size) for size in lasting_bytes(training)]
    kept = kept_by_micro_batch(training, micro)
    moved = 2.0 * training.stack.technique(OffloadActivations).moved * cfg.accumulation_steps
    plain = ["runtime.gradient_checkpointing=false", "runtime.offload_activations=false"]
    return [*lasting, kept, moved], kept_by_micro_batch(small_training([*words, *plain], depth), micro)


def small_training(words: list[str], depth: int) -> Training:
    small = [f"model.depth={depth}", "batch_size=1", "accumulation_steps=1"]
    return assemble(compose([*words, *small]).cfg, CPU)


def kept_by_micro_batch(training: Training, samples: int) -> float:
    """Bytes that the loss of `samples` samples keeps on the device; the model's tensors are fake ones from now on."""
    mode = FakeTensorMode()
    for module in training.model.modules():
        own: dict[str, Any]
        for own in (module._parameters, module._buffers):
            own.update({name: mode.from_tensor(t) for name, t in own.items() if t is not None})
    training.stack.technique(OffloadActivations).on_model(training.model)
    with mode:
        return float(kept_at(training, samples))


def needs_of(words: list[str]) -> Needs:
    """The bytes of a step of the configuration that these overrides make."""
    cfg = compose(words).cfg
    (one, plain_one), (two, plain_two) = (counted(words, depth) for depth in (1, 2))
    spec = build_loader(cfg.data, cfg.seed, 1, CPU).spec
    model = build_on_meta(cfg.model, spec)
    weights, gradients, averages, optimizer, on_host, kept, moved = grown(one, two, cfg.model["depth"])
    largest = part_elements(model)
    total = sum(p.numel() for p in model.parameters())
    update = on_host / total * largest  # its state comes to the device
    if cfg.runtime.weights.value == "bf16":
        update += 8.0 * largest + (DRAWS * PART if cfg.runtime.rounding.value == "stochastic" else 8.0 * largest)
    block = 2.0 * (plain_two - plain_one)
    return Needs(
        weights, gradients, averages, optimizer, kept, max(block, update - kept), on_host, moved + 2.0 * on_host
    )


def part_elements(model: Denoiser) -> int:
    """Elements of the largest part that an update takes at a time."""
    parts = parts_of(parameter_groups(model, 0.0))
    return max(sum(p.numel() for group in part for p in group["params"]) for part in parts)


def measures_of(words: list[str]) -> list[tuple[str, list[str]]]:
    """Each measure that the configuration takes, and the words without it."""
    composed = compose(words)
    cfg: Any = composed.cfg
    found = []
    for key, plain in MEASURES.items():
        value: Any = composed.choices["optim"] if key == "optim" else cfg
        if key != "optim":
            for part in key.split("."):
                value = getattr(value, part)
        value = str(getattr(value, "value", value)).lower()
        if value != plain:
            found.append((f"{key}={value}", [*words, f"{key}={plain}"]))
    return found


def report(cfg: MemoryConfig, words: list[str]) -> str:
    """The table of all bytes, and one of what each measure saves."""
    if cfg.card_gb <= 0:
        raise ValueError(f"card_gb={cfg.card_gb} must be above 0.")
    found = {
        name: pretended(lambda some=some: needs_of(some))() for name, some in [("all", words), *measures_of(words)]
    }
    everything = found.pop("all")
    rows: list[tuple[object, ...]] = [("what", "GB")]
    rows += [(name, f"{getattr(everything, name) / GB:.2f}") for name in Needs._fields[:6]]
    verdict = "fits" if everything.total <= cfg.card_gb * GB else "does not fit"
    saved: list[tuple[object, ...]] = [("measure", "GB without it", "saves GB", "GB it moves a step")]
    for name, without in found.items():
        moves = everything.moved - without.moved
        saved.append(
            (
                name,
                f"{without.total / GB:.2f}",
                f"{(without.total - everything.total) / GB:.2f}",
                f"{moves / GB:.2f}" if moves > 0 else "",
            )
        )
    text = f"{everything.total / GB:.2f} GB of {cfg.card_gb:g} on the device: {verdict}"
    host = f"{everything.on_host / GB:.2f} GB lie in host memory; {everything.moved / GB:.2f} GB move in a step"
    return "\n".join([table(rows), "", text, host, "", table(saved) if found else "no measure is taken"])
