from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.storage.others import Others


@pytest.fixture(scope="session")
def others() -> Iterator[Others]:
    server = Others()
    yield server
    server.close()
