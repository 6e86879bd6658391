"""Writes pictures of panels side by side."""

from collections.abc import Callable
from pathlib import Path

DOTS_PER_INCH = 110


def write_panels(
    path: Path, title: str, num_panels: int, draw: Callable[..., None], size_inches: tuple[float, float]
) -> Path:
    """Write a PNG of panels side by side, which `draw` gets as its arguments. Returns the absolute path.
    Raises OSError."""
    # Imported here because it takes a second, which other commands need not spend. The Agg backend needs no display.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, num_panels, figsize=size_inches, squeeze=False)
    try:
        figure.suptitle(title)
        draw(*panels[0])
        figure.tight_layout()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=DOTS_PER_INCH)
    finally:
        pyplot.close(figure)
    return path.absolute()
