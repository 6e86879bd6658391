"""Sums of products over positions: which positions and states they are of, and that they add."""

import pytest
import torch

from calibrator_service.calibration.states import moments as moments_module
from calibrator_service.calibration.states.chunk import StateChunk
from calibrator_service.calibration.states.moments import Moments, MomentsLayout
from shared.errors import Corrupt, PreconditionFailed
from shared.ladder.unit import unit
from tests.calibrator_service.calibration.chunks import LAYOUT, SIZE, random_chunk


def final(deep: torch.Tensor) -> torch.Tensor:
    return 2 * deep


def sums_of(*chunks: StateChunk) -> Moments:
    found = Moments(LAYOUT)
    for chunk in chunks:
        found.add(chunk, final)
    return found


def assert_equal(found: Moments, expected: Moments) -> None:
    assert found.count == pytest.approx(expected.count)
    torch.testing.assert_close(found.second, expected.second, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(found.targets, expected.targets, rtol=1e-5, atol=1e-4)


def test_sums_are_of_the_settled_states_before_and_the_states_entering(monkeypatch):
    """Position by position. Fails if any of the states is taken from another position."""
    monkeypatch.setattr(moments_module, "PIECE", 3)
    chunk = random_chunk(lengths=(9, 2, 3, 6))
    second = torch.zeros(5 * SIZE, 5 * SIZE)
    targets = torch.zeros(5 * SIZE, 2 * SIZE)
    rows, count = set(chunk.rows.tolist()), 0
    for t in range(len(chunk.deep)):
        if not {t + 1, t + 2} <= rows:
            continue
        parts = [chunk.states[2][t], chunk.states[4][t], chunk.deep[t]]
        parts += [chunk.states[0][t + 1], chunk.states[0][t + 2]]
        x = torch.cat([unit(part) for part in parts])
        z = torch.cat([final(chunk.deep[t + 1]), final(chunk.deep[t + 2])]).float()
        second += torch.outer(x, x)
        targets += torch.outer(x, z)
        count += 1
    found = sums_of(chunk)
    assert found.count == count == 7 + 0 + 1 + 4
    torch.testing.assert_close(found.second, second, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(found.targets, targets, rtol=1e-4, atol=1e-3)


def test_merged_sums_are_those_of_everything_at_once():
    first, other = random_chunk(seed=1), random_chunk(seed=2)
    merged = sums_of(first)
    merged.merge(sums_of(other))
    assert_equal(merged, sums_of(first, other))
    merged = sums_of(first, first)
    merged.merge(sums_of(first), share=-0.5)
    halves = sums_of(first)
    halves.merge(sums_of(first), share=0.5)
    assert_equal(merged, halves)


@pytest.mark.parametrize(
    "other",
    [MomentsLayout(SIZE, 1, (2, 4)), MomentsLayout(SIZE, 0, (1, 4)), MomentsLayout(2 * SIZE, 0, (2, 4))],
)  # fmt: skip
def test_sums_of_other_states_are_not_merged(other):
    with pytest.raises(PreconditionFailed) as caught:
        sums_of(random_chunk()).merge(Moments(other))
    assert caught.value.reason == "LAYOUT_MISMATCH"


def test_positions_with_states_that_are_not_finite_are_left_out():
    chunk, clean = random_chunk(lengths=(40,)), random_chunk(lengths=(40,))
    chunk.states[2][7] = float("nan")
    chunk.deep[20] = float("inf")
    found = sums_of(chunk)
    # A settled state is of one position t; a deep state is settled for one and the target of two.
    assert found.count == sums_of(clean).count - 1 - 3
    assert found.second.isfinite().all()
    assert found.targets.isfinite().all()


def test_stored_sums_are_read_again():
    sums = sums_of(random_chunk())
    assert_equal(Moments.from_tensors(sums.to_tensors(), LAYOUT), sums)


@pytest.mark.parametrize("name", ["second", "targets", "count"])
def test_damaged_sums_are_refused(name):
    tensors = sums_of(random_chunk()).to_tensors()
    for damaged in (
        {n: t for n, t in tensors.items() if n != name},
        tensors | {name: tensors[name][:-1]},
        tensors | {name: torch.full_like(tensors[name], float("nan"))},
        tensors | {name: tensors[name].long()},
        tensors | {"more": torch.zeros(1)},
    ):
        with pytest.raises(Corrupt):
            Moments.from_tensors(damaged, LAYOUT)
