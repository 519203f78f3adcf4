"""Runs every kernel of a worker once before its clock starts. numba compiles on a machine's first run and loads from
disk on later ones; either would count as training time, and only in the first arm."""

from __future__ import annotations

import numpy as np
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embedding_server.inproc import InprocStore
from embedding_server.store import NUM_BUCKETS, WireDtype
from trainer.control_group import ControlGroup
from trainer.embedding import FrostlineEmbeddingBagCollection

_MEMORY_BYTES = 64 << 20


def warm_up_rows(dim: int, wire_dtype: WireDtype, pooling: PoolingType) -> None:
    """One training step and one look-up on a scratch store in this process."""
    store = InprocStore(wire_dtype=wire_dtype, memory_limit_bytes=_MEMORY_BYTES)
    try:
        config = EmbeddingBagConfig(
            name="warm_up", embedding_dim=dim, num_embeddings=1, feature_names=["warm_up"], pooling=pooling
        )
        rows = FrostlineEmbeddingBagCollection([config], store)
        features = KeyedJaggedTensor(
            ["warm_up"], values=torch.arange(8), lengths=torch.full((4,), 2, dtype=torch.int32)
        )
        rows(features).values().sum().backward()
        control = ControlGroup(["warm_up"], {"warm_up": np.arange(NUM_BUCKETS) == 0})
        lookups = rows.take_lookups()
        assert lookups is not None
        control.observe(lookups, np.zeros(4, np.float32), np.zeros(4, np.float32))
        rows.step(0.1)
        rows.eval()
        rows(features)
    finally:
        store.close()
