"""Labels and captured states of sequences."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from calibrator_service.calibration.states.chunk import read_chunk
from calibrator_service.calibration.states.collect import Collector, agreement, cosine_converged
from calibrator_service.calibration.text.shards import TokenSequence
from shared.errors import Corrupt
from shared.ladder.exit_head import unit
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.loaded import LoadedModel

TEXT = TokenSequence(tuple(range(5, 15)), 10)


def answer(loaded: LoadedModel, prompt: list[int], count: int) -> TokenSequence:
    output = loaded.model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=count, pad_token_id=1)
    return TokenSequence(tuple(output[0].tolist()), len(prompt))


def collector(loaded: LoadedModel, folder: Path, **options: float) -> Collector:
    return Collector(ContiguousRunner(loaded), [0, 2], folder, max_state_bytes=1 << 20, **options)  # type: ignore[arg-type]


def test_choices_are_those_of_the_full_model(counting, tmp_path):
    """The choices of an answer are its tokens; those of given text are computed."""
    mine = collector(counting, tmp_path)
    own = answer(counting, [0, 7, 9], 12)
    assert mine.add("heads", own) == []
    assert mine.add("heads", TEXT) == []
    labelled_own, labelled_text = mine.finish("heads")
    for labelled, sequence in ((labelled_own, own), (labelled_text, TEXT)):
        with torch.no_grad():
            logits = counting.model(input_ids=torch.tensor([sequence.tokens])).logits[0]
        size, first = len(labelled.tokens), labelled.first
        assert labelled.tokens.tolist() == list(sequence.tokens[:size])
        assert labelled.choices[first:].tolist() == logits[first:size].argmax(-1).tolist()
    assert (labelled_own.first, len(labelled_own.tokens)) == (2, len(own.tokens) - 1)
    assert (labelled_text.first, len(labelled_text.tokens)) == (0, 10)


def test_choices_do_not_depend_on_whether_states_are_kept(counting, tmp_path):
    """Beyond the limit on disk, answers do not go through the model: their tokens are the labels."""
    own = answer(counting, [0, 7, 9], 12)
    keeping, tables_only = (
        Collector(ContiguousRunner(counting), depths, tmp_path, max_state_bytes=1 << 20) for depths in ([0, 2], [])
    )
    for mine in (keeping, tables_only):
        assert mine.add("heads", own) == []
    (expected,), (found,) = keeping.finish("heads"), tables_only.finish("heads")
    assert not tables_only.chunks("heads")
    assert found.first == expected.first
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert found.choices.tolist() == expected.choices.tolist()


def test_states_belong_to_their_positions(counting, tmp_path):
    mine = collector(counting, tmp_path)
    sequences = [answer(counting, [0, 7, 9], 12), TEXT, answer(counting, [0, *range(5, 12)], 9)]
    labelled = []
    for sequence in sequences:
        mine.add("heads", sequence)
    labelled = mine.finish("heads")
    (chunk,) = mine.chunks("heads")
    runner = ContiguousRunner(counting)
    at = 0
    for sequence in labelled:
        captured = runner.capture(torch.from_numpy(sequence.tokens)[None], [0, 2, 3])
        for position in range(max(sequence.first, 1), len(sequence.tokens)):
            own = int(chunk.rows[at])
            for depth in (0, 2):
                expected = unit(captured[depth][0, position])
                torch.testing.assert_close(chunk.states[depth][own].float(), expected, rtol=2e-3, atol=2e-3)
            for back in (0, 1):  # the token before may be the last settled one
                expected = unit(captured[3][0, position - back])
                torch.testing.assert_close(chunk.deep[own - back].float(), expected, rtol=2e-3, atol=2e-3)
            assert int(chunk.choices[at]) == sequence.choices[position]
            at += 1
    assert at == len(chunk)


def test_a_stored_chunk_is_not_captured_again(counting, tmp_path, monkeypatch):
    first = collector(counting, tmp_path)
    first.add("report", TEXT)
    (expected,) = first.finish("report")
    second = collector(counting, tmp_path)
    monkeypatch.setattr(ContiguousRunner, "capture", lambda *_, **__: pytest.fail("captured again"))
    second.add("report", TEXT)
    (found,) = second.finish("report")
    assert found.choices.tolist() == expected.choices.tolist()
    (path,) = first.chunks("report").paths
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(Corrupt):
        read_chunk(path)


def test_states_on_disk_are_bounded(counting, tmp_path):
    mine = Collector(ContiguousRunner(counting), [0], tmp_path, max_state_bytes=2 * 32 * 2 * 25, chunk_positions=10)
    labelled = [mine.add("heads", TokenSequence((*TEXT.tokens[1:], i), 10)) for i in range(8)]
    assert all(len(part) == 1 for part in labelled)
    assert len(mine.chunks("heads")) == 3


def test_cosine_label_compares_normed_with_normed(counting, tmp_path):
    """TIDE compares the raw state with the normed one by mistake."""
    runner = ContiguousRunner(counting)
    captured = runner.capture(torch.tensor([TEXT.tokens]), [2, 3])
    state, deep = captured[2][0], captured[3][0]
    norm = counting.parts.final_norm
    with torch.no_grad():
        norm.weight.mul_(torch.linspace(0.01, 4.0, 32))  # so that it matters
        try:
            right = F.cosine_similarity(norm(state), norm(deep), dim=-1)
            wrong = F.cosine_similarity(state, norm(deep), dim=-1)
            threshold = float(right.median())
            found = cosine_converged(runner, state, deep, threshold)
        finally:
            norm.weight.div_(torch.linspace(0.01, 4.0, 32))
    assert found.tolist() == (right > threshold).tolist()
    assert found.tolist() != (wrong > threshold).tolist()
    assert 0 < int(found.sum()) < len(found)


def test_labels():
    predicted, choices = torch.tensor([1, 2, 3]), torch.tensor([1, 5, -1])
    converged = torch.tensor([False, True, True])
    assert agreement("agreement", predicted, choices, converged).tolist() == [True, False, False]
    assert agreement("cosine", predicted, choices, converged).tolist() == [False, True, True]
