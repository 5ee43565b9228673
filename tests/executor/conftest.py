import gc
from collections.abc import Iterator

import pytest

from tests.machine import alive


@pytest.fixture
def nothing_left_running() -> Iterator[None]:
    yield
    if alive():
        gc.collect()  # what nobody holds but itself; seconds where much is imported
    assert alive() == []
