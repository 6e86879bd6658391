"""Passes of a runner beside those of the model itself."""

from collections.abc import Mapping

import torch
from torch import Tensor

from shared.model.loaded import LoadedModel
from shared.model.runner import CapturedStates, Runner, captured_depths
from tests.families import VOCABULARY_SIZE

TOLERANCE = 1e-4


def random_ids(length: int) -> Tensor:
    return torch.randint(2, VOCABULARY_SIZE, (1, length))


def own_logits(loaded: LoadedModel, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return loaded.model(input_ids=ids, use_cache=False).logits.float()


def distance(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape
    assert torch.isfinite(actual).all()
    return float((actual - expected).abs().max() / expected.abs().max())


def check_taps(runner: Runner, ids: Tensor, expected: Mapping[int, Tensor]) -> None:
    """In one pass and in parts, the states between layers are those of `expected`."""
    wanted, length = captured_depths(runner.num_layers), ids.shape[1]
    for first, last in ((0, 6), (0, 3), (1, 6), (2, 4)):
        cache, entering = runner.new_cache(length), None
        if first:
            entering = runner.run(ids, cache, first=0, last=first, base=0)
        captured: CapturedStates = {}
        runner.run(ids, cache, first=first, last=last, base=0, hidden=entering, captured=captured)
        assert set(captured) == {depth for depth in wanted if first < depth < last}
        for depth, states in captured.items():
            torch.testing.assert_close(states, expected[depth], rtol=TOLERANCE, atol=TOLERANCE)
