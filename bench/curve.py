"""Draws what the time of a calibration buys: exact against full depth by the seconds that the calibration took.

    python -m bench.curve FIGURES.json .. --out docs/curve.png

Each file is from `bench.calibration --json` and becomes one line.
"""

import json
from pathlib import Path
from typing import Any

from bench.options import make_parser
from neap_engine.cli.charts import write_panels

TICKS = {150: "150 s", 300: "5 min", 900: "15 min", 3600: "1 h"}


def main() -> None:
    parser = make_parser(__doc__, model=False)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    lines = [json.loads(path.read_text()) for path in options.files]

    def draw(axes: Any) -> None:
        for line in lines:
            seconds, speed_ups = zip(*line["points"], strict=True)
            axes.plot(seconds, speed_ups, marker="o", label=line["label"])
            for place in zip(seconds, speed_ups, strict=True):
                axes.annotate(f"{place[1]:.2f}", place, (0, 6), textcoords="offset points")
        axes.set_xscale("log")
        axes.set_xticks(list(TICKS), list(TICKS.values()))
        axes.minorticks_off()
        axes.set_ylim(1.0, 0.05 + max(place[1] for line in lines for place in line["points"]))
        axes.set_xlabel("time of calibration from nothing, on two cores")
        axes.set_ylabel("exact / full depth")
        axes.grid(alpha=0.3)
        axes.legend()

    print(write_panels(options.out, "What the time of a calibration buys", 1, draw))


if __name__ == "__main__":
    main()
