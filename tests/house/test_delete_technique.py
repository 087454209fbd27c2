"""A technique is its file or class, its key and its line in the stack: without them all goes on."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from common.files import ROOT

FOLDERS = ("accel", "common", "conf", "data", "models", "sampling", "scripts", "training")
FOLDERS += ("encoding", "evaluation")
TECHNIQUES = {
    "tf32": ("accel/techniques/tf32.py", "Tf32"),
    "fused_swiglu": ("accel/techniques/fused_kernels.py", "FusedSwiglu"),
    "offload_activations": ("accel/techniques/offload_activations.py", "OffloadActivations"),
}
"""Key -> the file and the class that go."""

CHILD = """
import warnings
from pathlib import Path

import torch

import train
from scripts import doctor
from scripts.plan.__main__ import main as plan
from training.assemble import assemble
from training.config.compose import compose

warnings.simplefilter("ignore")
TINY = ["model.dim=32", "model.depth=1", "model.head_dim=16", "batch_size=4", "total_samples=8"]
for preset in sorted(Path("conf/runtime").glob("*.yaml")):
    cfg = compose([*TINY, f"runtime={preset.stem}"]).cfg
    if preset.stem == "fast":
        training = assemble(cfg, torch.device("cpu"))
        print(training.warm_up().format_table())
        training.take_step()
for experiment in sorted(Path("conf/experiment").glob("*.yaml")):
    compose([f"experiment={experiment.stem}"])
assert doctor.main([]) == 0
assert not plan([*TINY, "model=ssd_mlp_xs", "runtime=max", "hardware=h100"])
print("all of it")
"""


def remove(tree: Path, key: str, file: str, name: str) -> None:
    """Takes the class out of its file, which goes if no other technique is in it, its lines out of
    the stack, and its key out of the schema and the presets."""
    own = tree / file
    lines = own.read_text().splitlines(keepends=True)
    classes = [node for node in ast.parse(own.read_text()).body if isinstance(node, ast.ClassDef)]
    gone = next(node for node in classes if node.name == name)
    if file.endswith(f"/{key}.py"):
        own.unlink()
    else:
        own.write_text("".join(lines[: gone.lineno - 1] + lines[gone.end_lineno :]))

    where = ["accel/stack.py", "training/config/schema.py"]
    where += [f"conf/runtime/{file.name}" for file in (tree / "conf/runtime").glob("*.yaml")]
    line = re.compile(rf"\s*({name},|{key}:.*|from .* import {name})\n")
    for place in map(tree.joinpath, where):
        kept = [
            text for text in place.read_text().splitlines(keepends=True) if not line.fullmatch(text)
        ]
        place.write_text("".join(kept))
    assert name not in (tree / "accel/stack.py").read_text()


@pytest.mark.parametrize(
    "key",
    [
        pytest.param(key, marks=[] if key == "offload_activations" else pytest.mark.slow)
        for key in TECHNIQUES
    ],
)
def test_without_its_file_key_and_line_a_technique_is_gone(key, tmp_path):
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, tmp_path / folder)  # with what Python has compiled
    shutil.copy(ROOT / "train.py", tmp_path)
    remove(tmp_path, key, *TECHNIQUES[key])
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "c")}
    done = subprocess.run(
        [sys.executable, "-c", CHILD], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("all of it\n")
    assert key not in done.stdout
    assert "residual_in_fp32" in done.stdout
