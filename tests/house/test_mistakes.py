"""A mistake costs a newcomer one line, printed before torch is imported."""

import json
import os
import subprocess
import sys

import pytest

from common.files import ROOT
from tests.harness.mistakes import MISTAKES


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Status, output and whether torch was imported, of each command."""
    folder = tmp_path_factory.mktemp("empty")
    done = subprocess.run(
        [sys.executable, "-m", "tests.harness.mistakes"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert not done.returncode, done.stderr
    assert not list(folder.iterdir()), "a command that never started left a file"
    return dict(zip(MISTAKES, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_sentence_and_told_before_torch_comes_in(line, outcomes):
    assert outcomes[line] == [1, f"error: {MISTAKES[line]}\n", False]
