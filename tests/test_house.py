"""The rules of the house that no linter knows."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from accel.stack import TECHNIQUES
from common.files import ROOT

PACKAGES = (
    "common",
    "accel",
    "data",
    "models",
    "training",
    "sampling",
    "encoding",
    "evaluation",
    "scripts",
)
CODE = [ROOT / "train.py", ROOT / "precompute_latents.py"]
CODE += sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
NAMED = pytest.mark.parametrize(
    "file", CODE, ids=[file.relative_to(ROOT).as_posix() for file in CODE]
)


def text(file: Path) -> str:
    return file.read_text()


def test_train_is_short_and_names_no_technique_model_or_loader():
    source = text(ROOT / "train.py")
    assert len(source.splitlines()) <= 130
    body = source.split('"""', 2)[2].lower()
    for name in (
        "mamba",
        "attention",
        "dit",
        "digits",
        "resident",
        "bf16",
        "tf32",
        "fused",
        "compile",
        "checkpointing",
    ):
        assert name not in body, name


def test_there_is_one_training_loop():
    """The newcomer's loop of the benchmarks is there to be compared with, and the plan counts
    collectives."""
    places = {
        file.relative_to(ROOT).as_posix() for file in CODE if re.search(r"\.backward\(", text(file))
    }
    assert places - {"scripts/bench/naive.py", "scripts/plan/scale.py"} == {"training/step.py"}


@NAMED
def test_files_and_functions_stay_readable(file):
    assert len(text(file).splitlines()) <= 330
    for node in ast.walk(ast.parse(text(file))):
        if isinstance(node, ast.FunctionDef) and file.name not in (
            "train.py",
            "precompute_latents.py",
        ):
            # one function by nature
            kernel = any(ast.unparse(mark) == "triton.jit" for mark in node.decorator_list)
            assert node.end_lineno - node.lineno + 1 <= (100 if kernel else 65), (
                f"{node.name} is too long"
            )


FED_FROM_YAML = {"Denoiser", "ResidentLatents", "StreamedLatents", "SyntheticLatents"}
FED_FROM_YAML |= {"FastlatentTransformer", "FastlatentPipeline"}
"""Classes with a parameter for each key of their yaml, or each setting of diffusers."""


@NAMED
def test_functions_take_few_parameters(file):
    if "kernels" in file.parts:
        return  # an operator's arguments are its schema
    tree = ast.parse(text(file))
    constructors = {
        id(f)
        for c in ast.walk(tree)
        if isinstance(c, ast.ClassDef) and c.name in FED_FROM_YAML
        for f in c.body
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and id(node) not in constructors:
            given = [
                a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            ]
            assert len([name for name in given if name not in ("self", "cls")]) <= 7, (
                f"{node.name} takes too many"
            )


@NAMED
def test_public_things_are_documented(file):
    tree = ast.parse(text(file))
    assert ast.get_docstring(tree), "the file says nothing about itself"
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            bases = {ast.unparse(base) for base in node.bases}
            exempt = bases & {
                "Technique",
                "Enum",
            }  # the file's docstring is a technique's card; names say what enums are
            assert exempt or ast.get_docstring(node), f"{node.name} has no docstring"


def test_nothing_from_outside_is_unpickled():
    """accel/trial.py opens the block that its parent process has just written to a private
    folder."""
    for file in (file for file in CODE if file != ROOT / "accel" / "trial.py"):
        for call in re.findall(r"torch\.load\([^)]*\)", text(file)):
            assert "weights_only=True" in call, f"{file}: {call}"
        assert "import pickle" not in text(file)


def test_the_tree_in_the_readme_is_the_tree():
    readme = text(ROOT / "README.md")
    for name in (*PACKAGES, "train.py", "precompute_latents.py", "conf", "tests", "docs"):
        assert re.search(rf"^{re.escape(name)}/?\s", readme, re.MULTILINE), name


HOMONYMS = {"weights", "precision", "parallel"}
"""Keys that are also words for other things."""
AS_OTHER_THINGS = {"models/block.py", "scripts/timing.py", "scripts/kernel_cases.py"}
"""An operator's argument of the same name, and a way in which a GPU multiplies."""
KNOW_TECHNIQUES = ("accel/", "scripts/bench/", "training/config/schema.py")
KNOW_TECHNIQUES += ("training/config/contradictions.py",)


@NAMED
def test_no_technique_is_named_by_its_key(file):
    """What others want to know of a technique is an attribute of it."""
    place = file.relative_to(ROOT).as_posix()
    if place.startswith(KNOW_TECHNIQUES) or place in AS_OTHER_THINGS:
        return
    keys = {kind.key for kind in TECHNIQUES} - HOMONYMS
    texts = {
        node.value for node in ast.walk(ast.parse(text(file))) if isinstance(node, ast.Constant)
    }
    assert not keys & texts
