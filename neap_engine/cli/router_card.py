"""The card of a router that is pushed: a README.md with the header that the Hugging Face Hub reads, and a picture."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from neap_engine.cli.evaluate_view import write_panels
from neap_engine.cli.job_progress import LEAST_POSITIONS_SHOWN, proposer_in_words
from neap_engine.cli.learned_view import as_mapping, learned_lines
from shared.exchange.files import CARD, PICTURE
from shared.plain_text import one_line

TAGS = ["speculative-decoding", "early-exit", "neap"]
COLUMNS = {
    "agreement": "agreement",
    "agreement_when_proposed": "where it drafts",
    "coverage": "drafts at",
    "confidence_auc": "confidence AUC",
    "positions": "positions",
}
MAX_POSITIONS_AHEAD = 16
SIZE_INCHES = (10.0, 4.0)


def write_card(folder: Path, manifest: Mapping[str, Any], url: str, *, base_model: str, licence: str) -> str:
    """Write the card, and the picture if the manifest has figures for it. Returns the base model of the card: "" if
    none is given and the model's id is no name of the Hub."""
    # Imported here because it takes a second.
    from huggingface_hub import ModelCardData

    model = as_mapping(manifest.get("model"))
    model_id = one_line(str(model.get("id", "")))
    base = base_model or (model_id if model_id.count("/") == 1 else "")
    header = ModelCardData(base_model=base or None, library_name="neap", license=licence or None, tags=TAGS)
    has_picture = draw(folder / PICTURE, manifest)
    lines = ["---", header.to_yaml().strip(), "---", *body(manifest, model_id, url, has_picture=has_picture)]
    (folder / CARD).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return base


def body(manifest: Mapping[str, Any], model_id: str, url: str, *, has_picture: bool) -> Iterator[str]:
    model = as_mapping(manifest.get("model"))
    yield f"# A neap router for {model_id}\n"
    yield (
        "Tables and exits that draft tokens for this model, and for no other weights than these. The full model "
        "verifies every draft: the policy `exact` gives the tokens of the plain model.\n"
    )
    yield "| | |\n|---|---|"
    yield f"| model | {model_id} ({one_line(str(model.get('architecture')))}, {model.get('num_layers')} layers) |"
    yield f"| fingerprint of its weights | `{one_line(str(model.get('fingerprint')))}` |"
    yield from (f"| {name} | {_cell(value)} |" for name, value in facts(as_mapping(manifest.get("calibration"))))
    yield "\n## How often it is right\n"
    yield "Shares of positions in held-out text, by the report of the calibration that made it.\n"
    yield f"| proposer | {' | '.join(COLUMNS.values())} |\n|---|{'---|' * len(COLUMNS)}"
    for name, figures in proposers(manifest):
        yield f"| {_cell(proposer_in_words(name))} | {' | '.join(_figures(figures))} |"
    yield ""
    yield from (f"- {one_line(line)}" for line in learned_lines(manifest))
    if has_picture:
        yield f"\n![Agreement by position, and by the probability that was promised]({PICTURE})"
    yield "\n## How to serve it\n"
    yield "```sh"
    yield f"neap routers import {url} --model {model_id} --alias latest   # into the registry of the services"
    yield f"neap serve worker --model {model_id}=/path/to/the/model --router {url}"
    yield "```"


def facts(calibration: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Yield what is known of how the router was made."""
    tokens, spec = as_mapping(calibration.get("tokens")), as_mapping(calibration.get("spec"))
    made_by = as_mapping(calibration.get("made_by"))
    engine = as_mapping(as_mapping(calibration.get("relaxed")).get("engine"))
    speed = as_mapping(calibration.get("speed"))
    if isinstance(speed.get("speed_up"), float):
        low, high = speed.get("low", 0.0), speed.get("high", 0.0)
        yield (
            "exact / full, where it was made",
            f"{speed['speed_up']:.2f} (half of the prompts: {low:.2f} to {high:.2f})",
        )
    if isinstance(tokens.get("total"), int):
        yield "tokens", f"{tokens['total']:,}"
    if source := as_mapping(spec.get("source")).get("kind"):
        yield "text", source
    if isinstance(made_by.get("program"), str):
        yield "command", f"`{' '.join(map(str, [made_by['program'], *made_by.get('argv', [])]))}`"
    elif spec:
        yield "command", f"`neap calibrate --time-budget {spec.get('time_budget_s')}`"
    if engine:
        yield "numerics of the report", ", ".join(f"{name} {value}" for name, value in engine.items())


def proposers(manifest: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    found = manifest.get("proposers")
    for proposer in found if isinstance(found, list) else ():
        yield str(as_mapping(proposer).get("name")), as_mapping(as_mapping(proposer).get("figures"))


def _figures(figures: Mapping[str, Any]) -> Iterator[str]:
    count = figures.get("positions")
    is_known = not isinstance(count, int) or count >= LEAST_POSITIONS_SHOWN
    for name in COLUMNS:
        value = figures.get(name)
        if isinstance(value, int):
            yield f"{value:,}"
        else:
            yield f"{value:.3f}" if is_known and isinstance(value, float) else "not known"


def _cell(value: object) -> str:
    return one_line(str(value)).replace("|", "\\|")


def draw(path: Path, manifest: Mapping[str, Any]) -> bool:
    """Draw agreement by the position of a draft, and how well the confidences are calibrated, as a PNG. Returns False,
    and draws nothing, for a router without these figures."""
    by_position: dict[str, list[float]] = {}
    reliability: dict[str, list[tuple[float, float]]] = {}
    for name, figures in proposers(manifest):
        ahead = [figures.get(f"agreement_{number}") for number in range(1, MAX_POSITIONS_AHEAD)]
        by_position[name] = [value for value in ahead if isinstance(value, float)]
        bins = figures.get("reliability")
        reliability[name] = [
            (float(each["probability"]), float(each["agreement"]))
            for each in map(as_mapping, bins if isinstance(bins, list) else ())
            if {"probability", "agreement"} <= each.keys()
        ]
    if not any([*by_position.values(), *reliability.values()]):
        return False

    def panels(positions: Any, promised: Any) -> None:
        for name in by_position:
            words = proposer_in_words(name)
            if shares := by_position[name]:
                positions.plot(range(1, len(shares) + 1), shares, marker="o", label=words)
            if points := reliability[name]:
                promised.plot(*zip(*points, strict=True), marker=".", label=words)
        promised.plot([0, 1], [0, 1], linestyle=":", color="grey")
        positions.set_xlabel("position of the draft")
        positions.set_ylabel("share that the full model chooses")
        promised.set_xlabel("probability that was promised")
        promised.set_ylabel("share that the full model chose")
        for axes in (positions, promised):
            axes.set_ylim(0, 1)
            if axes.get_legend_handles_labels()[0]:
                axes.legend(fontsize=8)

    write_panels(path, "held-out text", 2, panels, SIZE_INCHES)
    return True
