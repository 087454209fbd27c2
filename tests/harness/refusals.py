"""The refusal that most faults of users must end in."""

from contextlib import contextmanager

import pytest

from common.errors import UserError


@contextmanager
def expect_refusal(sentence):
    """Expects a UserError whose text is one line that the pattern `sentence` matches."""
    with pytest.raises(UserError, match=sentence) as error:
        yield error
    assert "\n" not in str(error.value)
