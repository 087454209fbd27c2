"""Bytes that blocks keep for their backward passes, and that adaLN's backward pass writes, counted
on fake tensors."""

import json
import re
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch._subclasses import FakeTensorMode

from common.config.build import build
from common.config.compose import compose
from common.files import ROOT
from scripts.bench.floor import Traffic, count_block, run_block, switch_kernels
from tests.harness.denoisers import LATENTS, make_denoiser

USABLE_BYTES = 72e9
"""Bytes that a run may take of a GPU of 80 GB."""
COMMAND = re.compile(r"train\.py ((?:\S+=\S+ ?)+)")


@cache
def count_model(node):
    """Counts a model from its configuration as JSON."""
    return count_block(replace(compose(["data=synthetic"]).cfg, model=json.loads(node)))


@pytest.mark.parametrize("family", ["mamba", "dit"])
def test_fake_tensors_are_kept_as_real_ones_are(family):
    kept = []
    for mode in (FakeTensorMode(), torch.device("cpu")):
        with mode:
            kept.append(run_block(switch_kernels(make_denoiser(family)), 2)[0])
    assert kept[0] == kept[1] > 0


def find_gpu_commands():
    """The overrides of each command of the documents that names a model of ours."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    text = "\n".join(page.read_text() for page in pages).replace("\\\n", " ")
    return [
        words
        for words in map(str.split, COMMAND.findall(text))
        if any(word.startswith("model=") and word != "model=pretrained" for word in words)
        and not any("extensions=" in word for word in words)
    ]


def test_the_commands_are_found():
    assert sum("model=mamba_b" in words for words in find_gpu_commands()) >= 2


@pytest.mark.parametrize("words", find_gpu_commands(), ids=" ".join)
def test_every_command_of_the_documents_fits_a_gpu(words):
    """On one GPU; a parameter takes 16 bytes: weight, gradient and Adam's two moments."""
    # The kernels do not see the captions, which need a set of their own.
    cfg = compose([w for w in words if "conditioning=" not in w and "text_tokens=" not in w]).cfg
    with torch.device("meta"):
        model = build(cfg.model, "model", **LATENTS)
    weights = 16 * sum(p.numel() for p in model.parameters())
    micro_batch = cfg.batch_size / cfg.accumulation_steps
    kept = count_model(json.dumps(cfg.model)).kept * model.depth * micro_batch
    assert kept + weights < USABLE_BYTES


def test_adalns_backward_pass_is_linear_in_depth():
    """The backward pass writes 3 MB per sample outside of the operators, with one token and without
    mixers."""
    node = compose(["model=mamba_xl"]).cfg.model
    one_token = LATENTS | {"height": 2, "width": 2}
    sizes = []
    with torch.device("meta"):
        model = switch_kernels(build(node, "model", **one_token))
        for block in model.blocks:
            for layer in block.layers:
                layer.forward = lambda h, grid: h
        for batch in (2, 4):
            x = torch.empty(batch, 4, 2, 2)
            loss = model(x, x[:, 0, 0, 0], torch.zeros(batch, dtype=torch.long)).square().mean()
            parameters = [p for p in model.parameters() if p.requires_grad]
            with Traffic() as traffic:
                torch.autograd.grad(loss, parameters, allow_unused=True)
            sizes.append(
                sum(n for op, n in traffic.written.items() if not op.startswith("add_norm"))
            )
    assert (sizes[1] - sizes[0]) / 2 <= 3e6
