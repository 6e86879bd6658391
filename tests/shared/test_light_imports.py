"""What a worker and a calibration import, and that torch's compiler still works when it comes late."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[2]
HEAVY = (
    "datasets",
    "starlette",
    "uvicorn",
    "pandas",
    "sklearn",
    "scipy",
    "torch.distributed.tensor._api",
    "torch._inductor",
    "torch._dynamo.utils",
    "sympy.core",
    "torch.utils._sympy.functions",
    "cryptography.x509",
)
# Tokenizers whose converter others have, too.
TOKENIZERS = ["GemmaTokenizer", "Qwen2Tokenizer", "CamembertTokenizer", "LlamaTokenizer"]
# One process for all: each part prints a line, and the later ones import more.
PROGRAM = f"""
import json, os, signal, sys
from shared.light_imports import import_transformers_lightly
import_transformers_lightly()
import torch
import inference_service.__main__
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, models
def are_listed():
    return ["LlamaForCausalLM" in module._class_to_module for module in (transformers, models)]
listed = are_listed()
found = []
for name in {TOKENIZERS!r}:
    if os.fork() == 0:  # each is the first that is asked for
        signal.alarm(30)
        os._exit(getattr(getattr(transformers, name, None), "__name__", "") != name)
    found.append(os.wait()[1] == 0)
from transformers import LlamaConfig, LlamaForCausalLM
sizes = {{"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "vocab_size": 9}}
class Calls(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {{}}))

with Calls():
    torch.ones(2) + 1
with torch.device("meta"):
    LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes))
weight = torch.nn.Parameter(torch.ones(1))  # as a calibration learns, alone or as one of several processes
weight.sum().backward()
torch.optim.AdamW([weight]).step()
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
torch.distributed.destroy_process_group()
print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))

from pathlib import Path
names = [models.BertModel.__name__, hasattr(transformers, "Nothing"), hasattr(models, "Nothing")]
print(json.dumps([listed, found, names, are_listed(), "pipeline" in transformers.__all__]))
from transformers.utils import import_utils
folder = Path(transformers.__file__).parent / "models"
once = import_utils.create_import_structure_from_path
each_time = once.__wrapped__
known = once(folder)
print(json.dumps([known is once(folder / "__init__.py"), len(known) > 100, known == each_time(str(folder))]))

late = sys.modules["torch.distributed.tensor"]
import torch.distributed.tensor as tensors
before = "torch.distributed.tensor._api" in sys.modules
from torch.distributed.tensor import DTensor, Shard
print(json.dumps([before, tensors is late, DTensor is tensors._api.DTensor, Shard(1).dim]))

from transformers.integrations import deepgemm
late = torch._dynamo
marked = [function for mark, function in late._marked if mark == "assume_constant_result"]

@torch.compiler.disable(recursive=False)
def apart(x):
    return 3 * x

@torch.compile(backend="eager")
def compiled(x):
    return apart(x) + 1

result = float(compiled(torch.ones(1)))
known = [getattr(function, "_dynamo_marked_constant", False) for function in marked]
print(json.dumps([result, "torch._dynamo.utils" in sys.modules, bool(known) and all(known)]))
"""


@pytest.fixture(scope="module")
def said() -> list[object]:
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_worker_imports_nothing_that_it_does_not_run(said: list[object]) -> None:
    assert said[0] == []


def test_families_are_listed_when_one_is_asked_for(said: list[object]) -> None:
    assert said[1] == [[False, False], [True] * 4, ["BertModel", False, False], [True, True], True]


def test_transformers_lists_its_files_once_and_finds_the_same(said: list[object]) -> None:
    assert said[2] == [True, True, True]


def test_distributed_tensors_come_when_they_are_needed(said: list[object]) -> None:
    assert said[3] == [False, True, True, 1]


def test_the_compiler_comes_when_it_is_needed_and_knows_what_was_marked(said: list[object]) -> None:
    assert said[4] == [4.0, True, True]
