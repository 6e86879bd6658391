"""Answers that were made before become sequences whose choices are the full model's own, and whole kinds can be held
out."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from calibrator_service.calibration.spec import AnswerFile, ServedTraffic
from calibrator_service.calibration.states.collect import Collector
from calibrator_service.calibration.text.answers import answer_sequences, count_kinds
from calibrator_service.calibration.text.shards import TokenSequence, read_shard, write_shard
from calibrator_service.calibration.text.splits import Splitter, held_out_kinds
from shared.errors import InvalidInput
from shared.model.contiguous_runner import ContiguousRunner


def answers(folder: Path, *records: Any) -> AnswerFile:
    """A file with a line for each record. A string is a line as it is."""
    path = folder / "answers.jsonl"
    lines = (one if isinstance(one, str) else json.dumps(one) for one in records)
    path.write_text("\n".join(lines) + "\n")
    return AnswerFile(str(path))


def test_texts_messages_and_ids_give_the_same_sequence(counting, tmp_path):
    [user] = [[{"role": "user", "content": "w3 w4"}]]
    records = [{"prompt": "w3 w4", "answer": "w5 w6", "kind": "a"}, {"prompt": user, "answer": "w5 w6"}]
    by_text, by_message = answer_sequences(counting, answers(tmp_path, *records))
    ids = {"prompt": list(by_text.prompt), "answer": list(by_text.tokens[by_text.answer_start :])}
    [by_ids] = answer_sequences(counting, answers(tmp_path, ids))
    assert by_text.tokens == by_message.tokens == by_ids.tokens
    assert by_text.answer_start == by_ids.answer_start == len(by_text.tokens) - 2
    assert (by_text.kind, by_ids.kind) == ("a", "")
    assert not by_text.is_greedy


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ([1], "FIELD_NOT_FOUND"),
        ({"prompt": "w1"}, "BAD_ANSWER"),
        ({"prompt": [], "answer": [3]}, "BAD_ANSWER"),
        ({"prompt": [3], "answer": [True]}, "BAD_ANSWER"),
        ({"prompt": [{"role": "user"}], "answer": [3]}, "BAD_ANSWER"),
        ({"prompt": "w1", "answer": "w\ud800"}, "NOT_UNICODE"),
        ({"prompt": "w\ud800", "answer": "w1"}, "NOT_UNICODE"),
        ('{"prompt": [3], "answer": [%s]}' % ("1" * 5000), "NOT_JSON"),
        ({"prompt": [3], "answer": [-1]}, "TOKEN_OUT_OF_RANGE"),
        ({"prompt": [32], "answer": [3]}, "TOKEN_OUT_OF_RANGE"),
    ],
)
def test_a_line_that_is_no_answer_is_refused_by_its_number(counting, tmp_path, record, reason):
    source = answers(tmp_path, {"prompt": [3], "answer": [4]}, record)
    with pytest.raises(InvalidInput, match="line 2") as caught:
        list(answer_sequences(counting, source))
    assert caught.value.reason == reason


@pytest.mark.parametrize("keeps_states", [True, False])
def test_the_choices_are_the_models_and_not_the_answers(counting, tmp_path, keeps_states):
    runner = ContiguousRunner(counting)
    tokens = torch.randint(5, 29, (20,)).tolist()
    sequence = TokenSequence(tuple(tokens), 6, is_greedy=False)
    collector = Collector(runner, [0], tmp_path, max_state_bytes=1 << 20, keeps_states=keeps_states)
    collector.add("heads", sequence)
    [labelled] = collector.finish("heads")
    logits = runner.logits(runner.capture(torch.tensor([tokens]), [3])[3][0])
    expected = logits.argmax(-1)[5:].tolist()
    assert labelled.choices[labelled.first :].tolist() == expected != [*tokens[6:], 0]
    assert np.array_equal(labelled.tokens, tokens)
    [chunk] = collector.chunks("heads")
    assert chunk.choices.tolist() == expected


def test_a_shard_keeps_whether_answers_are_greedy(tmp_path):
    sequences = [TokenSequence((1, 2, 3), 1), TokenSequence((4, 5), 1, is_greedy=False)]
    write_shard(tmp_path / "shard", sequences)
    assert read_shard(tmp_path / "shard") == sequences


def test_whole_kinds_are_held_out_for_the_report(tmp_path):
    kinds = [f"kind-{number % 10}" for number in range(200)]
    source = answers(tmp_path, *({"prompt": [n], "answer": [1], "kind": k} for n, k in enumerate(kinds)))
    held_out = held_out_kinds(count_kinds(source), seed=0)
    assert 1 <= len(held_out) <= 2
    splitter = Splitter(held_out)
    found = {kind: set() for kind in kinds}  # type: ignore[var-annotated]
    for number, kind in enumerate(kinds):
        found[kind].add(splitter.assign(TokenSequence((number, 1), 1, is_greedy=False, kind=kind)))
    for kind, splits in found.items():
        assert splits == ({"report"} if kind in held_out else {"heads", "confidence"})


def test_sampled_answers_to_one_prompt_are_in_one_split():
    splitter = Splitter()
    first = [splitter.assign(TokenSequence((n, 1), 1, is_greedy=False)) for n in range(30)]
    second = [splitter.assign(TokenSequence((n, 2), 1, is_greedy=False)) for n in range(30)]
    assert second == first
    assert set(first) == {"heads", "confidence", "report"}
    assert splitter.assign(TokenSequence((3, 2), 1, is_greedy=False)) is None


def test_of_served_traffic_what_no_model_has_served_is_skipped(counting, tmp_path):
    """Nobody can mend it: whoever may write into the registry may have forged it, or it is another revision's."""
    good, forged = {"prompt": [3], "answer": [4]}, {"prompt": [3], "answer": [1 << 31]}
    path = answers(tmp_path, good, forged, {"prompt": [], "answer": [3]}, {"prompt": [5], "answer": [6]}).path
    sequences = answer_sequences(counting, ServedTraffic("legal", path))
    assert [sequence.tokens for sequence in sequences] == [(3, 4), (5, 6)]
