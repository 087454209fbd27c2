"""Finds the files whose code a case of the bench can reach, and hashes them.

From the function that measures a case, and from the `_target_`s of its configuration, the search
follows the imports of each file, also those inside functions, and the strings that name something
in the same package, such as the launcher of a kernel. What it cannot see is a name that code puts
together.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from functools import cache
from pathlib import Path

from common.config.compose import compose
from common.files import ROOT
from scripts.bench import Case, Words

DOTTED = re.compile(r"\w+(?:\.\w+)+")


@cache
def find_file(name: str) -> Path | None:
    """Returns the file of one of the project's modules, or of the module that contains the object
    `name`; None for anything else."""
    for module in (name, name.rpartition(".")[0]):
        path = ROOT.joinpath(*module.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if module and file.is_file():
                return file
    return None


@cache
def list_neighbours(file: Path) -> frozenset[Path]:
    """Lists the project's files that a file imports, and those of its own package that it names in
    a string."""
    package = ".".join(file.relative_to(ROOT).parent.parts)
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and DOTTED.fullmatch(str(node.value)):
            names.add(f"{package}.{str(node.value).removeprefix(f'{package}.')}")
    return frozenset(found for found in map(find_file, names) if found)


@cache
def describe_config(overrides: tuple[str, ...]) -> str:
    """Returns the configuration that is composed from the overrides, as text; "" without any."""
    source = compose([*overrides]).source if overrides else ""
    return json.dumps(source, sort_keys=True, default=str)


def find_reach(case: Case) -> tuple[list[Path], Words]:
    """Returns the files that a case can reach, and the configurations of its run and of its
    baseline as text. Words that are no overrides may name files of tests."""
    names = [case.measure.__module__]
    texts = []
    for words in (case.overrides, case.baseline):
        overrides = [word for word in words if "=" in word and not word.startswith("newcomer.")]
        texts.append(describe_config(tuple(overrides)))
        names += DOTTED.findall(texts[-1])
        names += [word[:-3].replace("/", ".") for word in words if word.endswith(".py")]

    files: set[Path] = set()
    waiting = {file for file in map(find_file, names) if file}
    while waiting:
        file = waiting.pop()
        files.add(file)
        waiting |= list_neighbours(file) - files
    return sorted(files), texts


def hash_case(case: Case) -> str:
    """Returns a hash, in 16 hexadecimal digits, of the code and the configuration that a case can
    reach. Lines that are comments do not change it."""
    files, texts = find_reach(case)
    texts += [re.sub(r"(?m)^ *#.*\n", "", file.read_text()) for file in files]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]
