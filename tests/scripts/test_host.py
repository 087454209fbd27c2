"""A GPU host without a network has, or is carried, what the project imports."""

import re
from importlib.metadata import packages_distributions, requires

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from common.config.compose import read_config
from common.files import ROOT
from scripts.bench.__main__ import main as bench

HOST = read_config(ROOT / "scripts/bench/host.yaml")
IMPORT = r"(?m)^\s*(?:from|import) (\w+)"
FILES = [*ROOT.glob("*.py"), *ROOT.glob("[a-z]*/**/*.py")]


@pytest.mark.parametrize("left", [set(), {"pydantic"}, {"torchao"}, {"lazy-importer"}])
def test_a_host_lacks_only_what_is_left_behind(left):
    """A host has what the project's files import, tests and functions too, and what the carried
    packages require. A file imports pydantic, a function torchao; a carried package requires
    lazy-importer."""
    carried = set(HOST["carried"]) - left
    modules = {module for file in FILES for module in re.findall(IMPORT, file.read_text())}
    owners = packages_distributions()
    needed = [owner for module in modules for owner in owners.get(module, ())]
    for name in carried:
        for required in map(Requirement, requires(name) or ()):
            if not required.marker or required.marker.evaluate():
                needed.append(required.name)
    there = {*HOST["there"], *HOST["optional"], *carried}
    assert set(map(canonicalize_name, needed)) - there == left


def test_what_is_carried_has_its_tested_version(capsys):
    bench(["carry"])
    carried = capsys.readouterr().out.split()
    assert carried == HOST["carried"]
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert {*carried} <= {canonicalize_name(pin.partition("==")[0]) for pin in pins}
