"""Rows that a loop of one's own brings along: from TorchRec with and without accumulators, from files, from a cut."""

from __future__ import annotations

import errno
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embedding_server import failpoints
from embedding_server.errors import InvalidInput, NotReady, StoreUnavailable
from embedding_server.inproc import InprocStore
from embedding_server.restore import read_parts
from embedding_server.spec import OptimizerSpec, PolicySpec
from embedding_server.store import Identity
from trainer.embedding import FrostlineEmbeddingBagCollection
from trainer.export import export_torchrec
from trainer.metrics import compute_metrics
from trainer.torchrec_tables import tensors_of

ROWS, DIM, NUM_DENSE, BATCH = 400, 8, 4, 64
NAMES = ["user", "item"]
RATE = 0.05
OFF = PolicySpec(kind="off")


def configs() -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(name=name, embedding_dim=DIM, num_embeddings=ROWS, feature_names=[f"f_{name}"])
        for name in NAMES
    ]


@dataclass
class Batch:
    dense: torch.Tensor
    sparse: KeyedJaggedTensor
    labels: torch.Tensor


def stream(steps: int, seed: int) -> Iterator[Batch]:
    """Zipf-like IDs whose taste decides of the label."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        ids = np.minimum(rng.zipf(1.2, (2, BATCH)) - 1, ROWS - 1)
        dense = rng.standard_normal((BATCH, NUM_DENSE)).astype(np.float32)
        taste = np.sin(12.9898 * ids[0]) + np.sin(78.233 * ids[1]) + dense[:, 0]
        labels = (rng.random(BATCH) < 1 / (1 + np.exp(-2 * taste))).astype(np.float32)
        sparse = KeyedJaggedTensor(
            [f"f_{name}" for name in NAMES], torch.from_numpy(ids.reshape(-1)), lengths=torch.ones(2 * BATCH).long()
        )
        yield Batch(torch.from_numpy(dense), sparse, torch.from_numpy(labels))


Model = tuple[DLRM, torch.optim.Optimizer]


def dlrm(tables: torch.nn.Module) -> Model:
    """With the optimizer of its dense layers."""
    torch.manual_seed(0)
    model = DLRM(tables, NUM_DENSE, dense_arch_layer_sizes=[16, DIM], over_arch_layer_sizes=[16, 1])
    dense = [p for name, p in model.named_parameters() if "embedding_bags" not in name]
    return model, torch.optim.Adagrad(dense, lr=RATE)


def train(model: DLRM, optimizers: list[torch.optim.Optimizer], batches: Iterator[Batch]) -> float:
    """NE of the predictions made before each step; rows of ours step too."""
    logits, labels = [], []
    for batch in batches:
        for optimizer in optimizers:
            optimizer.zero_grad()
        predicted = model(batch.dense, batch.sparse).squeeze(1)
        torch.nn.functional.binary_cross_entropy_with_logits(predicted, batch.labels).backward()
        for optimizer in optimizers:
            optimizer.step()
        ours = model.sparse_arch.embedding_bag_collection
        if isinstance(ours, FrostlineEmbeddingBagCollection):
            ours.step(RATE)
        logits.append(predicted.detach().numpy())
        labels.append(batch.labels.numpy())
    return compute_metrics(np.concatenate(labels), np.concatenate(logits)).ne


def theirs(how: str) -> tuple[DLRM, list[torch.optim.Optimizer], torch.optim.Optimizer | None]:
    """(a DLRM of TorchRec alone, what steps after a backward, the optimizer of the rows if it is one of them)."""
    tables = EmbeddingBagCollection(tables=configs())
    model, dense = dlrm(tables)
    if how == "rowwise_adagrad":  # in the backward, as TorchRec's fused ones
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of torch's own import of torch.jit
            from torch.distributed.optim import _apply_optimizer_in_backward as apply_in_backward
        apply_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": RATE, "eps": 1e-8})
        return model, [dense], None
    rows = torch.optim.Adagrad(tables.parameters(), lr=RATE, eps=1e-8)
    return model, [dense, rows], rows


def ours(store: InprocStore, kind: str, policy: PolicySpec = OFF) -> tuple[Model, FrostlineEmbeddingBagCollection]:
    spec = OptimizerSpec(kind=kind, eps=1e-8)
    tables = FrostlineEmbeddingBagCollection(configs(), store, optimizer=spec, policy=policy)
    return dlrm(tables), tables


@pytest.fixture
def store() -> Iterator[InprocStore]:
    with closing(InprocStore(memory_limit_bytes=128 << 20)) as made:
        yield made


def bring(model: Model, tables: FrostlineEmbeddingBagCollection, file: Path, dense: torch.optim.Optimizer) -> dict:
    """As README says it."""
    loaded = tables.load(file)
    model[0].load_state_dict({k: v for k, v in load_file(file).items() if k in model[0].state_dict()})
    model[1].load_state_dict(deepcopy(dense.state_dict()))  # or both would have the same tensors
    return loaded


@pytest.mark.parametrize("how", ["rowwise_adagrad", "adagrad"])
def test_a_dlrm_that_torchrec_trained_goes_on_with_the_same_ne(tmp_path, store, how: str):
    model, optimizers, rows = theirs(how)
    train(model, optimizers, stream(60, seed=1))
    save_file(tensors_of(model, rows), tmp_path / "model.safetensors")
    (mine, dense), tables = ours(store, how)
    loaded = bring((mine, dense), tables, tmp_path / "model.safetensors", optimizers[0])
    assert loaded == dict.fromkeys(NAMES, (ROWS, True))
    wanted = train(model, optimizers, stream(60, seed=2))
    assert wanted < 0.9  # it has learned
    assert train(mine, [dense], stream(60, seed=2)) == pytest.approx(wanted, abs=1e-5)
    for name in NAMES:
        ids = KeyedJaggedTensor(
            [f"f_{n}" for n in NAMES], torch.arange(ROWS).repeat(2), lengths=torch.ones(2 * ROWS).long()
        )
        tables.eval()
        got = tables(ids)[f"f_{name}"]
        weight = model.sparse_arch.embedding_bag_collection.embedding_bags[name].weight
        assert torch.allclose(got, weight, atol=1e-4)


def test_where_the_tail_freezes_ne_is_nearly_the_same(tmp_path, store):
    model, optimizers, rows = theirs("rowwise_adagrad")
    train(model, optimizers, stream(60, seed=1))
    save_file(tensors_of(model, rows), tmp_path / "model.safetensors")
    idle = PolicySpec(kind="idle", idle_steps=20, frozen_bits=8, control_fraction=0.0)
    (mine, dense), tables = ours(store, "rowwise_adagrad", idle)
    bring((mine, dense), tables, tmp_path / "model.safetensors", optimizers[0])
    wanted = train(model, optimizers, stream(60, seed=2))
    assert train(mine, [dense], stream(60, seed=2)) == pytest.approx(wanted, abs=2e-3)
    assert store.stats().total().rows_frozen > ROWS / 2


def test_without_accumulators_it_goes_on_and_says_so(tmp_path, store):
    model, optimizers, _ = theirs("rowwise_adagrad")
    train(model, optimizers, stream(60, seed=1))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    (mine, dense), tables = ours(store, "rowwise_adagrad")
    loaded = bring((mine, dense), tables, tmp_path / "model.safetensors", optimizers[0])
    assert loaded == dict.fromkeys(NAMES, (ROWS, False))
    wanted = train(model, optimizers, stream(60, seed=2))
    assert train(mine, [dense], stream(60, seed=2)) == pytest.approx(wanted, abs=0.05)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_fused_table_of_a_model_on_one_rank_is_saved_with_its_momentum(tmp_path, store):
    """DistributedModelParallel with FBGEMM's fused row-wise Adagrad."""
    import torch.distributed as dist
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology

    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        model = DLRM(EmbeddingBagCollection(configs(), device=torch.device("meta")), NUM_DENSE, [16, DIM], [16, 1])
        fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": RATE, "eps": 1e-8}
        sharders = [EmbeddingBagCollectionSharder(fused_params=fused)]
        plan = EmbeddingShardingPlanner(topology=Topology(world_size=1, compute_device="cpu")).plan(model, sharders)
        parallel = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)
        dense = torch.optim.Adagrad([p for n, p in parallel.named_parameters() if "embedding_bags" not in n], lr=RATE)
        train(parallel.module, [dense], stream(30, seed=1))
        tensors = tensors_of(parallel, parallel.fused_optimizer)
        save_file(tensors, tmp_path / "model.safetensors")
        assert tensors["user.momentum1"].shape == (ROWS,) and (tensors["user.momentum1"] > 0).any()
        (mine, optimizer), tables = ours(store, "rowwise_adagrad")
        assert bring((mine, optimizer), tables, tmp_path / "model.safetensors", dense)["user"] == (ROWS, True)
        wanted = train(parallel.module, [dense], stream(30, seed=2))
        assert train(mine, [optimizer], stream(30, seed=2)) == pytest.approx(wanted, abs=1e-5)
    finally:
        dist.destroy_process_group()


def cut_of(store: InprocStore, tables: FrostlineEmbeddingBagCollection, root: Path, step: int) -> Path:
    folder = root / f"cut-{step:012d}-{tables.identity.epoch}"
    store.begin_cut(tables.identity, step, str(folder))
    while not all(part.is_done for part in store.cut_progress(tables.identity)):
        time.sleep(0.005)
    return folder


@pytest.mark.parametrize("kind", ["rowwise_adagrad", "adagrad"])
def test_there_and_back_through_torchrec(tmp_path, store, kind: str):
    """Rows, some frozen, and accumulators: export, a collection and optimizer of TorchRec, import; then a step."""
    idle = PolicySpec(kind="idle", idle_steps=4, frozen_bits=8, control_fraction=0.0)
    (model, dense), tables = ours(store, kind, idle)
    train(model, [dense], stream(20, seed=3))
    assert store.stats().total().rows_frozen
    parts = read_parts(cut_of(store, tables, tmp_path, 20))
    export_torchrec(parts, dict.fromkeys(NAMES, ROWS), tmp_path / "out", with_state=True)
    wanted = rows_of(tables, torch.arange(ROWS))

    middle = EmbeddingBagCollection(tables=configs())
    optimizer = {"rowwise_adagrad": RowWiseAdagrad, "adagrad": torch.optim.Adagrad}[kind](middle.parameters(), lr=RATE)
    saved = load_file(tmp_path / "out")
    middle.load_state_dict({k: v for k, v in saved.items() if "embedding_bags" in k})
    for name, bag in middle.embedding_bags.items():
        total = optimizer.state[bag.weight]["sum"]
        total.copy_(saved[f"{name}.momentum1"].view_as(total))
    save_file(tensors_of(middle, optimizer), tmp_path / "back")
    with closing(InprocStore(memory_limit_bytes=128 << 20)) as other:
        _, back = ours(other, kind)
        back.load(tmp_path / "back")
        seen = torch.tensor([bool(row.any()) for row in wanted[0]])  # a row that never was reads as zeros here
        assert torch.allclose(rows_of(back, torch.arange(ROWS))[0][seen], wanted[0][seen], atol=1e-6)
        for sparse in (back, middle):
            sparse(next(stream(1, seed=4)).sparse).values().pow(2).sum().backward()
        back.step(RATE)
        optimizer.step()
        weights = torch.stack([middle.embedding_bags[name].weight.detach() for name in NAMES])
        assert torch.allclose(rows_of(back, torch.arange(ROWS)), weights, atol=1e-6)


# Files of one table, and none of it ----------------------------------------------------------------------------------


def rows_of(tables: FrostlineEmbeddingBagCollection, ids: torch.Tensor) -> torch.Tensor:
    """float32[2, n, D] of both tables, by look-up."""
    kjt = KeyedJaggedTensor([f"f_{name}" for name in NAMES], ids.repeat(2), lengths=torch.ones(2 * len(ids)).long())
    tables.eval()
    pooled = tables(kjt)
    tables.train()
    return torch.stack([pooled[f"f_{name}"] for name in NAMES]).detach()


@pytest.mark.parametrize("kind", ["safetensors", "parquet"])
def test_a_file_for_each_table_is_loaded_and_one_without_rows_too(tmp_path, store, kind):
    ids = np.arange(30) * 1_000_003 - 7
    weights = np.random.default_rng(0).normal(size=(30, DIM)).astype(np.float32)
    files = {name: tmp_path / name for name in NAMES}
    for name, n in (("user", 30), ("item", 0)):
        if kind == "safetensors":
            save_file({"row_ids": torch.from_numpy(ids[:n]), "weights": torch.from_numpy(weights[:n])}, files[name])
        else:
            vectors = pa.FixedSizeListArray.from_arrays(pa.array(weights[:n].reshape(-1)), DIM)
            pq.write_table(pa.table({"row_id": ids[:n], "vector": vectors}), files[name])
    _, tables = ours(store, "adagrad")
    assert tables.load(files, kind) == {"user": (30, False), "item": (0, False)}
    user, item = rows_of(tables, torch.from_numpy(ids))
    assert torch.equal(user, torch.from_numpy(weights)) and not item.any()
    assert list(tmp_path.iterdir()) == list(files.values()) or sorted(tmp_path.iterdir()) == sorted(files.values())


def test_a_cut_is_saved_and_restored_in_a_line_each(tmp_path, store):
    (model, dense), tables = ours(store, "adagrad")
    train(model, [dense], stream(5, seed=3))
    folder = tables.save(tmp_path / "cuts")
    assert folder == tmp_path / "cuts" / f"cut-000000000005-{tables.identity.epoch}"
    assert tables.save(tmp_path / "cuts") == folder  # nothing has changed since
    ids = torch.arange(ROWS)
    wanted = rows_of(tables, ids)
    train(model, [dense], stream(2, seed=4))
    assert not torch.equal(rows_of(tables, ids), wanted)
    tables.restore(folder)
    assert torch.equal(rows_of(tables, ids), wanted)
    model(*(lambda b: (b.dense, b.sparse))(next(stream(1, seed=5)))).sum().backward()
    assert tables.step(RATE).step == 6


def test_a_table_that_a_cut_lacks_begins_empty(tmp_path, store):
    (model, dense), tables = ours(store, "adagrad")
    train(model, [dense], stream(2, seed=3))
    folder = tables.save(tmp_path)
    tables.add_table(EmbeddingBagConfig(name="shop", embedding_dim=DIM, num_embeddings=9, feature_names=["f_shop"]))
    keys = [*(f"f_{name}" for name in NAMES), "f_shop"]
    tables(KeyedJaggedTensor(keys, torch.arange(3), lengths=torch.ones(3).long())).values().sum().backward()
    tables.step(RATE)
    with pytest.raises(InvalidInput, match="'shop' is not in the snapshot: name it among those that begin anew"):
        tables.restore(folder)
    tables.restore(folder, anew=["shop"])
    hot = {name: stats.rows_hot for name, stats in store.stats().tables.items()}
    assert hot["shop"] == 0 and hot["user"] > 0
    with closing(
        InprocStore(memory_limit_bytes=128 << 20)
    ) as new:  # where nothing has trained it, it need not be named
        again = FrostlineEmbeddingBagCollection(
            tables.embedding_bag_configs(), new, optimizer=OptimizerSpec(kind="adagrad")
        )
        again.restore(folder)
        assert {name: stats.rows_hot for name, stats in new.stats().tables.items()} == hot


def test_a_save_that_cannot_be_says_why_and_leaves_nothing(tmp_path, store):
    (model, dense), tables = ours(store, "adagrad")
    train(model, [dense], stream(2, seed=3))
    (tmp_path / "file").touch()
    with pytest.raises(StoreUnavailable, match=r"file/cut-0.*-1: .*Not a directory.*; free or repair"):
        tables.save(tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    full = {"cut.before_publish": failpoints.fail_with(errno.ENOSPC)}
    with failpoints.set_to(full), pytest.raises(StoreUnavailable, match=r"cut-0.*-1: shard 0: .*No space left.*; free"):
        tables.save(tmp_path / "cuts")
    assert not list((tmp_path / "cuts").glob("cut-*"))
    assert tables.save(tmp_path / "cuts").is_dir()  # begun anew
    tables(next(stream(1, seed=5)).sparse)
    with pytest.raises(NotReady, match="save: a step is open"):
        tables.save(tmp_path)


def test_what_does_not_fit_is_refused_and_changes_nothing(tmp_path, store):
    (model, dense), tables = ours(store, "adagrad")
    train(model, [dense], stream(2, seed=3))
    before = rows_of(tables, torch.arange(ROWS))
    save_file({"embedding_bags.user.weight": torch.ones(ROWS, DIM)}, tmp_path / "user")
    save_file({f"embedding_bags.{name}.weight": torch.ones(ROWS, 2 * DIM) for name in NAMES}, tmp_path / "wide")
    with pytest.raises(InvalidInput, match=r"no file has embedding_bags\.item\.weight"):
        tables.load(tmp_path / "user")
    with pytest.raises(InvalidInput, match="has dim 16, and must have 8"):
        tables.load(tmp_path / "wide")
    with pytest.raises(InvalidInput, match="a file for each table; give .* exactly 'user', 'item'"):
        tables.load({"user": tmp_path / "user"}, "safetensors")
    with pytest.raises(InvalidInput, match="torchrec is one file with all tables"):
        tables.load({"user": tmp_path / "user"})
    with pytest.raises(InvalidInput, match="is not the folder of a cut"):
        tables.restore(tmp_path)
    assert torch.equal(rows_of(tables, torch.arange(ROWS)), before)
    train(model, [dense], stream(1, seed=4))  # its epoch is not fenced
    tables(next(stream(1, seed=5)).sparse)
    with pytest.raises(NotReady, match="a step is open"):
        tables.load(tmp_path / "user")


def test_one_of_several_workers_cannot_load(store, tmp_path):
    who = Identity("j", store.begin_epoch("j", 2, "sync").epoch, 0)
    tables = FrostlineEmbeddingBagCollection(configs(), store, identity=who)
    for call in (tables.load, tables.restore):
        with pytest.raises(InvalidInput, match="was given an identity"):
            call(tmp_path)


def test_an_optimizer_whose_state_rows_cannot_have_is_refused():
    model, _ = dlrm(EmbeddingBagCollection(tables=configs()))
    with pytest.raises(InvalidInput, match="optimizer RMSprop is not one of Adagrad"):
        tensors_of(model, torch.optim.RMSprop(model.parameters()))
