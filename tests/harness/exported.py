"""Opens what an export wrote by its own code."""

import runpy
from types import SimpleNamespace


def open_part(part, file, kind):
    """Builds a model by the file of code beside it, without our packages."""
    return getattr(load_code(part / f"{file}.py"), kind).from_pretrained(part)


def load_code(file):
    return SimpleNamespace(**runpy.run_path(str(file)))
