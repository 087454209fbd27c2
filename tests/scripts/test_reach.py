"""A result is of the code that its case can reach, and of no other."""

import json
import shutil
import subprocess
import sys

import pytest

from common.files import ROOT

CASES = {
    "kernels": "kernels setting=tiny rows=[swiglu]",
    "dit": "step setting=tiny model=dit_xs",
    "mamba": "step setting=tiny model=mamba_xs",
    "data": "data setting=tiny rows=[webdataset]",
    "tests": "tests setting=tiny rows=[tests/data/test_data_gpu.py]",
}
CHANGES = {
    "accel/kernels/attention/qk_rope_triton.py": ('"""', '"""A byte.', "kernels dit mamba data"),
    # Any model may have attention; the model of the setting, beside which loaders run, is ssd_mlp.
    "accel/kernels/ssd/forward_triton.py": ('"""', '"""A byte.', "kernels mamba data"),
    "models/mixers/convolution.py": ('"""', '"""A byte.', ""),
    "conf/model/mamba_xs.yaml": ("dim: 1", "dim: 2", "mamba"),
    "data/blocks.py": ('"""', '"""A byte.', "dit mamba data tests"),
    "data/streamed.py": ('"""', '"""A byte.', "data tests"),
    "encoding/tars.py": ("\nimport", "\n# A comment.\nimport", ""),
    "training/step.py": ('"""', '"""A byte.', "dit mamba tests"),
}
"""File -> a text in it, what replaces it, and the cases that this touches."""
PROGRAM = """
import json, sys
from pathlib import Path
from scripts.bench import reach
from scripts.bench.cases import plan_job

def hash_cases(file):
    # No change touches an import, so the files that a file imports stay known.
    if file.endswith(".yaml"):
        reach.describe_config.cache_clear()
    return {name: reach.hash_case(job.cases[0]) for name, job in jobs.items()}

cases, changes = json.loads(sys.argv[1])
jobs = {name: plan_job(text.split()[0], text.split()[1:]) for name, text in cases.items()}
before = hash_cases("")
touched = {}
for file, (old, new, _) in changes.items():
    text = Path(file).read_text()
    assert old in text, file
    Path(file).write_text(text.replace(old, new, 1))
    after = hash_cases(file)
    touched[file] = " ".join(name for name in cases if after[name] != before[name])
    Path(file).write_text(text)
    assert hash_cases(file) == before
print(json.dumps(touched))
"""


@pytest.fixture(scope="module")
def touched(tmp_path_factory):
    """File that was changed in a copy of the project -> cases whose hash changed."""
    copy = tmp_path_factory.mktemp("copy")
    for folder in ("accel", "common", "conf", "data", "encoding", "evaluation", "models"):
        shutil.copytree(ROOT / folder, copy / folder)
    for folder in ("sampling", "scripts", "tests", "training"):
        shutil.copytree(ROOT / folder, copy / folder)
    words = [sys.executable, "-c", PROGRAM, json.dumps([CASES, CHANGES])]
    done = subprocess.run(words, cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("file", CHANGES)
def test_a_change_touches_the_cases_that_reach_it(file, touched):
    assert touched[file] == CHANGES[file][2]
