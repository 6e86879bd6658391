import pytest

from neap_engine.evaluate.answers_file import AnswersFile
from neap_engine.evaluate.sides import TimedAnswer
from shared.errors import Corrupt, PreconditionFailed

RUN = {"model_id": "tiny", "router_version": 3}
FULL, RELAXED = (0, "full"), (0, "relaxed 0.9")
ANSWER = TimedAnswer((1, 2), 0.5, 1.0, verify_passes=1)


def test_a_file_that_was_cut_off_continues_at_its_last_whole_line(tmp_path):
    path = tmp_path / "folder" / "results.jsonl"
    results = AnswersFile(path, RUN)
    results[FULL] = ANSWER
    whole = path.read_bytes()
    results[RELAXED] = ANSWER
    path.write_bytes(path.read_bytes()[:-5])
    again = AnswersFile(path, RUN)
    assert again == {FULL: ANSWER}
    assert path.read_bytes() == whole
    again[RELAXED] = ANSWER
    assert AnswersFile(path, RUN) == {FULL: ANSWER, RELAXED: ANSWER}


def test_a_file_whose_first_line_is_cut_off_begins_anew(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text('{"model_')
    assert AnswersFile(path, RUN) == {}
    assert AnswersFile(path, RUN) == {}


def test_the_results_of_another_run_are_kept(tmp_path):
    path = tmp_path / "results.jsonl"
    AnswersFile(path, RUN)[FULL] = ANSWER
    before = path.read_bytes()
    with pytest.raises(PreconditionFailed) as raised:
        AnswersFile(path, {**RUN, "router_version": 4})
    assert raised.value.reason == "RESULTS_OF_ANOTHER_RUN"
    assert path.read_bytes() == before


@pytest.mark.parametrize("text", ["a shopping list\n", "a shopping list", '{"model_id": "tiny"}\n{"bread": 2}\n'])
def test_another_file_is_not_written_to(tmp_path, text):
    path = tmp_path / "list.txt"
    path.write_text(text)
    with pytest.raises(Corrupt):
        AnswersFile(path, RUN)
    assert path.read_text() == text
