"""The rules of the house that no linter knows."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
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
TESTS = sorted((ROOT / "tests").rglob("*.py"))
NAMED = pytest.mark.parametrize(
    "file", CODE, ids=[file.relative_to(ROOT).as_posix() for file in CODE]
)


MOST_IN_A_FILE = 2400
MOST_IN_A_FUNCTION = 450
LONGER = {"train": 900, "precompute": 900}
MOST_IN_ALL = 195_000
MOST_IN_TESTS = 145_000
"""Tokens of code; packing statements into a line saves none."""
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
NO_CODE |= {tokenize.ENCODING, tokenize.ENDMARKER}
FSTRING_START = getattr(tokenize, "FSTRING_START", -1)  # Python 3.12 takes an f-string apart
FSTRING_END = getattr(tokenize, "FSTRING_END", -2)


def text(file: Path) -> str:
    return file.read_text()


def test_train_names_no_technique_model_or_loader():
    source = text(ROOT / "train.py")
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
    assert places - {"scripts/bench/newcomer.py"} == {"training/step.py"}


def count_tokens(source: str) -> Counter[int]:
    """Maps each line to its tokens of code: no comments, docstrings or line breaks; an f-string is
    one token."""
    silent = set()
    for node in ast.walk(ast.parse(source)):
        for child in (
            getattr(node, "body", ()) if not isinstance(node, ast.Lambda | ast.IfExp) else ()
        ):
            text_alone = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
            if text_alone and isinstance(child.value.value, str):
                silent |= set(range(child.lineno, child.end_lineno + 1))

    counted: Counter[int] = Counter()
    depth = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == FSTRING_END:
            depth -= 1
            continue
        inside = depth > 0
        depth += token.type == FSTRING_START
        docstring = token.type == tokenize.STRING and token.start[0] in silent
        if not (inside or docstring or token.type in NO_CODE):
            counted[token.start[0]] += 1
    return counted


@NAMED
def test_files_and_functions_stay_readable(file):
    if file.name.endswith("_triton.py"):
        return  # a kernel is one function by nature
    source = text(file)
    counted = count_tokens(source)
    assert counted.total() <= MOST_IN_A_FILE
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            most = (
                LONGER.get(node.name, MOST_IN_A_FUNCTION)
                if file in CODE[:2]
                else MOST_IN_A_FUNCTION
            )
            lines = range(node.lineno, node.end_lineno + 1)
            assert sum(counted[line] for line in lines) <= most, f"{node.name} is too long"


def test_the_house_stays_as_small_as_it_is():
    """A change that needs more room raises the number, and says by how much."""
    assert sum(count_tokens(text(file)).total() for file in CODE) <= MOST_IN_ALL
    assert sum(count_tokens(text(file)).total() for file in TESTS) <= MOST_IN_TESTS


@NAMED
def test_long_functions_have_paragraphs(file):
    """A function of twenty lines has a blank line, or a comment that says why."""
    lines = text(file).splitlines()
    for node in ast.walk(ast.parse(text(file))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[bool(ast.get_docstring(node)) and len(node.body) > 1].lineno
            body = [line.strip() for line in lines[first - 1 : node.end_lineno]]
            paragraphs = any(not line or line.startswith("#") for line in body)
            assert len(body) < 20 or paragraphs, f"{node.name} is a wall"


FRAGMENT = re.compile(r'"""(Of|The same|That|Those|These|So|With what|From what|By what|As) ')


@NAMED
def test_docstrings_are_no_fragments(file):
    """They open with a verb or with a noun, which need nothing before them."""
    lines = [line.strip() for line in text(file).splitlines()]
    assert not [line for line in lines if FRAGMENT.match(line)]


def test_no_test_module_is_imported():
    """What tests share is in tests/harness."""
    imports = re.compile(r"^\s*(?:from|import) (tests\.\S*(?:test_\w+|conftest))", re.MULTILINE)
    found = {str(file.relative_to(ROOT)): imports.findall(text(file)) for file in TESTS}
    assert not {file: names for file, names in found.items() if names}


FED_FROM_YAML = {"Denoiser", "ResidentLatents", "StreamedLatents", "SyntheticLatents"}
FED_FROM_YAML |= {"Attention", "FastlatentTransformer", "FastlatentPipeline"}
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


HOMONYMS = {"weights", "precision", "parallel"}
"""Keys that are also words for other things."""
AS_OTHER_THINGS = {"models/block.py", "scripts/doctor.py", "scripts/kernel_cases.py"}
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
