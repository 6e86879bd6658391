"""Quantises a GGUF file with llama.cpp: `python -m bench.peers.engines.llama_cpp_quantize SOURCE TARGET TYPE`, TYPE as in Q4_K_M."""

import ctypes
import sys

import llama_cpp as api


def quantize(source: str, target: str, file_type: str) -> None:
    params = api.llama_model_quantize_default_params()
    params.ftype = getattr(api, f"LLAMA_FTYPE_MOSTLY_{file_type}")
    if status := api.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)):
        raise SystemExit(f"llama_model_quantize returned {status}")


if __name__ == "__main__":
    quantize(*sys.argv[1:])
