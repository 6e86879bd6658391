"""The part of the GPU benchmark that can run on a CPU: it calls the ops with valid arguments."""

from collections.abc import Callable

import pytest
import torch

from bench import gpu


def test_the_router_is_timed_on_valid_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda run, **_: run)
    monkeypatch.setattr(gpu, "ROUTER_WIDTH", 64)
    results: list[object] = []

    def timed(run: Callable[[], object]) -> float:
        results.append(run())
        return 1.0

    found = gpu.router_us("cpu", {}, timed)
    assert list(found) == list(gpu.ROUTER_TOKENS)
    own, eager, compiled = results[-3:]
    assert isinstance(own, torch.Tensor)
    assert isinstance(eager, torch.Tensor)
    torch.testing.assert_close(own, eager, atol=1e-3, rtol=1e-3)
    assert torch.equal(eager, compiled)
