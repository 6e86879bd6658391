"""Sums of products over positions: which positions and states they are of, and that they add."""

import pytest
import torch

from calibrator_service.calibration.states import moments as moments_module
from calibrator_service.calibration.states.chunk import StateChunk
from calibrator_service.calibration.states.moments import Moments, MomentsLayout
from shared.errors import Corrupt, PreconditionFailed
from shared.ladder.exit_head import unit
from tests.calibrator_service.calibration.chunks import LAYOUT, SIZE, random_chunk


@pytest.fixture(autouse=True, params=[0.0, 0.2, 1e9], ids=["sums", "positions, then sums", "positions"])
def kept_per_width(request, monkeypatch):
    """The chunks here have 15 and 38 positions, and 8 of width 40 are few."""
    monkeypatch.setattr(moments_module, "KEPT_PER_WIDTH", request.param)
    return request.param


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


def test_projected_sums_are_those_of_the_directions_in_which_states_vary():
    generator = torch.Generator().manual_seed(2)
    found = Moments(LAYOUT)
    states = torch.randn(500, 7, generator=generator) @ torch.randn(7, LAYOUT.width, generator=generator)
    found._add(states, states @ torch.randn(LAYOUT.width, 2 * SIZE, generator=generator))
    row_bytes = 2 * (LAYOUT.width + 2 * SIZE)
    for num_directions, most_lost in ((8, 1e-3), (5, 0.5)):
        tensors = found.to_tensors(most_bytes=num_directions * row_bytes)
        assert sum(tensor.nbytes for tensor in tensors.values()) <= num_directions * row_bytes + 8
        read = Moments.from_tensors(tensors, LAYOUT)
        assert (read.count, read.kept) == (500.0, None)
        for ours, whole in ((read.second, found.second), (read.targets, found.targets)):
            assert (ours - whole).norm() < most_lost * whole.norm()
    values = torch.linalg.eigvalsh(found.second).flip(0)
    # No other 5 directions tell much more.
    assert read.second.trace() > 0.9 * values[:5].sum()
    with pytest.raises(Corrupt):
        Moments.from_tensors({**tensors, "aims": tensors["aims"][:-1]}, LAYOUT)


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


@pytest.mark.parametrize("huge", [1e18, 1e30, 3e38])
def test_huge_states_leave_sums_finite(huge):
    chunk = random_chunk(lengths=(40,))
    chunk.states[2][7] *= huge
    chunk.deep[20] *= huge
    chunk.deep[21:25] = huge
    found = sums_of(chunk)
    assert found.count > 20
    assert found.second.isfinite().all()
    assert found.targets.isfinite().all()


@pytest.mark.parametrize("with_positions", [False, True])
def test_stored_sums_are_read_again(with_positions):
    sums = sums_of(random_chunk(lengths=(5,)), random_chunk(lengths=(6,)))
    read = Moments.from_tensors(sums.to_tensors(with_positions=with_positions), LAYOUT)
    assert_equal(read, sums)
    assert (read.kept is None) == (sums.kept is None or not with_positions)
    for moments in (read, sums):
        moments.add(random_chunk(seed=3), final)
    assert_equal(read, sums)


def test_positions_are_kept_while_they_are_few(kept_per_width):
    sums = sums_of(random_chunk(lengths=(5,)), random_chunk(lengths=(6,)))
    if sums.count > kept_per_width * LAYOUT.width:
        assert sums.kept is None
        return
    assert sums.kept is not None
    states, finals = sums.kept
    assert states.shape == (7, LAYOUT.width)
    assert finals.shape == (7, 2 * SIZE)


def test_sums_to_be_published_tell_of_no_position():
    sums = sums_of(random_chunk(lengths=(5,)))
    assert sums.to_tensors().keys() == {"second", "targets", "count"}
    assert sum(tensor.numel() for tensor in sums.to_tensors().values()) == LAYOUT.num_sums + 1


@pytest.mark.parametrize("with_positions", [False, True])
@pytest.mark.parametrize("name", ["second", "targets", "count", "states", "finals"])
def test_damaged_sums_are_refused(name, with_positions):
    tensors = sums_of(random_chunk(lengths=(5,))).to_tensors(with_positions=with_positions)
    if name not in tensors:
        return
    for damaged in (
        {n: t for n, t in tensors.items() if n != name},
        tensors | {name: tensors[name][:-1]},
        tensors | {name: torch.full_like(tensors[name], float("nan"))},
        tensors | {name: tensors[name].long()},
        tensors | {"more": torch.zeros(1)},
    ):
        with pytest.raises(Corrupt):
            Moments.from_tensors(damaged, LAYOUT)
