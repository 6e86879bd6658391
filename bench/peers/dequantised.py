"""Makes a float32 Hugging Face folder of a quantised .gguf file, for engines that read no such file."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shared.errors import Corrupt


def float32_folder(gguf: Path, cache: Path, say: Callable[[str], None]) -> Path:
    """Return the folder of `gguf` in `cache`, made if it is not there. It is there in full or not at all.
    Raises Corrupt."""
    target = cache / f"{gguf.stem}-float32"
    if not target.exists():
        cache.mkdir(parents=True, exist_ok=True)
        say(f"converting the model: {target.name}")
        with tempfile.TemporaryDirectory(dir=cache, prefix=".making-") as work:
            made = Path(work) / target.name
            # In a process of its own, whose memory is free again afterwards. It must not ask a hub.
            command = [sys.executable, "-m", "bench.peers.dequantised", str(gguf), str(made)]
            environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
            result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if result.returncode != 0:
                last = (result.stderr.strip().splitlines() or ["no message"])[-1]
                raise Corrupt(f"converting {gguf.name} failed: {last}", reason="CONVERSION_FAILED")
            made.rename(target)
    return target


def convert(source: Path, target: Path) -> None:
    """Dequantise `source` and save model, generation config and tokenizer in `target`.
    Raises what transformers raises."""
    # Imported here because these imports take seconds and hundreds of megabytes, which `float32_folder` does not need.
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from shared.model.weights.gguf import GgufReaders
    from shared.model.weights.lazy import realise
    from shared.model.weights.reading import CheckpointFiles, replaced

    quiet: Any = transformers.logging
    quiet.disable_progress_bar()
    # Any: the class declares its attributes as modules, but those set below are not.
    with CheckpointFiles(torch.float32) as checkpoint:
        readers = GgufReaders(checkpoint)
        with replaced(readers.replacements):
            model: Any = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
            tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        readers.complete(source, model, tokenizer)
        realise(model)
    # The weights are plain float32 now. Without this, transformers would save the name of the quantisation and refuse
    # to load them.
    del model.config.quantization_config
    model.is_quantized = False
    model.hf_quantizer = None
    if hasattr(model, "quantization_method"):
        del model.quantization_method
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
