"""Where the tokens of a speculation stand, and which of them an accepted branch settles."""

from types import SimpleNamespace

from shared.engine.drafting.planner import BranchDrafts, Tree
from shared.engine.drafting.speculation import Speculation
from shared.engine.verification import Verdict
from shared.ladder.rungs import PROMPT_LOOKUP, Draft


def drafts(*tokens: int) -> list[Draft]:
    return [Draft(token, 0.9, PROMPT_LOOKUP, 0) for token in tokens]


def test_an_accepted_branch_is_found_behind_those_before_it():
    cache = SimpleNamespace(capacity=100)
    part = Speculation(SimpleNamespace(cache=cache), 10, [1])
    for draft in drafts(2, 3):
        part.append(draft, 0.9)
    part.possible = [BranchDrafts(0, drafts(5, 6), [0.1, 0.9]), BranchDrafts(1, drafts(7, 8, 9), [0.1, 0.9, 0.9])]
    part.prune(Tree(2, (2, 3)))
    assert part.tokens == [1, 2, 3, 5, 6, 7, 8, 9]
    # The trunk's first draft is right, then the second branch's first two.
    verdict = Verdict([2, 7, 8, 30], branch=1, num_in_branch=2)
    assert [part.tokens[index] for index in part.through(verdict)] == [1, 2, 7, 8]
    move = part.move(verdict)
    assert move is not None
    assert (move.cache, move.start, move.end, move.to) == (cache, 15, 17, 12)
