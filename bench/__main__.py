"""`make bench`: runs the CPU benchmarks on the demo's model, in int8, with the router in bench/router.

python -m bench [--only decode | batch | load] [--data-dir DIR] [flags of the benchmark]
"""

import argparse
import subprocess
import sys
from pathlib import Path

from demo.model import demo_model

# Each with flags of its own. Hugging Face does not multiply the model's file in int8.
BENCHMARKS = {"decode": ["--no-hf"], "batch": [], "load": []}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", allow_abbrev=False)
    parser.add_argument("--only", choices=list(BENCHMARKS))
    parser.add_argument("--data-dir", type=Path, default=Path(".neap"))
    options, rest = parser.parse_known_args()
    model = demo_model(options.data_dir.absolute(), print)
    router = Path(__file__).parent / "router"
    for name in [options.only] if options.only else BENCHMARKS:
        print(f"== bench.{name}", flush=True)
        command = [sys.executable, "-m", f"bench.{name}", "--model", str(model)]
        code = subprocess.run([*command, "--router", str(router), *BENCHMARKS[name], *rest], check=False).returncode
        if code:
            sys.exit(code)


if __name__ == "__main__":
    main()
