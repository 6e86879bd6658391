"""Heads in closed form, on states of which the best map is known."""

import math

import pytest
import torch
from torch import Tensor

from calibrator_service.calibration.states import moments as moments_module
from calibrator_service.calibration.states.chunk import StateChunk
from calibrator_service.calibration.states.moments import Moments
from calibrator_service.calibration.training import closed_form
from calibrator_service.calibration.training.closed_form import (
    seconds_to_solve,
    share_to_solve,
    solve_head,
    solve_ridge,
)
from shared.ladder.exit_head import ExitHead, chained, unit
from tests.calibrator_service.calibration.chunks import LAYOUT, SIZE, chunk_of

# The state before and the one entering decide a deep state, and noise that no exit can know.
FROM_DEEP, FROM_ENTERING = (
    torch.linalg.qr(torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(seed)))[0] for seed in (1, 2)
)


def planted(length: int, *, noise: float, seed: int) -> StateChunk:
    """Deep states that follow from the ones before.
    The state at the middle depth has the same as the last one, less clearly."""
    generator = torch.Generator().manual_seed(seed)

    def random() -> Tensor:
        return torch.randn(length, SIZE, generator=generator)

    low, unclear, entering, unknown = unit(random()), random(), unit(random()), random()
    deep = [unit(random()[0])]
    for t in range(1, length):
        mean = deep[-1] @ FROM_DEEP + entering[t] @ FROM_ENTERING
        deep.append(unit(mean + noise * unknown[t]))
    last = torch.stack(deep)
    return chunk_of({0: entering, 2: low, 4: unit(last + unclear)}, last, (length,))


def moments_of(chunk: StateChunk) -> Moments:
    found = Moments(LAYOUT)
    found.add(chunk, torch.Tensor.float)
    return found


def outputs(head: ExitHead, chunk: StateChunk) -> tuple[Tensor, Tensor]:
    """Of the first and second step of the chains from all positions."""
    last = len(chunk.deep) - 2
    settled = torch.stack([chunk.states[2][:last], chunk.states[4][:last], chunk.deep[:last]], 1)
    with torch.no_grad():
        first = head(settled, chunk.states[0][1:-1])
        return first, head(chained(first), chunk.states[0][2:])


def likeness(head: ExitHead, chunk: StateChunk) -> tuple[float, float]:
    """Mean cosine of the two steps' outputs with the deep states that they stand for."""
    first, further = outputs(head, chunk)
    goals = chunk.deep[1:-1], chunk.deep[2:]
    found = [torch.cosine_similarity(o, g, -1).mean() for o, g in zip((first, further), goals, strict=True)]
    return float(found[0]), float(found[1])


def with_further(head: ExitHead, further: Tensor) -> ExitHead:
    other = ExitHead(SIZE, head.mlp_width)
    other.load_state_dict(head.state_dict())
    with torch.no_grad():
        other.fuse[:, 4 * SIZE :] = further
    return other


def test_a_planted_map_is_found():
    held_out = planted(500, noise=0.0, seed=1)
    head = solve_head(moments_of(planted(4000, noise=0.0, seed=0)), 16)
    first, further = likeness(head, held_out)
    assert first > 0.98
    assert further > 0.95
    # With another position's states nothing is left of it.
    moved = StateChunk(
        {d: s if d == 0 else s.roll(1, 0) for d, s in held_out.states.items()},
        held_out.deep.roll(1, 0), held_out.rows, held_out.choices, {}, held_out.usable,
    )  # fmt: skip
    first_output, _ = outputs(head, moved)
    assert torch.cosine_similarity(first_output, held_out.deep[1:-1], -1).mean() < first - 0.1


def test_a_chain_goes_on_with_a_map_of_its_own():
    """It is solved for the head's outputs. Neither the first map nor the map from settled states is as good there."""
    text, held_out = planted(20_000, noise=1.2, seed=0), planted(5000, noise=1.2, seed=1)
    head = solve_head(moments_of(text), 16)
    _, further = likeness(head, held_out)
    tied = with_further(head, head.fuse[:, 2 * SIZE : 4 * SIZE])
    assert further > likeness(tied, held_out)[1] + 0.005
    settled = torch.cat([text.deep[1:-1], text.states[0][2:]], -1)
    from_settled = torch.linalg.lstsq(settled, text.deep[2:]).solution
    assert further > likeness(with_further(head, from_settled.T), held_out)[1] + 0.005


def test_the_further_map_is_solved_for_the_outputs_of_the_first():
    """Products with the outputs themselves, which `solve_head` need not compute, say the same."""
    moments = moments_of(planted(3000, noise=0.8, seed=0))
    head, first = solve_head(moments, 16), 4 * SIZE
    outputs = torch.zeros(moments.layout.width, 2 * SIZE)
    outputs[:first, :SIZE] = head.fuse[:, :first].T.detach() / head.gain.detach()
    outputs[first:, SIZE:] = torch.eye(SIZE)
    seen = outputs.T @ (moments.second @ outputs)
    expected, _ = solve_ridge(seen, outputs.T @ moments.targets[:, SIZE:], moments.count)
    torch.testing.assert_close(head.fuse[:, first:].T, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("hidden_size", "seconds"), [(16, 1.3), (256, 1.3), (512, 8 * 1.3)])
def test_the_time_to_solve_grows_with_the_cube_of_what_is_not_tried(hidden_size, seconds, monkeypatch):
    """By a clock of which one second passes while a ridge is solved."""
    ticks = iter([5.0, 6.0])
    monkeypatch.setattr(closed_form.time, "perf_counter", lambda: next(ticks))
    found = seconds_to_solve(hidden_size, torch.device("cpu"))
    monkeypatch.undo()
    assert found == pytest.approx(seconds)


def test_fewer_tokens_than_features_give_a_sane_head(monkeypatch):
    few, held_out = planted(30, noise=0.3, seed=0), planted(500, noise=0.3, seed=1)
    assert moments_of(few).count < (LAYOUT.width - SIZE)
    head = solve_head(moments_of(few), 16)
    first, _ = likeness(head, held_out)
    assert first > 0.6
    for name in ("RIDGE_PER_LOAD", "LEAST_RIDGE", "MOST_RIDGE"):
        monkeypatch.setattr(closed_form, name, 0.0)
    try:
        without_ridge = solve_head(moments_of(few), 16)
    except torch.linalg.LinAlgError:
        return
    assert likeness(without_ridge, held_out)[0] < first - 0.02


@pytest.mark.parametrize("length", [3, 12, 30, 60])
def test_a_head_from_positions_is_that_from_their_sums(length, monkeypatch):
    """Fewer and more positions than inputs, of which there are 32 and 16."""
    heads = []
    for few in (0.0, 1e9):
        monkeypatch.setattr(moments_module, "KEPT_PER_WIDTH", few)
        moments = moments_of(planted(length, noise=0.3, seed=0))
        assert (moments.kept is None) == (few == 0.0)
        heads.append(solve_head(moments, 16))
    torch.testing.assert_close(heads[0].fuse, heads[1].fuse, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(heads[0].gain, heads[1].gain, rtol=1e-3, atol=1e-4)


def test_few_positions_are_expected_to_take_little_time():
    sizes = [share_to_solve(4096, count) for count in (0, 1024, 4096, 5120, 5121, math.inf)]
    assert sizes == sorted(sizes)
    assert sizes[0] == 0.0
    assert sizes[1] < 0.1
    assert sizes[-2:] == [1.0, 1.0]


@pytest.mark.parametrize("length", [2, 3, 50])
def test_constant_states_and_no_positions_give_a_finite_head(length):
    ones = torch.ones(length, SIZE)
    moments = moments_of(chunk_of({0: ones, 2: ones, 4: ones}, ones, (length,)))
    assert moments.count == length - 2
    head = solve_head(moments, 16)
    assert all(parameter.isfinite().all() for parameter in head.parameters())
    states = torch.ones(1, 3, SIZE)
    output = head(states, torch.ones(1, SIZE))
    assert head(chained(output), torch.ones(1, SIZE)).isfinite().all()
    if moments.count:
        torch.testing.assert_close(output, torch.ones(1, SIZE), rtol=0, atol=1e-2)
