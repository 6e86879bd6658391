"""`make bench`: the decoding benchmark on the demo model with the router that ships."""

import argparse
import subprocess
import sys
from pathlib import Path

from shared.cli.demo_model import demo_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, default=Path(".neap"))
    options, rest = parser.parse_known_args()
    model = demo_model(options.data_dir, print)
    router = ["--router", str(Path(__file__).parent / "router")]
    command = [sys.executable, "-m", "bench.decode", "--model", str(model), *router, *rest]
    sys.exit(subprocess.run(command, check=False).returncode)


if __name__ == "__main__":
    main()
