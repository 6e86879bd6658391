"""The profile of a step: its parts are those of the steps in which all requests decode, and make up the whole."""

from bench.profile import MATRICES, TITLES, cells, measure, prompts_of
from shared.model.loaded import wrap_model
from shared.ops.layer import profile_layers
from tests.families import build_family
from tests.random_ladder import random_ladder


def test_the_parts_of_a_step_make_up_the_whole() -> None:
    loaded = wrap_model(build_family("llama"), accelerate=True)
    samples = measure(loaded, prompts_of(loaded, 2, 40), 5)
    assert len(samples) == 5
    for sample in samples:
        assert set(sample) == set(TITLES)
        assert {title for title, seconds in sample.items() if not seconds} == {"exits"}
    assert not any(profile_layers(False).values())  # nothing is measured any more
    assert len(cells(samples)) == 1 + len(TITLES)


def test_what_takes_too_much_is_marked() -> None:
    sample = dict.fromkeys(TITLES, 0.05) | {"matrices": 0.25, "head": 0.25, "attention": 0.25}
    found = dict(zip(("step", *TITLES), cells([sample]), strict=True))
    assert found["step"] == "1000.0"
    assert found["attention"] == "250.00 (25%) !"
    assert not any(found[title].endswith("!") for title in (*MATRICES, "norms", "Python"))


def test_layers_by_modules_are_in_the_rest_of_a_step() -> None:
    loaded = wrap_model(build_family("falcon"), accelerate=True)
    samples = measure(loaded, prompts_of(loaded, 1, 8), 2)
    assert [sample["matrices"] for sample in samples] == [0, 0]
    assert all(sample["Python"] > 0 for sample in samples)


def test_a_profile_of_exact_tells_exits_apart() -> None:
    loaded = wrap_model(build_family("llama"), accelerate=True)
    # Passes of a tiny model take no longer than an exit.
    ladder = random_ladder(loaded, 0, (0,), agreement=1e6)
    samples = measure(loaded, prompts_of(loaded, 2, 40), 5, ladder)
    assert any(sample["exits"] > 0 for sample in samples)
