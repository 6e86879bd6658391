"""Weights on ranks by transformers' own plans, and what a sharded module adds to its forward.

Transformers shards parameters as DTensors while it reads them, and wraps the modules. Its wrappers add partial products
by all_reduce, whose order depends on the size of a pass, and hide a module's own forward. So a loaded model gets plain
tensors, its classes' forwards, and one hook where ranks must meet.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.distributed import mixin
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.tensor_parallel import get_kv_heads_per_rank
from transformers.distributed.utils import TransformersDeviceMesh

from shared.errors import UnsupportedModel
from shared.model.parts import setting_of
from shared.model.ranks.group import Ranks
from shared.model.weights.quantised import quantisation

# What a style adds to a module: nothing, the sum of all ranks' outputs, all outputs one after another.
_LOCAL = {"colwise", "packed_colwise", "packed_rowwise", "replicate", "replicated_with_grad_allreduce", "local_params"}
_SUMMED = {"rowwise", "rowwise_rep", "rowwise_split_input", "moe_tp_experts", "all_reduce"}
_SPLIT = {"rowwise_rep", "rowwise_split_input"}  # whole inputs, of which a rank takes its part
_JOINED = {"colwise_gather_output", "colwise_rep"}
# The whole of these on each rank: rank 0 chooses, drafts and embeds without asking the others.
_WHOLE = "replicate"


def plan_of(config: PretrainedConfig, ranks: Ranks, model_id: str) -> DistributedConfig:
    """How transformers is to shard a model with this configuration. Reads no weights.

    Raises `UnsupportedModel` (reason TENSOR_PARALLEL_NOT_SUPPORTED) if its family has no plan, or one that neap does
    not run, or its sizes cannot be divided.
    """

    def refuse(why: str) -> UnsupportedModel:
        return UnsupportedModel(
            f"{model_id} cannot be run by {ranks.size} ranks: {why}",
            reason="TENSOR_PARALLEL_NOT_SUPPORTED",
            metadata={"model_id": model_id},
        )

    if quantisation(config) is not None:
        raise refuse("it is quantised, and only float32, float16 and bfloat16 weights are sharded")
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    plan: dict[str, str] = dict(model.tp_plan or {})
    if not plan:
        raise refuse(f"transformers has no tensor-parallel plan for {type(model).__name__}")
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    whole = {name: _WHOLE for name, module in model.named_modules() if module in ends}
    styles = model._expand_parallel_plan(plan | whole)
    if unknown := set(styles.values()) - _LOCAL - _SUMMED - _JOINED:
        raise refuse(f"its plan has the styles {', '.join(sorted(unknown))}")
    text = config.get_text_config(decoder=True)
    heads = setting_of(text, "num_key_value_heads") or setting_of(text, "num_attention_heads")
    if get_kv_heads_per_rank(plan, heads, ranks.size) is None:
        raise refuse(f"its {heads} key heads cannot be divided")
    sizes = {name: _shared_size(name, styles.get(name, _WHOLE), p.shape) for name, p in model.named_parameters()}
    if not any(sizes.values()):
        raise refuse(f"transformers' plan for {type(model).__name__} divides no weights but the embedding")
    for name, size in sizes.items():
        if size % ranks.size:
            raise refuse(f"{name} has {size} rows or columns to divide")
    return DistributedConfig(tp_size=ranks.size, tp_plan=whole)


def mesh_replacement(ranks: Ranks) -> tuple[Any, str, Any]:
    """Makes transformers shard over these ranks on their device, and not on the one that it would choose."""
    kind = torch.device(ranks.device).type
    mesh = init_device_mesh(kind, (1, 1, 1, ranks.size), mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp"))
    device = torch.device(kind) if kind == "cpu" else torch.device(kind, 0)
    return mixin, "initialize_distributed_mesh", lambda _: (device, TransformersDeviceMesh(mesh, mesh))


def _shared_size(name: str, style: str, shape: Sequence[int]) -> int:
    """The rows or columns of a parameter that ranks divide among them; 0 if each has it whole."""
    by_rows = style in ("colwise", "packed_colwise", *_JOINED)
    if not by_rows and (style not in (*_SUMMED, "packed_rowwise") or name.endswith("bias")):
        return 0
    size = shape[-2] if by_rows and len(shape) > 1 else shape[-1]
    return size // 2 if style.startswith("packed") and len(shape) > 1 else size


def localise(model: PreTrainedModel, ranks: Ranks) -> None:
    """Makes a model that transformers has sharded one of plain tensors and modules, whose parts meet in hooks."""
    sharded: Any = model
    plan: dict[str, str] = sharded._expand_parallel_plan(sharded.tp_plan)
    modules = dict(model.named_modules())
    for module in modules.values():
        for name, parameter in list(module._parameters.items()):
            if isinstance(parameter, DTensor):
                local = parameter.to_local().detach().clone()
                module._parameters[name] = nn.Parameter(local, requires_grad=False)
    for name, style in plan.items():
        if name in modules:
            _hook(modules[name], style, ranks)


def _hook(module: Any, style: str, ranks: Ranks) -> None:
    vars(module).pop("forward", None)  # transformers' wrapper
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    if style in _SPLIT:
        module.register_forward_pre_hook(_own_part(ranks))
    if style in _SUMMED:
        if getattr(module, "bias", None) is not None and ranks.rank:
            module.bias = None  # rank 0 adds it, once
        module.register_forward_hook(lambda module, args, output: ranks.total(output))
    elif style in _JOINED:
        module.register_forward_hook(lambda module, args, output: ranks.joined(output))


def _own_part(ranks: Ranks) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    def take(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x: Tensor = args[0]
        return (x.chunk(ranks.size, -1)[ranks.rank], *args[1:])

    return take
