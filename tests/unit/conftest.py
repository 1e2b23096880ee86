"""Settings of the unit tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def one_thread() -> Iterator[None]:
    """Tiny models run slower on several threads, and much slower where the machine is busy."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
