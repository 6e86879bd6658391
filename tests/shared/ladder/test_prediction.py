"""Where a prediction goes on after an edit, and how far it is believed."""

import random
from collections.abc import Sequence

import pytest

from shared.ladder.prediction import PredictedText
from shared.ladder.proposers import PREDICTION
from shared.ladder.tables import SequenceTables
from tests.native_tables import tables_of

PROMPT = (3, 4, 5)
TEXT = tuple(range(100, 160))


MAX_TAIL = 4


def new_tables(prediction: Sequence[int], num_prompt_tokens: int = 0) -> SequenceTables:
    return tables_of((), None, predicted=PredictedText(prediction), num_prompt_tokens=num_prompt_tokens)


def followed(prediction: tuple[int, ...], answer: tuple[int, ...]) -> list[bool]:
    """Whether each token of the answer was proposed."""
    one = new_tables(prediction, len(PROMPT))
    one.append(PROMPT[:2])
    one.append(PROMPT[2:])
    found = []
    for token in answer:
        drafts = one.propose()
        assert all((draft.proposer, draft.depth) == (PREDICTION, 0) for draft in drafts)
        assert all(0.0 < draft.probability < 1.0 for draft in drafts)
        found.append([draft.token for draft in drafts] == [token])
        one.append([token])
    assert one.num_predicted == sum(found)
    return found


def test_the_answer_begins_as_the_prediction_does():
    assert all(followed(TEXT, TEXT))
    assert followed(TEXT[:5], TEXT[:9]) == [True] * 5 + [False] * 4, "behind its end there is nothing"


# What the answer has in place of TEXT[20:20 + size], and how many tokens are lost.
EDITS = {
    "one for one": (1, (7,), 1),
    "two for one": (1, (7, 8), 3),
    "one for two": (2, (7,), 2),
    "five for five": (5, (7, 8, 9, 10, 11), 6),
    "an insertion": (0, (7,), 2),
    "a long insertion": (0, tuple(range(400, 430)), 31),
    "a deletion": (1, (), 1),
    "a deletion of many": (12, (), 1),
    "a deletion of most": (35, (), 4),
    "many for few": (3, tuple(range(400, 450)), 51),
}


@pytest.mark.parametrize("edit", EDITS)
def test_it_goes_on_behind_an_edit(edit):
    size, tokens, most_lost = EDITS[edit]
    answer = TEXT[:20] + tokens + TEXT[20 + size :]
    found = followed(TEXT, answer)
    assert all(found[:20])
    assert found.count(False) <= most_lost
    assert all(found[20 + most_lost :])


def test_a_part_that_was_moved_is_found():
    parts = [tuple(range(start, start + 100)) for start in (1000, 2000, 3000)]
    answer = parts[2] + parts[0] + parts[1]
    found = followed(sum(parts, ()), answer)
    assert found.count(False) <= 3 * MAX_TAIL


@pytest.mark.parametrize(("lost_at", "found_at"), [(13, 10), (20, 24)])
def test_of_two_places_the_nearer_one_is_taken(lost_at, found_at):
    prediction = [7 if place in (10, 24) else token for place, token in enumerate(TEXT)]
    one = new_tables(prediction)
    one.append([*prediction[:lost_at], 7])
    [draft] = one.propose()
    assert draft.token == prediction[found_at + 1]


def test_what_is_drafted_does_not_move_it():
    one = new_tables(TEXT)
    one.append(TEXT[:10])
    for drafted in ((TEXT[10],), (7,), (TEXT[30], TEXT[31]), TEXT[10:20]):
        one.propose(drafted)
    [draft] = one.propose()
    assert draft.token == TEXT[10]
    assert [d.token for d in one.propose(TEXT[10:14])] == [TEXT[14]]
    assert [d.token for d in one.propose((7, *TEXT[11:13]))] == [TEXT[13]], "along a draft of another's"


@pytest.mark.parametrize("seed", range(20))
def test_drafting_along_tokens_is_appending_them(seed):
    draw = random.Random(seed)
    prediction = tuple(draw.randrange(9) for _ in range(60))
    answer = tuple(t if draw.random() < 0.7 else draw.randrange(9) for t in prediction)
    ahead, behind = new_tables(prediction), new_tables(prediction)
    for place in range(0, 60, 6):
        behind.append(answer[max(place - 6, 0) : place])
        for number in range(6):
            tokens = [draft.token for draft in behind.propose(answer[place : place + number])]
            assert tokens == [draft.token for draft in ahead.propose()]
            ahead.append(answer[place + number : place + number + 1])


def test_it_is_believed_as_far_as_it_was_right():
    good, bad = new_tables(TEXT), new_tables(TEXT)
    good.append(TEXT[:30])
    bad.append([400 + number for number in range(30)])
    [sure], [unsure] = good.propose(), bad.propose()
    assert sure.probability > 0.95
    assert unsure.probability < 0.1
    bad.append([TEXT[20], TEXT[21]])
    assert bad.propose()[0].probability > unsure.probability


@pytest.mark.parametrize("num_kinds", [1, 2, 9, 300])
@pytest.mark.parametrize("size", [0, 3, 4, 5, 200])
def test_it_goes_on_where_a_search_would_find_its_last_tokens(num_kinds, size):
    draw = random.Random(size)
    prediction = [draw.randrange(num_kinds) for _ in range(size)]
    text = "".join(map(chr, prediction))
    for _ in range(50):
        answer = [draw.randrange(num_kinds) for _ in range(draw.randrange(30))]
        if size > MAX_TAIL and draw.random() < 0.5:
            start = draw.randrange(size - MAX_TAIL)
            answer += prediction[start : start + MAX_TAIL]
        one, place, run = new_tables(prediction), 0, 4
        for number, token in enumerate(answer, 1):
            one.append([token])
            place, run = searched(text, "".join(map(chr, answer[max(number - MAX_TAIL, 0) : number])), place, run)
            expected = prediction[place : place + 1]
            assert [draft.token for draft in one.propose()] == expected


def searched(text: str, tail: str, place: int, run: int) -> tuple[int, int]:
    """Where a prediction goes on after the last tokens of an answer, and how many tokens before were right."""
    if text[place : place + 1] == tail[-1]:
        return place + 1, run + 1
    for length, reach in ((MAX_TAIL, len(text) + MAX_TAIL), (2, 64), (1, 16)):
        tokens = tail[-length:]
        if len(tokens) == length:
            ahead = text.find(tokens, max(place - length, 0), place + reach)
            behind = text.rfind(tokens, max(place - reach - length, 0), place)
            ends = [start + length for start in (ahead, behind) if start >= 0]
            if ends:
                return min(ends, key=lambda end: abs(end - place)), length
    return (place + 1 if run else place), 0
