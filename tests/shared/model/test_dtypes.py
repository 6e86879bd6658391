"""What torch says of processors that this machine is not."""

import pytest
import torch

from shared.model.dtypes import multiplies_bfloat16

# As torch.cpu.get_capabilities documents the names.
GRAVITON_2 = {"architecture": "aarch64", "neon": True, "fp16_arith": True, "bf16": False, "i8mm": False, "dot": True}


@pytest.mark.parametrize(
    ("capabilities", "multiplies"),
    [
        ({"architecture": "x86_64", "avx2": True, "avx512_f": True, "avx512_bf16": False, "amx_bf16": False}, False),
        ({"architecture": "x86_64", "avx512_bf16": True}, True),
        ({"architecture": "x86_64", "avx512_bf16": False, "amx_bf16": True}, True),
        (GRAVITON_2, False),
        (GRAVITON_2 | {"bf16": True, "i8mm": True}, True),
        ({"architecture": "s390x"}, False),
    ],
)
def test_processors_with_products_of_bfloat16(monkeypatch, capabilities, multiplies):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert multiplies_bfloat16() == multiplies


def test_this_processor_has_the_names_that_are_asked_for():
    """Or torch calls them otherwise now."""
    named = torch.cpu.get_capabilities()
    assert named.keys() & ({"avx512_bf16"} if named["architecture"] in ("x86_64", "x86") else {"bf16"})
