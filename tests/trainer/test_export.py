"""What a snapshot's rows are as files: equal to look-ups bit for bit, and back again."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embedding_server.errors import InvalidInput, UnknownTable
from embedding_server.inproc import InprocStore
from embedding_server.kernels.cpu import initial_values
from embedding_server.optimizers import num_state_columns, table_seed
from embedding_server.snapshot_parts import read_parts
from embedding_server.snapshot_rows import TableRows
from embedding_server.spec import OptimizerSpec, PolicySpec
from embedding_server.store import FOUND, Identity
from tests.trainer.trained_snapshots import DIMS, EVERY_ID, JOB, SPECS, look_up, make_snapshot, route, train
from trainer.embedding import FrostlineEmbeddingBagCollection
from trainer.export import export_table, export_torchrec
from trainer.import_tables import Imported, ImportRequest, import_tables
from trainer.snapshot_list import list_jobs, verify

NAMES = [spec.name for spec in SPECS]
SORTED_IDS = np.sort(EVERY_ID)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, dict]:
    return make_snapshot(tmp_path_factory.mktemp("snapshots"))


@pytest.fixture(scope="module")
def dense_ids(tmp_path_factory) -> tuple[Path, dict]:
    """A snapshot whose row_ids are all in 0 to 900."""
    return make_snapshot(tmp_path_factory.mktemp("dense"), low=0)


def rows_in(found: dict, name: str) -> tuple[np.ndarray, np.ndarray]:
    """row_ids int64[n], rising, and weights of the rows that a look-up finds."""
    values, flags = found[name]
    is_row = (flags & FOUND) != 0
    return SORTED_IDS[is_row], values[is_row]


def test_the_snapshot_has_rows_of_every_kind(trained):
    parts = read_parts(trained[0])
    records = {table.spec.name: table for table in parts[0].record.tables}
    assert {spec.name for spec in SPECS if records[spec.name].segments} >= {"item", "tail", "half", "rare", "moments"}
    assert {segment.bits for table in records.values() for segment in table.segments} >= {4, 8, 16, 32}
    assert all(table.rows_hot for table in records.values())
    assert records["ranked"].rows_initial


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("is_parquet", [False, True])
def test_exported_rows_are_what_a_look_up_gives_bit_for_bit(trained, tmp_path, name: str, is_parquet: bool):
    cut, found = trained
    out = tmp_path / "out"
    exported = export_table(read_parts(cut), name, out, is_parquet=is_parquet, with_state=True)
    if is_parquet:
        table = pq.read_table(out)
        row_ids = table["row_id"].to_numpy()
        weights = np.stack(table["vector"].to_numpy(zero_copy_only=False)) if len(row_ids) else None
    else:
        tensors = load_file(out)
        row_ids, weights = tensors["row_ids"], tensors["weights"]
        kind = next(spec.optimizer.kind for spec in SPECS if spec.name == name)
        columns = num_state_columns(kind, DIMS[name])
        assert (tensors["state"].shape == (len(row_ids), columns)) if columns else ("state" not in tensors)
    order = np.argsort(row_ids)
    wanted_ids, wanted = rows_in(found, name)
    assert np.array_equal(row_ids[order], wanted_ids)
    assert weights[order].astype(np.float32).tobytes() == wanted.tobytes()
    assert exported.rows == {name: len(wanted_ids)} and exported.bytes == out.stat().st_size


def test_state_has_gained_for_rows_that_were_trained_alone(tmp_path):
    cut, _ = make_snapshot(tmp_path)
    with TableRows(read_parts(cut), "tail") as rows:
        chunks = list(rows.chunks())
    start = np.float32(rows.spec.optimizer.initial_accumulator)
    for chunk in chunks:
        assert (chunk.state >= start).all()
        odd = chunk.row_ids % 2 != 0
        assert (chunk.state[odd] == start).all()  # they were never trained
    assert any((chunk.state > start).any() for chunk in chunks)


def test_torchrec_has_rows_by_dense_id_and_initial_values_elsewhere(dense_ids, tmp_path):
    cut, found = dense_ids
    out = tmp_path / "out.safetensors"
    exported = export_torchrec(read_parts(cut), {"item": 1200, "tail": 950}, out)
    tensors = load_file(out)
    assert set(tensors) == {"embedding_bags.item.weight", "embedding_bags.tail.weight"}
    for name, n in (("item", 1200), ("tail", 950)):
        spec = next(spec for spec in SPECS if spec.name == name)
        wanted = initial_values(np.arange(n), table_seed(spec), spec.dim, spec.init_min, spec.init_max)
        row_ids, weights = rows_in(found, name)
        wanted[row_ids] = weights
        assert tensors[f"embedding_bags.{name}.weight"].tobytes() == wanted.tobytes()
        assert exported.rows[name] == len(row_ids) and exported.initial[name] == n - len(row_ids)
    assert exported.dropped == {"item": 0, "tail": 0}


def test_torchrec_refuses_row_ids_outside_with_their_number_unless_they_are_dropped(trained, tmp_path):
    cut, found = trained
    out = tmp_path / "out.safetensors"
    row_ids, weights = rows_in(found, "item")
    is_outside = (row_ids < 0) | (row_ids >= 100)
    with pytest.raises(InvalidInput, match=rf"'item': {is_outside.sum()} of {len(row_ids)} row_ids are not in 0 to 99"):
        export_torchrec(read_parts(cut), {"item": 100}, out)
    assert list(tmp_path.iterdir()) == []
    exported = export_torchrec(read_parts(cut), {"item": 100}, out, drop_outside=True)
    assert exported.dropped == {"item": int(is_outside.sum())}
    got = load_file(out)["embedding_bags.item.weight"]
    assert got[row_ids[~is_outside]].tobytes() == weights[~is_outside].tobytes()


def test_a_torchrec_collection_filled_from_the_export_gives_the_same_forward(dense_ids, tmp_path):
    cut, _ = dense_ids
    out = tmp_path / "ebc.safetensors"
    names = ["item", "tail", "user"]
    n = 901
    with closing(InprocStore(memory_limit_bytes=128 << 20)) as store:
        who = restored(store, cut)
        assert who.epoch > 0
        export_torchrec(read_parts(cut), dict.fromkeys(names, n), out)
        configs = [
            EmbeddingBagConfig(name=name, embedding_dim=DIMS[name], num_embeddings=n, feature_names=[f"f_{name}"])
            for name in names
        ]
        theirs = EmbeddingBagCollection(tables=configs)
        tensors = {name: torch.from_numpy(array) for name, array in load_file(out).items()}
        theirs.load_state_dict(tensors, strict=True)
        rng = np.random.default_rng(0)
        known = {name: rows_in(dense_ids[1], name)[0] for name in names}
        lengths = rng.integers(0, 5, 3 * 32)
        values = np.concatenate([
            rng.choice(known[name], lengths[i * 32 : (i + 1) * 32].sum()) for i, name in enumerate(names)
        ])  # fmt: skip
        kjt = KeyedJaggedTensor(
            [f"f_{name}" for name in names], torch.from_numpy(values), lengths=torch.from_numpy(lengths)
        )
        ours = {name: look_up(store)[name][0] for name in names}
        pooled = theirs(kjt)
        for i, name in enumerate(names):
            at = 0
            ids = values[lengths[: i * 32].sum() : lengths[: (i + 1) * 32].sum()]
            for row, length in enumerate(lengths[i * 32 : (i + 1) * 32]):
                wanted = ours[name][np.searchsorted(SORTED_IDS, ids[at : at + length])].sum(axis=0)
                got = pooled[f"f_{name}"][row].detach().numpy()
                assert np.allclose(got, wanted, atol=1e-6)
                at += length


def restored(store: InprocStore, cut: Path, specs=SPECS, job: str = JOB) -> Identity:
    store.create_tables(specs)
    who = Identity(job, store.begin_epoch(job, 1, "sync", 50, will_restore=True).epoch, 0)
    store.restore(who, str(cut))
    return who


# There and back -------------------------------------------------------------------------------------------------------


def import_of(files: list[Path], kind, uri: Path, names=(), optimizer: str = "rowwise_adagrad", **more) -> Imported:
    return import_tables(ImportRequest(files, kind, names, None, OptimizerSpec(kind=optimizer), uri, JOB, **more))


@pytest.mark.parametrize("spec", SPECS, ids=NAMES)
@pytest.mark.parametrize("kind", ["safetensors", "parquet"])
def test_rows_and_state_come_back_equal(trained, tmp_path, spec, kind: str):
    cut, found = trained
    first, second = tmp_path / "first", tmp_path / "second"
    export_table(read_parts(cut), spec.name, first, is_parquet=kind == "parquet", with_state=True)
    imported = import_of([first], kind, tmp_path, [spec.name], spec.optimizer.kind)
    back = Path(imported.path)
    assert verify(back).messages == []
    export_table(read_parts(back), spec.name, second, is_parquet=kind == "parquet", with_state=True)
    a, b = (_sorted(path, kind) for path in (first, second))
    assert [array.tobytes() for array in a] == [array.tobytes() for array in b]
    (job,) = list_jobs(tmp_path)
    (snapshot,) = job.snapshots
    assert (snapshot.status, snapshot.rows_hot, snapshot.rows_frozen) == ("complete", len(a[0]), 0)
    with closing(InprocStore(memory_limit_bytes=128 << 20)) as store:
        restored(store, back, [spec.model_copy(update={"policy": spec.policy.model_copy(update={"hot_bits": 32})})])
        row_ids, weights = rows_in(found, spec.name)
        routed = route(store, row_ids)
        got = store.lookup({spec.name: routed})[spec.name].values
        assert got[np.argsort(routed.row_ids)].tobytes() == weights.tobytes()


def _sorted(path: Path, kind: str) -> list[np.ndarray]:
    """row_ids, weights and, if there is some, state, in the order of row_ids."""
    if kind == "parquet":
        table = pq.read_table(path)
        flat = [table[name].combine_chunks().flatten().to_numpy() for name in table.column_names[1:]]
        arrays = [table["row_id"].to_numpy(), *(values.reshape(len(table), -1) for values in flat)]
    else:
        tensors = load_file(path)
        arrays = [tensors[name] for name in ("row_ids", "weights", "state") if name in tensors]
    order = np.argsort(arrays[0])
    return [array[order] for array in arrays]


@pytest.mark.parametrize("name", ["item", "tail", "user"])
def test_a_torchrec_state_dict_comes_back_with_its_optimizer_state(dense_ids, tmp_path, name: str):
    cut, _ = dense_ids
    spec = next(spec for spec in SPECS if spec.name == name)
    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    export_torchrec(read_parts(cut), {name: 901}, first, with_state=True)
    assert {"item": "item.momentum1", "tail": "tail.momentum1", "user": "user.exp_avg_sq"}[name] in load_file(first)
    imported = import_of([first], "torchrec", tmp_path, optimizer=spec.optimizer.kind)
    assert imported.rows == {name: 901} and imported.has_state == {name: True}
    export_torchrec(read_parts(Path(imported.path)), {name: 901}, second, with_state=True)
    a, b = load_file(first), load_file(second)
    assert a.keys() == b.keys() and all(a[key].tobytes() == b[key].tobytes() for key in a)


def test_a_model_of_torchrec_brings_its_tables_and_trains_on_here(tmp_path):
    """Two tables out of the state dict of a whole model; the first pull gives TorchRec's rows."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            configs = [
                EmbeddingBagConfig(name=name, embedding_dim=8, num_embeddings=40, feature_names=[f"f_{name}"])
                for name in ("a", "b")
            ]
            self.sparse = EmbeddingBagCollection(tables=configs)
            self.dense = torch.nn.Linear(16, 1)

    model = Model()
    save_torch(model.state_dict(), str(tmp_path / "model.safetensors"))
    imported = import_of([tmp_path / "model.safetensors"], "torchrec", tmp_path, optimizer="adagrad")
    assert imported.rows == {"a": 40, "b": 40} and imported.has_state == {"a": False, "b": False}
    kjt = KeyedJaggedTensor(["f_a", "f_b"], torch.tensor([1, 2, 3, 39, 0, 7]), lengths=torch.tensor([2, 1, 1, 2]))
    with closing(InprocStore(memory_limit_bytes=128 << 20)) as store:
        who = Identity(JOB, store.begin_epoch(JOB, 1, "sync", 50, will_restore=True).epoch, 0)
        ours = FrostlineEmbeddingBagCollection(
            tables=model.sparse.embedding_bag_configs(),
            store=store,
            identity=who,
            optimizer=OptimizerSpec(kind="adagrad"),
            policy=PolicySpec(kind="off"),
        )
        store.restore(who, imported.path)
        ours.eval()
        assert torch.allclose(ours(kjt).values(), model.sparse(kjt).values(), atol=1e-6)
        ours.train()
        optimizer = torch.optim.Adagrad(model.sparse.parameters(), lr=0.1, initial_accumulator_value=0.1, eps=1e-8)
        for _ in range(3):
            for sparse in (ours, model.sparse):
                sparse(kjt).values().pow(2).sum().backward()
            ours.step(0.1)
            optimizer.step()
            optimizer.zero_grad()
        ours.eval()
        assert torch.allclose(ours(kjt).values(), model.sparse(kjt).values(), atol=1e-5)


def test_training_goes_on_from_an_import(tmp_path):
    rng = np.random.default_rng(1)
    weights = rng.normal(size=(50, 8)).astype(np.float32)
    files = []
    for spec in SPECS:
        files.append(tmp_path / f"{spec.name}.safetensors")
        save_file({"row_ids": np.arange(50), "weights": np.tile(weights, 2)[:, : spec.dim].copy()}, files[-1])
    imported = import_of(files, "safetensors", tmp_path, NAMES, "adagrad")
    with closing(InprocStore(memory_limit_bytes=128 << 20)) as store:
        who = restored(store, Path(imported.path))
        assert all((flags & FOUND != 0).sum() == 50 for _, flags in look_up(store).values())
        train(store, who)
        assert not np.allclose(look_up(store)["user"][0][60:110], weights)


def test_what_is_wrong_is_said_and_leaves_no_file(trained, tmp_path):
    parts = read_parts(trained[0])
    with pytest.raises(UnknownTable, match="no table 'nobody'; it has 'user', 'item'"):
        export_table(parts, "nobody", tmp_path / "out", is_parquet=False, with_state=False)
    (tmp_path / "there").touch()
    for is_parquet in (False, True):
        with pytest.raises(InvalidInput, match="there exists; name another file"):
            export_table(parts, "item", tmp_path / "there", is_parquet=is_parquet, with_state=False)
        with pytest.raises(InvalidInput, match="there is no folder"):
            export_table(parts, "item", tmp_path / "no" / "out", is_parquet=is_parquet, with_state=False)
    with pytest.raises(InvalidInput, match="TorchRec has no optimizer ftrl"):
        export_torchrec(parts, {"half": 10}, tmp_path / "out", with_state=True, drop_outside=True)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
