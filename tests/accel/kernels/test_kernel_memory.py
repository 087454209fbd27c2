"""What blocks keep for their backward passes, and what adaLN writes in its own, counted on fake
tensors."""

from __future__ import annotations

import re

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.nn.functional import mse_loss

from common.files import ROOT
from tests.harness.block_traffic import LATENTS, Traffic, count, once, switched, uninitialised
from tests.harness.denoisers import make_denoiser
from training.config.build import build
from training.config.compose import compose

FITS = 72e9
"""Bytes that a run may take of a GPU of 80 GB."""
COMMAND = re.compile(r"train\.py ((?:\S+=\S+ ?)+)")


def of_model(*words: str):
    composed = compose(list(words)).cfg
    return composed, lambda: build(composed.model, "model", **LATENTS)


@pytest.mark.parametrize(
    ("name", "megabytes"), [("mamba_b", 5.0), ("ssd_mlp_b", 8.1), ("conv_b", 8.5), ("dit_b", 8.7)]
)
def test_a_block_keeps_no_more_for_its_backward_pass(name, megabytes):
    """A sample's share, with the fused operators on, under bf16 autocast, at 256 tokens."""
    kept = count(of_model(f"model={name}")[1]).kept / 1e6
    assert 0.95 * megabytes < kept <= megabytes


@pytest.mark.parametrize("family", ["mamba", "ssd_mlp", "conv", "dit"])
def test_fake_tensors_are_kept_as_real_ones_are(family):
    found = []
    for mode in (FakeTensorMode(), torch.device("cpu")):
        with mode:
            model = switched(uninitialised(lambda: make_denoiser(family)))
            found.append(once(model.blocks[1], 2, model.tokens, model.dim, model.modulations)[0])
    assert found[0] == found[1] > 0


def gpu_commands() -> list[str]:
    """The overrides of each command of the documents that names a model of ours."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    found = [
        words for page in pages for words in COMMAND.findall(page.read_text().replace("\\\n", " "))
    ]
    other = re.compile("extensions=|model=pretrained")
    return [
        " ".join(words.split())
        for words in found
        if " model=" in f" {words}" and not other.search(words)
    ]


def test_the_commands_are_found():
    assert sum("model=mamba_b" in command for command in gpu_commands()) >= 2


@pytest.mark.parametrize("command", gpu_commands())
def test_every_command_of_the_documents_fits_a_gpu(command):
    """What blocks keep, and 16 bytes a parameter: weights, gradients and Adam's two moments; on one
    GPU."""
    cfg, make = of_model(*command.split())
    with torch.device("meta"):
        model = make()
    parameters = sum(p.numel() for p in model.parameters())
    kept = count(make).kept * model.depth * cfg.batch_size / cfg.accumulation_steps
    assert kept + 16 * parameters < FITS


def written_by_adaln(name: str) -> float:
    """Bytes a sample that the backward pass writes outside of the operators, with one token and
    mixers left out."""
    found = []
    node = compose([f"model={name}"]).cfg.model
    one_token = LATENTS | {"height": 2, "width": 2}
    with FakeTensorMode():
        model = switched(uninitialised(lambda: build(node, "model", **one_token)))
        for block in model.blocks:
            for layer in block.layers:
                layer.forward = lambda h: h
        for batch in (2, 4):
            out = model(
                torch.empty(batch, 4, 2, 2),
                torch.empty(batch),
                torch.zeros(batch, dtype=torch.long),
            )
            loss = mse_loss(out, torch.zeros_like(out))
            with Traffic() as traffic:
                torch.autograd.grad(
                    loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True
                )
            found.append(
                sum(n for op, n in traffic.written.items() if not op.startswith("add_norm"))
            )
    return (found[1] - found[0]) / 2


@pytest.mark.parametrize(("name", "megabytes"), [("mamba_b", 0.85), ("mamba_xl", 3.0)])
def test_adalns_backward_pass_is_linear_in_depth(name, megabytes):
    assert written_by_adaln(name) <= megabytes * 1e6
