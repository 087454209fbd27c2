"""Random inputs that are the same in every run."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
