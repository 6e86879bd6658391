"""A GPU that the library has no code for is refused, with the command that mends it."""

import pytest
import torch

from shared.errors import PreconditionFailed
from shared.model.dtypes import sixteen_bits
from shared.ops import cards, toolkit
from shared.ops.cards import CudaBuild, check_card
from tests.reasons import raises

CARD = torch.device("cuda:1")


@pytest.fixture
def capability(monkeypatch):
    """Sets the compute capability of the second GPU."""
    monkeypatch.setattr(toolkit, "driver_version", lambda: "550.54.15")

    def plant(number):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: {CARD: number}[torch.device(device)])

    return plant


@pytest.mark.parametrize(
    ("built", "number", "reason", "mends"),
    [
        (None, (8, 0), "OPS_NOT_BUILT", "NEAP_BUILD_CUDA=1 make build-ops"),
        (CudaBuild("13.0", ("8.0",)), (8, 0), "DRIVER_TOO_OLD", "older CUDA"),
        (CudaBuild("12.6", ("8.0", "9.0")), (12, 0), "OPS_NOT_FOR_GPU", "TORCH_CUDA_ARCH_LIST=12.0 make build-ops"),
    ],
)
def test_what_does_not_run_is_refused(monkeypatch, capability, built, number, reason, mends):
    capability(number)
    monkeypatch.setattr(cards, "cuda_build", lambda: built)
    with raises(PreconditionFailed, reason) as refused:
        check_card(CARD)
    assert mends in refused.value.message


def test_what_runs_is_not_refused(monkeypatch, capability):
    capability((8, 9))
    monkeypatch.setattr(cards, "cuda_build", lambda: CudaBuild("12.6", ("8.0", "9.0")))
    check_card(CARD)


@pytest.mark.parametrize(("number", "dtype"), [((7, 5), torch.float16), ((8, 0), torch.bfloat16)])
def test_a_file_without_a_dtype_is_served_in_what_the_card_computes(capability, number, dtype):
    capability(number)
    assert sixteen_bits(CARD) == dtype
    assert sixteen_bits(torch.device("cpu")) == torch.bfloat16
