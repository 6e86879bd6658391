import pytest
import torch

from inference_service.engine.verification import confirmed_greedily
from shared.ops import library


def rows(*choices: int) -> torch.Tensor:
    """Logits [T, 6] whose largest are `choices`."""
    return torch.nn.functional.one_hot(torch.tensor(choices), 6).float()


@pytest.mark.parametrize("has_kernels", [True, False])
def test_each_sequence_keeps_its_longest_right_prefix_and_one_token_more(
    has_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_kernels:
        monkeypatch.setattr(library, "runs_on", lambda device: False)
    logits = rows(1, 2, 3, 4, 0, 5, 5, 2)
    drafts = [[1, 2, 4], [], [5, 1]]  # rows 0..3, 4, 5..7
    assert confirmed_greedily(logits, drafts) == [[1, 2, 3], [0], [5, 5]]
    assert confirmed_greedily(rows(1, 2, 3), [[1, 2]]) == [[1, 2, 3]]
    # What is right after a mistake does not count.
    assert confirmed_greedily(rows(1, 2, 3), [[0, 2]]) == [[1]]
