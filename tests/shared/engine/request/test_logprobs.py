import pytest
import torch

from shared.engine.request.logprobs import Logprobs, logprobs, logprobs_from_row


def test_unpacked_reads_the_rows_of_logprobs() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [0.0, -1.0, 5.0]])
    expected = logits.log_softmax(-1)
    for count, order in ((0, [[], []]), (2, [[1, 2], [2, 0]])):
        packed = logprobs(logits, torch.tensor([0, 2]), count)
        assert packed.shape == (2, 1 + 2 * count)
        for row, token in enumerate([0, 2]):
            alternatives = tuple((other, float(expected[row, other])) for other in order[row])
            assert logprobs_from_row(packed[row].tolist()) == Logprobs(float(expected[row, token]), alternatives)


@pytest.mark.parametrize("token", [2**24 + 1, 2**31])
def test_tokens_of_any_vocabulary_survive(token: int) -> None:
    assert logprobs_from_row([-0.5, -1.0, float(token)]).alternatives == ((token, -1.0),)
