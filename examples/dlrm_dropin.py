"""A stock TorchRec DLRM script, with our collection in place of TorchRec's. No Ray, no server, no loop of ours.

    python examples/dlrm_dropin.py              about ten seconds on one core

The three lines that differ from a TorchRec script are marked. The data are synthetic: twenty categorical features with
long-tailed IDs (any int64, no remapping to 0..n-1), and a click probability planted in them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np
import torch
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embedding_server.inproc import InprocStore
from embedding_server.spec import PolicySpec
from trainer.embedding import FrostlineEmbeddingBagCollection

NUM_FEATURES, NUM_DENSE, DIM = 20, 8, 32
KEYS = [f"feature_{i}" for i in range(NUM_FEATURES)]
LEARNING_RATE = 0.05


def batches(
    num_steps: int, batch_size: int, seed: int
) -> Iterator[tuple[torch.Tensor, KeyedJaggedTensor, torch.Tensor]]:
    """(dense float32[B, 8], row_ids, labels float32[B]); every look-up is one-hot."""
    rng = np.random.default_rng(seed)
    for _ in range(num_steps):
        ranks = (rng.pareto(0.8, (NUM_FEATURES, batch_size)) * 4).astype(np.int64) % 1_000_000
        row_ids = ranks * np.int64(0x9E3779B97F4A7C1) + np.arange(NUM_FEATURES)[:, None]
        dense = rng.standard_normal((batch_size, NUM_DENSE)).astype(np.float32)
        # what a click depends on: one dense feature, and a fixed taste for each ID of the first four features
        taste = np.sin(ranks[:4] * 12.9898 + np.arange(4)[:, None]).sum(axis=0)
        clicked = rng.random(batch_size) < 1 / (1 + np.exp(-2 * taste - dense[:, 0]))
        features = KeyedJaggedTensor(
            keys=KEYS,
            values=torch.from_numpy(row_ids.reshape(-1)),
            lengths=torch.ones(NUM_FEATURES * batch_size, dtype=torch.int64),
        )
        yield torch.from_numpy(dense), features, torch.from_numpy(clicked.astype(np.float32))


def main(num_steps: int = 100, batch_size: int = 512) -> float:
    """Trains, and returns the log loss on data it has not seen."""
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(name=f"table_{i}", embedding_dim=DIM, num_embeddings=100_000, feature_names=[key])
        for i, key in enumerate(KEYS)
    ]
    store = InprocStore()  # 1: where rows live; a RemoteStore of shard addresses works the same
    policy = PolicySpec(kind="idle", idle_steps=40)  # the default of 200 steps is for runs that are not over by then
    collection = FrostlineEmbeddingBagCollection(tables, store, policy=policy)  # 2: instead of EmbeddingBagCollection
    model = DLRM(collection, NUM_DENSE, dense_arch_layer_sizes=[64, DIM], over_arch_layer_sizes=[64, 1])
    optimizer = torch.optim.Adagrad(model.parameters(), lr=LEARNING_RATE)
    loss_fn = torch.nn.BCEWithLogitsLoss()
    for step, (dense, features, labels) in enumerate(batches(num_steps, batch_size, seed=1), start=1):
        loss = loss_fn(model(dense, features).squeeze(1), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        collection.step(LEARNING_RATE)  # 3: the rows' gradients go to the store
        if step % 25 == 0:
            print(f"step {step}: log loss {loss.item():.4f}")
    model.eval()
    with torch.no_grad():
        losses = [
            loss_fn(model(dense, features).squeeze(1), labels).item()
            for dense, features, labels in batches(10, batch_size, seed=2)
        ]
    total = store.stats().total()
    print(f"unseen data: log loss {np.mean(losses):.4f} (0.69 is a coin)")
    print(f"rows: {total.rows_hot} hot, {total.rows_frozen} frozen; {total.bytes_total / 1e6:.1f} MB")
    store.close()
    return float(np.mean(losses))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=100, help="training steps")
    parser.add_argument("--batch-size", type=int, default=512, help="samples a step")
    arguments = parser.parse_args()
    main(arguments.steps, arguments.batch_size)
