import pytest

from neap_engine.tune.results import Measurement, ResultsFile
from shared.errors import Corrupt, PreconditionFailed

RUN = {"model_id": "tiny", "router_version": 3}
FULL = Measurement(0, "full", None, None, None, (1, 2), 0.5, 1)
RELAXED = Measurement(0, "relaxed", 0.9, None, 0.1, (1, 3), 0.4, 1)


def test_a_file_that_was_cut_off_continues_at_its_last_whole_line(tmp_path):
    path = tmp_path / "folder" / "results.jsonl"
    results = ResultsFile(path, RUN)
    results.add(FULL)
    whole = path.read_bytes()
    results.add(RELAXED)
    path.write_bytes(path.read_bytes()[:-5])
    again = ResultsFile(path, RUN)
    assert again.measured == {FULL.key}
    assert path.read_bytes() == whole
    again.add(RELAXED)
    assert ResultsFile(path, RUN).measured == {FULL.key, RELAXED.key}


def test_a_file_whose_first_line_is_cut_off_begins_anew(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text('{"model_')
    assert ResultsFile(path, RUN).measured == set()
    assert ResultsFile(path, RUN).measured == set()


def test_the_results_of_another_run_are_kept(tmp_path):
    path = tmp_path / "results.jsonl"
    ResultsFile(path, RUN).add(FULL)
    before = path.read_bytes()
    with pytest.raises(PreconditionFailed) as raised:
        ResultsFile(path, {**RUN, "router_version": 4})
    assert raised.value.reason == "RESULTS_OF_ANOTHER_RUN"
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "text", ["a shopping list\n", "a shopping list", '{"model_id": "tiny"}\n{"bread": 2}\n']
)
def test_another_file_is_not_written_to(tmp_path, text):
    path = tmp_path / "list.txt"
    path.write_text(text)
    with pytest.raises(Corrupt):
        ResultsFile(path, RUN)
    assert path.read_text() == text
