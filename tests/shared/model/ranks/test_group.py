"""Ranks that meet or do not, and their sums."""

import pytest

from shared.errors import PreconditionFailed, Unavailable
from shared.model.ranks.group import check_alike, join_ranks
from tests.families import build_family
from tests.ranks import TOTALS, check_totals, shared_model

pytestmark = pytest.mark.full


def test_sums_have_one_order_whatever_their_size(ranks):
    """300 rows are shared out."""
    ranks.tell(TOTALS)
    check_totals(ranks)


def test_ranks_that_do_not_all_come_are_an_error_within_the_time(monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Unavailable, match="rank 1 gives up") as caught:
        join_ranks(2, device="cpu", timeout_s=0.5, pass_timeout_s=1.0)
    assert caught.value.reason == "RANKS_MISSING"
    with pytest.raises(PreconditionFailed, match="2 ranks, but --tensor-parallel is 4") as differs:
        join_ranks(4, device="cpu", timeout_s=0.5, pass_timeout_s=1.0)
    assert differs.value.reason == "RANKS_DIFFER"


def test_ranks_have_the_same_facts_or_are_told_apart():
    check_alike([{"model": "a", "release": "1"}] * 3)
    for other in ({"model": "a", "release": "2"}, {"model": "a"}, {"model": "a", "release": "1", "more": "x"}):
        with pytest.raises(PreconditionFailed, match="rank 2 has") as caught:
            check_alike([{"model": "a", "release": "1"}] * 2 + [other])
        assert caught.value.metadata["rank"] == "2"


def test_ranks_with_other_models_refuse_to_begin(ranks, tmp_path):
    for name in ("llama", "qwen3"):
        build_family(name).save_pretrained(tmp_path / name)
    with (
        pytest.raises(PreconditionFailed, match=r"(?s)differ in their model: rank 0 has .*, rank 1 has") as caught,
        shared_model(ranks, tmp_path / "llama", theirs=tmp_path / "qwen3"),
    ):
        pass
    assert caught.value.reason == "RANKS_DIFFER"
