from demo.requests import LEARNED, MEASURED, NUM_LEARNED


def test_no_request_is_both_learned_from_and_measured():
    assert len(set(LEARNED)) == NUM_LEARNED
    assert len(MEASURED) >= 4
    assert not set(LEARNED) & set(MEASURED)
