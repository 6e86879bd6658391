from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # models this small lose by a second one
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)
