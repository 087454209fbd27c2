"""A mistake costs a newcomer one line, printed before torch is imported."""

import ast
import json
import os
import re
import subprocess
import sys

import pytest

from common.config.explain import map_keys_to_choices
from common.config.help import list_keys
from common.config.schema import TrainConfig
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


def find_named_keys(call):
    """Returns the dotted keys that the sentence of a refusal names, such as data.path of
    data.path=…"""
    parts = [part for part in ast.walk(call) if isinstance(part, ast.Constant)]
    text = " ".join(str(part.value) for part in parts)
    return set(re.findall(r"(?<![\w.-])([a-z]\w*\.[a-z_.]+)=", text))


def test_a_refusal_names_no_key_that_is_not_there():
    known = {key.partition("=")[0] for key, _ in list_keys(TrainConfig())}
    known |= map_keys_to_choices().keys()
    named = set()
    for file in [*ROOT.glob("[a-z]*/**/*.py"), *ROOT.glob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "UserError":
                named |= find_named_keys(node)
    assert len(named) > 30
    assert named <= known
