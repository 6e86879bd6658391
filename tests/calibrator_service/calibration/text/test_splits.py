"""Which split a sequence or a prompt belongs to."""

import pytest

from calibrator_service.calibration.text.shards import TokenSequence
from calibrator_service.calibration.text.splits import SPLITS, Splitter


def test_splits_are_disjoint_and_none_is_empty() -> None:
    splitter = Splitter()
    assigned = [splitter.assign(TokenSequence((i, 7), 1)) for i in range(1000)]
    for size, share in ((40, 1 / 4), (1000, 1 / 10)):
        counts = {split: assigned[:size].count(split) for split in SPLITS}
        for split in ("confidence", "report"):
            assert counts[split] == pytest.approx(share * size, rel=0.1), "few sequences: more"
    assert set(assigned[:4]) == set(SPLITS)
    # The same prompt again (and so the same greedy answer) is in no split.
    assert splitter.assign(TokenSequence((3, 7), 1)) is None
    assert splitter.assign(TokenSequence((3, 8, 9), 1)) is None
    assert splitter.assign(TokenSequence((3, 8, 9), 2)) is not None


def test_what_a_parent_learned_is_neither_learned_nor_measured_again():
    before = Splitter()
    sequences = [TokenSequence((i, 7), 1) for i in range(50)]
    learned = [sequence for sequence in sequences if before.assign(sequence) == "heads"]
    splitter = Splitter(learned=before.learned)
    assert {splitter.assign(sequence) for sequence in learned} == {None}
    # Another answer to a prompt that was learned from is learned from, too.
    others = [TokenSequence((*s.prompt, 8, 9), 1, is_greedy=False) for s in learned]
    assert {splitter.assign(sequence) for sequence in others} == {"heads"}
    assert before.learned < splitter.learned
    new = [splitter.assign(TokenSequence((i, 7), 1)) for i in range(100, 110)]
    assert set(new) == set(SPLITS)
