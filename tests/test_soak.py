"""A short chaos run; `make soak` is the long one."""

import pytest
from soak import soak


@pytest.mark.timeout(120)
def test_nothing_is_mixed_up_or_left_behind_when_everything_fails_at_once() -> None:
    figures = soak(300, seed=1)
    assert figures["violations"] == []
    assert figures["trajectories"] >= 300
    assert figures["failures"]
