"""Training and metrics of the confidence heads."""

import numpy as np
import pytest
import torch

from calibrator_service.calibration.report.held_out import auc, calibration_error, confidence_figures
from calibrator_service.calibration.training.confidence import ConfidenceSamples, train_confidence
from shared.errors import Cancelled


def samples(count: int, seed: int = 0) -> ConfidenceSamples:
    """Samples whose probability of agreement depends on the direction of the state and not on its length."""
    generator = torch.Generator().manual_seed(seed)
    direction = torch.randn(16, generator=generator)
    chance = torch.sigmoid(3 * direction[0])
    direction_chance = torch.sigmoid(3 * torch.randn(count, generator=generator))
    adapted = torch.randn(count, 16, generator=generator)
    adapted[:, 0] = torch.logit(direction_chance) / 3 * adapted[:, 1:].norm(dim=1) / 15**0.5
    adapted *= torch.rand(count, 1, generator=generator) * 20 + 0.1
    label = torch.rand(count, generator=generator) < direction_chance
    assert 0 < chance < 1
    return ConfidenceSamples(adapted.half(), torch.zeros(count, 3), label, torch.arange(count))


def probabilities(confidence: torch.nn.Module, part: ConfidenceSamples) -> np.ndarray:  # type: ignore[type-arg]
    with torch.no_grad():
        return confidence(part.adapted.float(), part.scalars).double().numpy()  # type: ignore[no-any-return]


def test_a_router_learns_and_is_calibrated() -> None:
    confidence = train_confidence(samples(4000), 32, seed=0, epochs=20)
    unseen = samples(4000, seed=1)
    figures = confidence_figures(probabilities(confidence, unseen), unseen.label.numpy())
    assert figures["confidence_auc"] > 0.8
    assert figures["confidence_ece"] < 0.08
    assert figures["confidence_precision"] > 0.7


def test_an_overfitted_router_is_calibrated_on_held_out_samples() -> None:
    """With random labels the probabilities must be calibrated, whatever the confidence head has memorised."""
    generator = torch.Generator().manual_seed(0)
    noise = ConfidenceSamples(
        torch.randn(600, 16, generator=generator).half(),
        torch.zeros(600, 3),
        torch.rand(600, generator=generator) < 0.3,
        torch.arange(600),
    )
    confidence = train_confidence(noise, 64, seed=0, epochs=100)
    fresh = ConfidenceSamples(
        torch.randn(2000, 16).half(), torch.zeros(2000, 3), torch.rand(2000) < 0.3, torch.arange(2000)
    )
    assert calibration_error(probabilities(confidence, fresh), fresh.label.numpy()) < 0.12


@pytest.mark.parametrize("count", [260, 9000])
def test_the_last_place_of_chains_does_not_speak_for_the_others(count: int) -> None:
    """Samples come place by place. Drafts of the first three places agree, those of the last do not, and nothing but
    the place tells them apart."""
    place = torch.arange(4).repeat_interleave(count // 4)
    scalars = torch.zeros(len(place), 3)
    scalars[:, 2] = place
    part = ConfidenceSamples(torch.zeros(len(place), 16).half(), scalars, place < 3, torch.arange(count // 4).repeat(4))
    probability = probabilities(train_confidence(part, 8, seed=0), part)
    assert probability.mean() == pytest.approx(0.75, abs=0.1)
    assert probability[place.numpy() < 3].mean() > 0.7


def test_training_is_repeatable_and_can_be_cancelled() -> None:
    part = samples(500)
    first, second = (train_confidence(part, 8, seed=3, epochs=2).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(torch.equal(t, t.half().float()) for t in first.values())
    with pytest.raises(Cancelled):
        train_confidence(part, 8, seed=3, should_stop=lambda: True)


def test_a_router_without_samples() -> None:
    confidence = train_confidence(samples(0), 8, seed=0)
    assert 0 < float(confidence(torch.randn(16), torch.zeros(3))) < 1


def test_metrics_against_values_computed_by_hand() -> None:
    probability = np.array([0.9, 0.8, 0.8, 0.3, 0.1])
    agreed = np.array([True, True, False, True, False])
    # Pairs of right and wrong: (.9,.8) (.9,.1) (.8,.8)=half (.8,.1) (.3,.8)=0 (.3,.1)
    assert auc(probability, agreed) == pytest.approx(4.5 / 6)
    figures = confidence_figures(probability, agreed)
    assert figures["confidence_brier"] == pytest.approx((0.01 + 0.04 + 0.64 + 0.49 + 0.01) / 5)
    assert figures["confidence_precision"] == pytest.approx(2 / 3)
    assert calibration_error(np.array([0.25, 0.25]), np.array([True, False])) == pytest.approx(0.25)
    assert auc(probability, np.ones(5, dtype=bool)) == 0.5
