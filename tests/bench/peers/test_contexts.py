"""Questions about long documents."""

import pytest

from bench.peers.contexts import KINDS, NUM_QUESTIONS, print_rates, questions
from bench.peers.engines.serving import Answer


class Letters:
    """A token for each character."""

    def __call__(self, text):
        return {"input_ids": [*map(ord, text)]}

    def decode(self, ids):
        return "".join(map(chr, ids))


def test_questions_of_all_kinds_share_the_document():
    tokenizer = Letters()
    asked = questions(tokenizer, lambda text: [*map(ord, text)], 100_000)
    assert set(asked) == set(KINDS)
    texts = [tokenizer.decode(ids) for prompts in asked.values() for ids in prompts]
    assert len({text[:100_000] for text in texts}) == 1
    assert len({text[100_000:] for text in texts}) == len(KINDS) * NUM_QUESTIONS


def test_rates_count_the_time_between_tokens(capsys: pytest.CaptureFixture[str]):
    def answering(gap_s):
        return lambda prompts: [Answer([1] * 9, [1 + gap_s * index for index in range(9)])]

    asked = {512: {"new text": [[1], [2]]}}
    print_rates({"full": answering(0.5), "exact": answering(0.25)}, asked, 3, {}, lambda line: None)
    assert "| 512 | new text | 2.0 | 4.0 | 2.00 |" in capsys.readouterr().out
