"""Runs of several processes."""

import pytest

from tests.harness.outcomes import FOUR_STEPS
from tests.harness.zygote import read_output


@pytest.fixture(scope="session")
def run_ranks(zygote):
    """`run_ranks(folder, *words)`: what the processes of a run print; all must end well."""

    def start(folder, *words, ranks=2, **environment):
        codes = zygote(folder, *FOUR_STEPS, *words, ranks=ranks, environment=environment)
        assert codes == [0] * ranks, read_output(folder)
        return read_output(folder)

    return start
