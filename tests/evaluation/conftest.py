"""torch-fidelity, where it is installed."""

import sys
import types
from importlib.util import find_spec

import pytest


@pytest.fixture
def forget_fidelity():
    """Forgets that torch-fidelity was imported."""

    def forget():
        for name in [name for name in sys.modules if name.startswith("torch_fidelity")]:
            del sys.modules[name]

    return forget


@pytest.fixture
def fidelity(monkeypatch, forget_fidelity):
    """Imports torch-fidelity; the tests use no part of it that needs torchvision, so an empty
    module replaces one that is absent or broken."""
    if find_spec("torch_fidelity") is None:
        pytest.skip("torch-fidelity is not installed (pip install 'fastlatent[evaluation]')")
    try:
        import torchvision  # noqa: F401
    except Exception:
        empty = types.ModuleType("torchvision")
        empty.__dict__.update(
            transforms=empty, functional=empty, __getattr__=lambda name: type(name, (), {})
        )
        for name in ("", ".datasets", ".transforms", ".transforms.functional"):
            monkeypatch.setitem(sys.modules, f"torchvision{name}", empty)
    import torch_fidelity

    yield torch_fidelity
    forget_fidelity()
