"""TorchRec's table configs -> TableSpec: what carries over, and what is refused with the reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from pydantic import ValidationError
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.types import DataType

from embedding_server.errors import InvalidInput
from embedding_server.spec import OptimizerSpec, PolicySpec, TableSpec


def specs_of_configs(
    configs: Sequence[BaseEmbeddingConfig],
    optimizer: OptimizerSpec,
    policy: PolicySpec,
    seed: int,
    specs: Mapping[str, TableSpec] | None = None,
) -> list[TableSpec]:
    """One TableSpec a config, in order; `specs` gives whole specs of single tables by name.

    A config's num_embeddings only sets the default initial range, as in TorchRec: row_ids may be any int64. Errors:
    InvalidInput, naming the table and the field.
    """
    given = dict(specs or {})
    names = [config.name for config in configs]
    for name in names:
        if names.count(name) > 1:
            raise InvalidInput(f"table {name!r} is configured twice; give every table its own name")
    unknown = sorted(given.keys() - set(names))
    if unknown:
        raise InvalidInput(f"specs names table {unknown[0]!r}, which no config has; the tables are {names}")
    return [_checked(given[c.name], c) if c.name in given else _spec(c, optimizer, policy, seed) for c in configs]


def _spec(config: BaseEmbeddingConfig, optimizer: OptimizerSpec, policy: PolicySpec, seed: int) -> TableSpec:
    low, high = initial_range(config)
    try:
        spec = TableSpec(
            name=config.name,
            dim=config.embedding_dim,
            optimizer=optimizer,
            policy=policy,
            init_min=low,
            init_max=high,
            seed=seed,
        )
    except ValidationError as error:
        first = error.errors()[0]
        where = f"table {config.name!r}: {'.'.join(map(str, first['loc']))}: " if first["loc"] else ""
        raise InvalidInput(where + first["msg"].removeprefix("Value error, ")) from error
    return _checked(spec, config)


def _checked(spec: TableSpec, config: BaseEmbeddingConfig) -> TableSpec:
    if spec.name != config.name or spec.dim != config.embedding_dim:
        raise InvalidInput(
            f"table {config.name!r}: its spec says name={spec.name!r}, dim={spec.dim}, its config "
            f"embedding_dim={config.embedding_dim}; they must agree"
        )
    if config.data_type != DataType.FP32:
        raise InvalidInput(
            f"table {config.name!r}: data_type={config.data_type} is not supported; hot rows are float32 "
            "(frozen_bits of the policy shrinks frozen ones); set data_type=DataType.FP32"
        )
    return spec


def initial_range(config: BaseEmbeddingConfig) -> tuple[float, float]:
    """[low, high) of a new row's values, from the init_fn that TorchRec makes of weight_init_min and weight_init_max.

    Any other init_fn is refused: a row is created the first time its row_id is seen, on whichever shard owns it, and
    must be the same there after a restart, so its values are a function of (table, row_id, seed), not of a tensor.
    """
    fn = config.init_fn
    if (
        not isinstance(fn, partial)
        or fn.func is not torch.nn.init.uniform_
        or fn.args
        or set(fn.keywords) != {"a", "b"}
    ):
        raise InvalidInput(
            f"table {config.name!r}: init_fn={fn!r} cannot be used: rows are created one by one on the shards, when "
            "their row_id is first seen, from (table, row_id, seed) alone; set weight_init_min and weight_init_max"
        )
    return float(fn.keywords["a"]), float(fn.keywords["b"])
