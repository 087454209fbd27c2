"""The rules of the house that no linter knows."""

import ast
import functools
import io
import re
import tokenize
from collections import Counter

import pytest
import yaml

from accel.stack import TECHNIQUES
from common.files import ROOT

PACKAGES = (
    *("common", "accel", "data", "models", "training"),
    *("sampling", "encoding", "evaluation", "scripts"),
)
CODE = [ROOT / "train.py", ROOT / "precompute_latents.py"]
CODE += sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

MAX_TOKENS_OF_FILE = 2400
MAX_TOKENS_OF_FUNCTION = 450
LONGER = {"train": 900, "precompute": 900}
MAX_TOKENS_OF_CODE = 227_640
MAX_TOKENS_OF_TESTS = 182_993
"""A change that needs more room raises the number and says by how much. Packing saves no token."""
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
NO_CODE |= {tokenize.ENCODING, tokenize.ENDMARKER}
FSTRING_START = getattr(tokenize, "FSTRING_START", -1)  # Python 3.12 takes an f-string apart
FSTRING_END = getattr(tokenize, "FSTRING_END", -2)
FRAGMENT = re.compile(r"(Of|The same|That|Those|These|So|With what|From what|By what|As) ")
FED_FROM_YAML = {"Denoiser", "ResidentLatents", "StreamedLatents", "SyntheticLatents"}
FED_FROM_YAML |= {"Attention", "BidirectionalSSD", "FastlatentTransformer", "FastlatentPipeline"}
"""Classes with a parameter for each key of their yaml, or each setting of diffusers."""


def place(file):
    return file.relative_to(ROOT).as_posix()


@functools.cache
def parse(file):
    return ast.parse(file.read_text())


def find_functions(file):
    return [node for node in ast.walk(parse(file)) if isinstance(node, ast.FunctionDef)]


def find_docstrings(file):
    """Finds the strings that are statements: docstrings, those of constants and fields too."""
    statements = [node.value for node in ast.walk(parse(file)) if isinstance(node, ast.Expr)]
    constants = [value for value in statements if isinstance(value, ast.Constant)]
    return [constant for constant in constants if isinstance(constant.value, str)]


@functools.cache
def count_tokens(file):
    """Maps each line to its tokens of code: no comments, docstrings or line breaks; an f-string is
    one token."""
    silent: set[int] = set()
    for docstring in find_docstrings(file):
        silent |= set(range(docstring.lineno, docstring.end_lineno + 1))

    counts: Counter[int] = Counter()
    depth = 0
    for token in tokenize.generate_tokens(io.StringIO(file.read_text()).readline):
        if token.type == FSTRING_END:
            depth -= 1
            continue
        inside = depth > 0
        depth += token.type == FSTRING_START
        docstring = token.type == tokenize.STRING and token.start[0] in silent
        if not (inside or docstring or token.type in NO_CODE):
            counts[token.start[0]] += 1
    return counts


def test_train_names_no_technique_model_or_loader():
    body = (ROOT / "train.py").read_text().split('"""', 2)[2].lower()
    names = "mamba attention dit digits resident bf16 tf32 fused compile checkpointing"
    assert not [name for name in names.split() if name in body]


def test_there_is_one_training_loop():
    """The benchmarks keep a newcomer's loop to compare with."""
    places = {place(file) for file in CODE if re.search(r"\.backward\(", file.read_text())}
    assert places - {"scripts/bench/newcomer.py"} == {"training/step.py"}


def test_files_and_functions_stay_readable():
    for file in CODE:
        if file.name.endswith("_triton.py"):
            continue  # a kernel is one function by nature
        counts = count_tokens(file)
        assert counts.total() <= MAX_TOKENS_OF_FILE, place(file)
        for function in find_functions(file):
            limit = LONGER.get(function.name, 0) if file in CODE[:2] else 0
            tokens = sum(counts[n] for n in range(function.lineno, function.end_lineno + 1))
            longest = limit or MAX_TOKENS_OF_FUNCTION
            assert tokens <= longest, f"{place(file)}: {function.name} is too long"


def test_the_house_stays_as_small_as_it_is():
    assert sum(count_tokens(file).total() for file in CODE) <= MAX_TOKENS_OF_CODE
    assert sum(count_tokens(file).total() for file in TESTS) <= MAX_TOKENS_OF_TESTS


def test_long_functions_have_paragraphs():
    """A function of twenty lines has a blank line, or a comment that says why."""
    for file in CODE:
        lines = file.read_text().splitlines()
        for function in find_functions(file):
            first = function.body[0].end_lineno if ast.get_docstring(function) else 0
            body = lines[(first or function.body[0].lineno - 1) : function.end_lineno]
            paragraphs = [line for line in body if not line.strip() or line.strip()[0] == "#"]
            assert len(body) < 20 or paragraphs, f"{place(file)}: {function.name} is a wall"


def test_docstrings_are_no_fragments():
    """They open with a verb or with a noun that needs nothing before it."""
    for file in CODE:
        fragments = [text.value for text in find_docstrings(file) if FRAGMENT.match(text.value)]
        assert not fragments, place(file)


def test_no_test_module_is_imported():
    """What tests share is in tests/harness."""
    imports = re.compile(r"^\s*(?:from|import) tests\.\S*(?:test_\w+|conftest)", re.MULTILINE)
    assert not [place(file) for file in TESTS if imports.search(file.read_text())]


def test_functions_take_few_parameters():
    for file in CODE:
        if "kernels" in file.parts:
            continue  # an operator's arguments are its schema
        classes = [node for node in ast.walk(parse(file)) if isinstance(node, ast.ClassDef)]
        exempt = [part for node in classes if node.name in FED_FROM_YAML for part in node.body]
        for function in find_functions(file):
            arguments = function.args
            every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            named = [argument for argument in every if argument.arg not in ("self", "cls")]
            few = len(named) <= 7 or function in exempt
            assert few, f"{place(file)}: {function.name} takes too many"


def test_public_things_are_documented():
    """Files, and classes but for techniques, whose file is their card, and enums."""
    for file in CODE:
        assert ast.get_docstring(parse(file)), f"{place(file)} says nothing about itself"
        for node in parse(file).body:
            if isinstance(node, ast.ClassDef):
                bases = {ast.unparse(base) for base in node.bases}
                exempt = bases & {"Technique", "Enum", "StrEnum"}
                assert exempt or ast.get_docstring(node), f"{node.name} has no docstring"


def test_nothing_from_outside_is_unpickled():
    """accel/trial/child.py opens the block that its parent process has just written to a private
    folder."""
    for file in CODE:
        if place(file) != "accel/trial/child.py":
            source = file.read_text()
            assert "import pickle" not in source
            calls = re.findall(r"torch\.load\([^)]*\)", source)
            assert all("weights_only=True" in call for call in calls), place(file)


HOMONYMS = {"weights", "precision", "parallel"}
"""Keys that are also words for other things."""
AS_OTHER_THINGS = {"models/block.py", "scripts/capabilities.py"}
AS_OTHER_THINGS |= {"scripts/export/classes.py", "scripts/export/folder.py"}
"""An operator's argument of the same name, a way in which a GPU multiplies, a layer of a hybrid."""
KNOW_TECHNIQUES = ("accel/", "scripts/bench/", "common/config/schema.py")
KNOW_TECHNIQUES += ("common/config/contradictions.py",)


@pytest.mark.parametrize("key", sorted({kind.key for kind in TECHNIQUES} - HOMONYMS))
def test_no_technique_is_named_by_its_key(key):
    """What others want to know of a technique is an attribute of it."""
    for file in CODE:
        if not place(file).startswith(KNOW_TECHNIQUES) and place(file) not in AS_OTHER_THINGS:
            nodes = ast.walk(parse(file))
            values = [node.value for node in nodes if isinstance(node, ast.Constant)]
            assert key not in values, place(file)


def test_no_loader_of_another_library_runs_a_folder_s_code():
    """Our code loads from transformers and diffusers in three places."""
    texts = [
        ast.get_source_segment(file.read_text(), function) or ""
        for file in CODE
        for function in find_functions(file)
    ]
    loaders = [text for text in texts if re.search(r"\.from_pretrained\(\s*folder", text)]
    assert len(loaders) == sum("trust_remote_code" in text for text in loaders) == 3


WRITING = re.compile(
    r"\.write_(?:text|bytes)\(|\.touch\(|\bsave_file\(|shutil\.copy\w*\(|mkstemp|O_CREAT|O_WRONLY"
    r"|(?<!checkpoints)\.save(?:z\w*|txt|fig)?\((?!stream|temporary)|ZipFile\((?!temporary)"
    r"|(?<!archive\.)\bopen\((?!temporary)[^()]*'[wax][bt+:]*'|memmap\([^)]*'[wr]\+|\.tofile\("
)


def test_one_module_opens_files_for_writing():
    """Others write to its `temporary`, to a `stream` or to a member of an `archive`."""
    allowed = yaml.safe_load((ROOT / "tests/assets/writers.yaml").read_text())
    for file in CODE:
        found = WRITING.findall(ast.unparse(parse(file)))
        assert len(found) == allowed.get(place(file), 0), place(file)


def test_what_contributing_names_is_there():
    words = set(re.findall(r"\w+", "".join(file.read_text() for file in (*CODE, *TESTS))))
    named = set(re.findall(r"`([\w./]+)`", (ROOT / "CONTRIBUTING.md").read_text()))
    assert [name for name in named - words if not (ROOT / name).exists()] == []
    assert len(named) > 60
