"""Tests of GPUs need the kernels built for one: nothing here passes over that."""

import pytest
import torch

from shared.ops import runs_on
from shared.ops.build import build


@pytest.fixture(scope="session", autouse=True)
def _built() -> None:
    build()
    if torch.cuda.is_available() and not runs_on("cuda"):
        pytest.fail("there is a GPU, but neap's kernels were built without CUDA: is there no nvcc?")
