"""A technique is its file or class, its key and its line in the stack: without them everything else
works."""

import ast
import os
import re
import shutil
import subprocess
import sys

import pytest

from common.files import ROOT

FOLDERS = ("accel", "common", "conf", "data", "models", "sampling", "scripts", "training")
FOLDERS += ("encoding", "evaluation")
CHILD = """
import warnings
from pathlib import Path

import torch

import train
from scripts import doctor
from scripts.plan.__main__ import main as plan
from training.assemble import assemble
from common.config.compose import compose

warnings.simplefilter("ignore")
TINY = ["model.dim=32", "model.depth=1", "model.head_dim=16", "batch_size=4", "total_samples=8"]
for preset in sorted(Path("conf/runtime").glob("*.yaml")):
    cfg = compose([*TINY, f"runtime={preset.stem}"]).cfg
    if preset.stem == "fast":
        training = assemble(cfg, torch.device("cpu"))
        print(training.warm_up().format_table())
        training.take_step()
for experiment in sorted(Path("conf/experiment").glob("*.yaml")):
    compose([f"experiment={experiment.stem}", "init_from=x"])
assert doctor.main([]) == 0
assert not plan([*TINY, "model=ssd_mlp_xs", "runtime=max", "hardware=h100"])
print("all of it")
"""


def remove_technique(tree, key, file, name):
    """Removes the class, its lines in the stack, and its key in the schema and the presets."""
    path = tree / file
    lines = path.read_text().splitlines(keepends=True)
    nodes = ast.parse("".join(lines)).body
    node = next(n for n in nodes if isinstance(n, ast.ClassDef) and n.name == name)
    path.write_text("".join(lines[: node.lineno - 1] + lines[node.end_lineno :]))

    stack = tree / "accel" / "stack.py"
    schema = tree / "common" / "config" / "schema.py"
    pattern = re.compile(rf"\s*({name},|{key}:.*|from .* import {name})\n")
    for place in (stack, schema, *(tree / "conf" / "runtime").glob("*.yaml")):
        lines = place.read_text().splitlines(keepends=True)
        place.write_text("".join(line for line in lines if not pattern.fullmatch(line)))
    assert name not in stack.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "file", "name"),
    [
        ("offload_activations", "accel/techniques/offload_activations.py", "OffloadActivations"),
        ("fused_swiglu", "accel/techniques/fused_kernels.py", "FusedSwiglu"),
    ],
)
def test_without_its_file_key_and_line_a_technique_is_gone(key, file, name, tmp_path):
    for folder in FOLDERS:
        # Copied with the bytecode, which saves compiling it.
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.copy(ROOT / "train.py", tmp_path)
    remove_technique(tmp_path, key, file, name)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "c")}
    done = subprocess.run(
        [sys.executable, "-c", CHILD], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("all of it\n")
    assert key not in done.stdout
