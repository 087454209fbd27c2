"""A user's code lies outside the checkout: a command that names its package may use it, and nothing
else may."""

import sys

import pytest

from common.config import build
from common.config.compose import compose
from tests.harness.own_code import forget_package
from tests.harness.refusals import expect_refusal
from tests.harness.words import CPU, TINY_RUN
from train import train
from training.weights.pretrained import load_pretrained

MIXER = '''
import torch
from torch import nn


class Shuffle(nn.Module):
    """A user's mixer: adds a linear map of the token before."""

    def __init__(self, dim: int, head_dim: int, grid: tuple, strength: float = 1.0) -> None:
        super().__init__()
        self.proj = nn.Linear(dim, dim)
        self.strength = strength

    def init_weights(self) -> None:
        nn.init.eye_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + self.strength * self.proj(h.roll(1, dims=1))

    def flops(self, tokens: int) -> int:
        return 2 * tokens * self.proj.weight.numel()
'''
YAML = """# A user's model.
_target_: models.denoiser.Denoiser
dim: 96
depth: 2
head_dim: 32
patch_size: 2
mlp_ratio: 2.6667
mixer:
  _target_: myproj.mixer.Shuffle
  _partial_: true
  strength: 0.5
"""
SHORT = [*TINY_RUN, "model=shuffle", "save_every=2"]


@pytest.fixture
def myproj(tmp_path, monkeypatch, own_code):
    """A package in a temporary folder, as README shows it."""
    folder = tmp_path / "code" / "myproj"
    (folder / "conf" / "model").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "mixer.py").write_text(MIXER)
    (folder / "conf" / "model" / "shuffle.yaml").write_text(YAML)
    monkeypatch.syspath_prepend(str(folder.parent))
    return folder


def test_a_package_is_not_admitted_by_a_file(myproj, monkeypatch):
    (myproj / "conf" / "experiment").mkdir()
    (myproj / "conf" / "experiment" / "sly.yaml").write_text(
        "# @package _global_\n# Names another package.\nextensions: [myproj, json]\n"
    )
    monkeypatch.setenv(build.EXTENSIONS_VARIABLE, "myproj")
    with expect_refusal(r"extensions=\['json'\] comes from a file"):
        compose(["experiment=sly"])
    assert build.admitted_packages == {"myproj"}


@pytest.mark.parametrize("name", ["nowhere_to_be_found", "os.path", "-x"])
def test_what_is_no_package_is_refused(name, own_code):
    with expect_refusal("there is no package"):
        compose([f"extensions=['{name}']"])
    assert build.admitted_packages == set()


@pytest.mark.parametrize("target", ["myproj.mixer.torch.load", "myproj2.mixer.Shuffle"])
def test_only_classes_that_the_package_itself_defines_are_built(target, myproj):
    with expect_refusal("not allowed"):
        train(compose(["extensions=[myproj]", "model=shuffle", f"model._target_={target}"]))


def test_a_weights_file_that_names_a_foreign_package_runs_nothing(myproj, tmp_path):
    train(compose([*SHORT, "extensions=[myproj]", f"run_dir={tmp_path / 'run'}"]))
    forget_package()
    with expect_refusal("do not trust this file"):
        load_pretrained(next((tmp_path / "run").rglob("ema.safetensors")), CPU)
    assert "myproj.mixer" not in sys.modules
