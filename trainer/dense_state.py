"""The dense part of a training as one safetensors file: layers, their optimizer's state, torch's random state.

    image = capture(model, optimizer, rng_states)      a copy in memory, while training pauses
    data = image.to_bytes()                            later, in any thread
    state = read_dense(data, path)                     checked; nothing is unpickled
    restore(state, model, optimizer, rank, num_workers)

Tensors of the file, by name:
    model.<name>                      parameters and buffers, as model.state_dict() names them
    optimizer.<key>.<parameter>       torch.optim's state of a parameter: step, exp_avg, exp_avg_sq, sum
    rng.torch                         uint8[workers, n], torch.get_rng_state() of every worker
Metadata: format_version, optimizer (its kind as the job calls it), param_groups (JSON: hyper-parameters without lr).
"""

from __future__ import annotations

import ctypes
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from embedding_server.errors import InvalidInput
from embedding_server.snapshot_file import corrupt

FORMAT_VERSION = "1"
#: torch.optim's state of one parameter, by kind of the job's dense_optimizer; a parameter without gradients has none
STATE_KEYS: dict[str, frozenset[str]] = {
    "adam": frozenset({"step", "exp_avg", "exp_avg_sq"}),
    "adamw": frozenset({"step", "exp_avg", "exp_avg_sq"}),
    "adagrad": frozenset({"step", "sum"}),
    "sgd": frozenset(),
}
_MODEL, _OPTIMIZER, _RNG = "model.", "optimizer.", "rng.torch"


@dataclass(frozen=True, slots=True)
class DenseState:
    """Copies of everything; `tensors` by name as in the file."""

    tensors: dict[str, torch.Tensor]
    optimizer_kind: str
    param_groups: list[dict[str, Any]]

    def to_bytes(self) -> bytes:
        metadata = {
            "format_version": FORMAT_VERSION,
            "optimizer": self.optimizer_kind,
            "param_groups": json.dumps(self.param_groups),
        }
        return save(self.tensors, metadata)

    @property
    def model(self) -> dict[str, torch.Tensor]:
        return {name.removeprefix(_MODEL): t for name, t in self.tensors.items() if name.startswith(_MODEL)}

    @property
    def optimizer(self) -> dict[str, dict[str, torch.Tensor]]:
        """By parameter, then key."""
        states: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in self.tensors.items():
            if name.startswith(_OPTIMIZER):
                _, key, parameter = name.split(".", 2)
                states.setdefault(parameter, {})[key] = tensor
        return states

    @property
    def rng(self) -> torch.Tensor | None:
        return self.tensors.get(_RNG)


def capture(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, optimizer_kind: str, rng_states: torch.Tensor
) -> DenseState:
    """Copies to memory what training is about to change. `model`: not wrapped by DDP. rng_states: uint8[workers, n]."""
    tensors = {_MODEL + name: _copy(tensor, name) for name, tensor in model.state_dict().items()}
    names = parameter_names(model, optimizer)
    document = optimizer.state_dict()
    for position, state in document["state"].items():
        for key, value in state.items():
            if value is not None:
                tensors[f"{_OPTIMIZER}{key}.{names[position]}"] = _copy(value, f"{key} of {names[position]}")
    tensors[_RNG] = rng_states
    return DenseState(tensors, optimizer_kind, _hyper_parameters(document["param_groups"]))


def _copy(value: Any, name: str) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise InvalidInput(
            f"dense state {name!r} is a {type(value).__name__}, and a snapshot holds tensors alone; keep it in a buffer"
        )
    tensor = value.detach()
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        # not torch's copy: its threads wait for one another, 0.4 s for 11 MB where others use the cores; one takes 2 ms
        copy = torch.empty_like(tensor)
        ctypes.memmove(copy.data_ptr(), tensor.data_ptr(), tensor.nbytes)
        return copy
    # not contiguous().clone(): of a tensor that is contiguous, contiguous() is the tensor itself
    return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)


def parameter_names(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Names of the optimizer's parameters in the order in which its state_dict numbers them."""
    by_identity = {id(parameter): name for name, parameter in model.named_parameters()}
    return [by_identity[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def _hyper_parameters(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The schedule says lr, and the model the parameters."""
    return [{key: value for key, value in group.items() if key not in ("lr", "params")} for group in groups]


def read_dense(data: bytes, path: Path) -> DenseState:
    """SegmentCorrupt, naming the file, unless it is one that `to_bytes` gave."""
    try:
        tensors = load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        metadata = header["__metadata__"]
        if metadata["format_version"] != FORMAT_VERSION:
            raise corrupt(path, f"is of format {metadata['format_version']!r}, and this version reads {FORMAT_VERSION}")
        state = DenseState(tensors, str(metadata["optimizer"]), json.loads(metadata["param_groups"]))
        _check_names(state, path)
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise corrupt(path, f"is no dense state ({error})") from None
    return state


def _check_names(state: DenseState, path: Path) -> None:
    """State of the optimizer has the keys of its kind, and the shape of its parameter or none."""
    keys, model = STATE_KEYS.get(state.optimizer_kind), state.model
    if keys is None:
        raise corrupt(path, f"names the optimizer {state.optimizer_kind!r}, and known are {sorted(STATE_KEYS)}")
    for name in state.tensors:
        if not name.startswith((_MODEL, _OPTIMIZER)) and name != _RNG:
            raise corrupt(path, f"holds {name!r}, which no dense state has")
    for parameter, values in state.optimizer.items():
        if parameter not in model or values.keys() != keys:
            raise corrupt(
                path,
                f"holds {sorted(values)} of parameter {parameter!r}, and {state.optimizer_kind} keeps {sorted(keys)} "
                "of its parameters",
            )
        for key, value in values.items():
            if value.shape != (() if key == "step" else model[parameter].shape):
                raise corrupt(path, f"holds {key} of {parameter!r} with the shape {list(value.shape)}")
    rng, num_bytes = state.rng, torch.get_rng_state().numel()
    if rng is not None and (rng.dtype != torch.uint8 or rng.dim() != 2 or not len(rng) or rng.shape[1] != num_bytes):
        raise corrupt(path, f"holds {_RNG} that is not uint8[workers, {num_bytes}]")


def restore(state: DenseState, model: torch.nn.Module, optimizer: torch.optim.Optimizer, optimizer_kind: str) -> None:
    """Into a model and an optimizer that the preflight (resume.py) found to fit. `model`: not wrapped by DDP.

    Hyper-parameters stay the optimizer's own; of another kind than then, so does its state.
    """
    model.load_state_dict(state.model)
    if optimizer_kind != state.optimizer_kind:
        return
    by_parameter = state.optimizer
    document = optimizer.state_dict()
    names = parameter_names(model, optimizer)
    document["state"] = {i: by_parameter[name] for i, name in enumerate(names) if name in by_parameter}
    optimizer.load_state_dict(document)


def restore_rng(state: DenseState, rank: int, num_workers: int) -> None:
    """Each worker gets its own random state; if there were as many of them then, else all get that of the first."""
    if state.rng is not None:
        torch.set_rng_state(state.rng[rank if len(state.rng) == num_workers else 0].clone())
