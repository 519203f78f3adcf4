"""A model that TorchRec trained, as tensors for one safetensors file: dense layers, tables, accumulators of the tables.

    save_file(tensors_of(model, optimizer), "model.safetensors")      in the script of TorchRec
    ebc.load("model.safetensors")                                     in ours (embedding.py)

Names are those of format torchrec (interchange.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import KeyedOptimizer

from embedding_server.errors import InvalidInput

#: what an optimizer calls columns of its state, and what they are called in the file, by the optimizer's class
_STATE_OF: dict[str, tuple[tuple[str, str], ...]] = {
    "Adagrad": (("sum", "momentum1"),),
    "RowWiseAdagrad": (("sum", "momentum1"),),
    "Adam": (("exp_avg", "momentum1"), ("exp_avg_sq", "exp_avg_sq")),
    "SGD": (),
}


def tensors_of(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | KeyedOptimizer | None = None
) -> dict[str, torch.Tensor]:
    """Copies of parameters and buffers under the model's names, and of the rows' accumulators.

    optimizer: of the rows: torch.optim's Adagrad, Adam or SGD, TorchRec's RowWiseAdagrad, or the fused_optimizer of a
    DistributedModelParallel on one rank; None: that which the tables apply in their backward, if they have one. Tables
    without state there go without. InvalidInput if it is another, or if a tensor is spread over ranks.
    """
    tensors = {name: _whole(name, tensor) for name, tensor in model.state_dict().items()}
    named = _fused_state(optimizer) if isinstance(optimizer, KeyedOptimizer) else _plain_state(model, optimizer)
    return tensors | {name: _whole(name, tensor) for name, tensor in named}


def _fused_state(optimizer: KeyedOptimizer) -> Iterator[tuple[str, Any]]:
    """FBGEMM's: by parameter, then `T.momentum1`, ..."""
    for of_parameter in optimizer.state_dict()["state"].values():
        yield from of_parameter.items()


def _plain_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[str, torch.Tensor]]:
    for collection in model.modules():
        if isinstance(collection, EmbeddingBagCollection):
            for table, bag in collection.embedding_bags.items():
                for each in [optimizer] if optimizer else getattr(bag.weight, "_in_backward_optimizers", []):
                    for name, tensor in _state(each, bag.weight).items():
                        yield f"{table}.{name}", tensor


def _state(optimizer: torch.optim.Optimizer, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    kind = type(optimizer).__name__
    if kind not in _STATE_OF:
        raise InvalidInput(
            f"optimizer {kind} is not one of {', '.join(_STATE_OF)}: rows have no place for its state; save"
            " model.state_dict() alone, and they begin with a new one"
        )
    state: Mapping[str, torch.Tensor] = optimizer.state.get(weight, {})
    return {ours: state[theirs] for theirs, ours in _STATE_OF[kind] if theirs in state}


def _whole(name: str, tensor: Any) -> torch.Tensor:
    """A contiguous copy on the CPU."""
    parts = None
    if isinstance(tensor, ShardedTensor):
        parts = [shard.tensor for shard in tensor.local_shards()]
    elif isinstance(tensor, DTensor):
        parts = [tensor.to_local()]
    if parts is not None:
        if len(parts) != 1 or parts[0].shape != tensor.shape:
            raise InvalidInput(f"{name} is spread over ranks or devices; gather it to one rank before it is saved")
        tensor = parts[0]
    copy: torch.Tensor = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    return copy
