"""What a worker's process imports. Imported by one process that workers are forked of, and by nothing else."""

import importlib

from shared.cpus import size_thread_pools
from shared.light_imports import import_transformers_lightly
from shared.memory import share_heaps

size_thread_pools()
share_heaps()
import_transformers_lightly()
for name in ("inference_service.__main__", "transformers.models.llama.modeling_llama"):
    importlib.import_module(name)
