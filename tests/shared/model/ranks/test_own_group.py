"""Ranks of a test's own: three of them, and two of which one fails."""

import pytest

from shared.errors import Unavailable
from shared.model.runners import make_runner
from tests.families import build_family
from tests.ranks import TOTALS, begin_model, check_totals, ranks_of


@pytest.mark.full
def test_sums_of_three_have_one_order_whatever_their_size():
    """Of their numbers of unequal size any other order gives other bits."""
    with ranks_of(3) as ranks:
        ranks.tell(TOTALS)
        check_totals(ranks)


@pytest.mark.full
def test_a_pass_that_fails_here_is_the_last_one(tmp_path, monkeypatch):
    """The other rank waits in its middle, so what it would add to the next is wrong."""
    build_family("llama").save_pretrained(tmp_path)
    with ranks_of(2, end_well=False) as ranks:
        runner = make_runner(begin_model(ranks, tmp_path, tmp_path), 1 << 20)
        monkeypatch.setattr(ranks, "total", lambda part: 1 / 0)
        for _ in range(2):
            with pytest.raises(Unavailable) as caught:
                runner.run(runner.ids([1]), runner.new_cache(1), first=0, last=runner.num_layers, base=0)
            assert caught.value.reason == "RANK_LOST"
            monkeypatch.undo()
