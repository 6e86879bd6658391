"""`python -m neap_engine.cli.gguf FILE.gguf FOLDER`: converts a quantised .gguf file to a float32 Hugging Face
folder."""

import argparse
from pathlib import Path
from typing import Any


def convert(source: Path, target: Path) -> None:
    """Dequantise `source` and save model, generation config and tokenizer in `target`.
    Raises what transformers raises."""
    # Imported here because these imports take seconds and hundreds of megabytes, which other commands do not need.
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="the .gguf file to read")
    parser.add_argument("target", type=Path, help="the folder to write")
    arguments = parser.parse_args()
    convert(arguments.source, arguments.target)
