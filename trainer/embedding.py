"""The drop-in collections: TorchRec's interfaces on top of an EmbeddingStore.

    store = InprocStore()                                                  # or a RemoteStore
    ebc = FrostlineEmbeddingBagCollection(tables=configs, store=store)     # instead of EmbeddingBagCollection
    ...
    loss.backward(); optimizer.step(); ebc.step(learning_rate)

They take TorchRec's configs and KeyedJaggedTensor and give its KeyedTensor (a dict of JaggedTensor), with sum and mean
pooling, weighted bags (a weighted mean is sum(w x) / L, as in FBGEMM), empty bags (zeros) and shared tables. Rows are
not parameters of the module: they live in the store, state_dict() is empty, DDP has nothing to synchronise, and any
int64 is a row_id.

Between two steps rows may be deleted for good (delete_rows), and tables and features come and go (add_table,
drop_table, add_feature), by every worker alike; the next batches have the keys of the new features.

A forward in train() mode with gradients enabled is a step: it pulls, which counts as a visit, and one .step() must
follow. Any other forward (eval(), no_grad()) is a look-up, which changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypedDict, Unpack

import numpy as np
import torch
from torch.autograd.function import once_differentiable
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
    get_embedding_names_by_table,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from embedding_server.errors import InvalidInput, NotReady
from embedding_server.spec import OptimizerSpec, PolicySpec, TableSpec
from embedding_server.store import EmbeddingStore, Erased, Identity, Moves, PushAck, UpdateMode
from trainer import kernels
from trainer.advance import reselect, usual_steps_between
from trainer.interchange import FileFormat
from trainer.lookup_plan import LookupPlan
from trainer.lookups import Lookups, Table
from trainer.table_changes import RowIds, TableChanges, check_features
from trainer.table_configs import specs_of_configs
from trainer.training_steps import OpenStep, StepGradients, TrainingSteps
from trainer.warm_start import Files, import_files, restore_rows, save_rows

_MAX_THREADS = 4  # pooling is bound by memory bandwidth beyond


class CollectionOptions(TypedDict, total=False):
    """What both collections take by keyword, beside tables and store."""

    learning_rate: float  # of .step(); 0.01
    optimizer: OptimizerSpec  # of every table
    policy: PolicySpec  # of every table
    seed: int  # of initial values; 0
    specs: Mapping[str, TableSpec]  # whole specs of single tables, by name
    job: str  # under which the store counts steps ("default"); two collections on one store need two
    mode: UpdateMode  # of the epoch that is begun when no identity is given; "sync"
    identity: Identity  # this worker, after rank 0 called begin_epoch; without it an epoch of one worker is begun
    last_step: int  # with identity: what begin_epoch said; 0
    #: steps between re-selections, which .step() makes; 0: none. By default half the shortest idle_steps, and none with
    #: `identity`, for then other workers must wait for it
    reselect_every: int
    num_threads: int  # for dedup, pooling and gradients; torch's number, at most 4
    device: torch.device | str  # of the output; rows are pooled on the CPU


class _PoolRows(torch.autograd.Function):
    """All tables at once: (anchor, weights) -> float32 output. Gradients of rows go to the open step, not to autograd.

    The anchor is an empty leaf made for this forward, so that backward runs although no input needs a gradient; it is
    no parameter of the module, so DDP does not wait for it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor | None,
        weights: torch.Tensor | None,
        lookups: Lookups,
        opened: OpenStep | None,
    ) -> torch.Tensor:
        ctx.lookups, ctx.opened = lookups, opened
        rows = lookups.num_samples if lookups.plan.is_pooled else lookups.num_lookups
        return torch.from_numpy(lookups.pool()).view(rows, lookups.pitch)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_gradient: torch.Tensor) -> tuple[None, torch.Tensor | None, None, None]:
        gradient = output_gradient.detach().contiguous().numpy().reshape(-1)
        if ctx.opened is not None:
            ctx.opened.receive(gradient)
        of_weights = torch.from_numpy(ctx.lookups.weight_gradients(gradient)) if ctx.needs_input_grad[1] else None
        return None, of_weights, None, None


class _Collection(torch.nn.Module):
    """What both collections share: tables in the store, and one worker's steps."""

    def __init__(
        self,
        configs: Sequence[BaseEmbeddingConfig],
        store: EmbeddingStore,
        is_weighted: bool,
        options: CollectionOptions,
    ) -> None:
        super().__init__()
        self.learning_rate = options.get("learning_rate", 0.01)
        self._device = torch.device(options.get("device", "cpu"))
        self._options = options
        specs = self._specs_of(configs, options.get("specs"))
        store.create_tables(specs)
        self._specs = {spec.name: spec for spec in specs}
        identity, last_step = options.get("identity"), options.get("last_step", 0)
        self._mode: UpdateMode | None = options.get("mode", "sync") if identity is None else None
        self._reselect_every = self._usual_steps_between()
        if identity is None:
            job = options.get("job", "default")
            info = store.begin_epoch(job, 1, self._mode or "sync")
            identity, last_step = Identity(job, info.epoch, 0), info.last_step
        self._store, self._is_weighted = store, is_weighted
        self._lay_out(configs)
        self._plan = self._new_plan()
        self._begin(identity, last_step)
        self._last_lookups: Lookups | None = None

    def _check_config(self, config: BaseEmbeddingConfig) -> None:
        """InvalidInput if a collection of this kind cannot take it."""
        raise NotImplementedError

    def _name_outputs(self) -> None:
        """Notes what outputs there are, by self._configs."""
        raise NotImplementedError

    def _lay_out(self, configs: Sequence[BaseEmbeddingConfig]) -> None:
        for config in configs:
            _feature_names(config)
        self._configs: list[Any] = list(configs)
        self._name_outputs()

    def _specs_of(
        self, configs: Sequence[BaseEmbeddingConfig], specs: Mapping[str, TableSpec] | None
    ) -> list[TableSpec]:
        for config in configs:
            self._check_config(config)
        optimizer, policy = self._options.get("optimizer", OptimizerSpec()), self._options.get("policy", PolicySpec())
        return specs_of_configs(configs, optimizer, policy, self._options.get("seed", 0), specs)

    def _new_plan(self) -> LookupPlan:
        num_threads = self._options.get("num_threads", min(torch.get_num_threads(), _MAX_THREADS))
        is_pooled = isinstance(self, EmbeddingBagCollectionInterface)
        tables = [
            Table(c.name, c.embedding_dim, c.feature_names, is_pooled and c.pooling == PoolingType.MEAN)
            for c in self._configs
        ]
        return LookupPlan(tables, self._store, is_pooled, self._is_weighted, num_threads)

    def _decaying(self) -> dict[str, int]:
        """Dim of each table with weight decay."""
        return {name: spec.dim for name, spec in self._specs.items() if spec.optimizer.weight_decay}

    def _usual_steps_between(self) -> int:
        usual = usual_steps_between(self._specs.values()) if self._options.get("identity") is None else None
        return _checked_steps(self._options.get("reselect_every", usual or 0))

    def _begin(self, who: Identity, last_step: int) -> None:
        self._steps = TrainingSteps(self._store, self._plan, who, last_step, self._decaying())
        self._changes = TableChanges(self._store, self._steps)
        self._reselected_step = last_step

    @property
    def device(self) -> torch.device:
        """Where the output is; rows are pooled on the CPU."""
        return self._device

    @property
    def identity(self) -> Identity:
        return self._steps.who

    def announce(self, features: KeyedJaggedTensor) -> None:
        """A hint that `features` will be pulled soon: shards read its frozen rows from disk beside what follows.

        For a tail larger than the shards' memory, one step or more ahead of the batch's prefetch or forward, which must
        get the same object, unchanged. Any thread. It counts nothing, belongs to no step and never raises; a batch that
        is then not pulled has changed nothing.
        """
        self._steps.announce(features)

    def prefetch(self, features: KeyedJaggedTensor) -> None:
        """Pulls the rows of the next training forward, which must get the same object. One thread at a time."""
        self._steps.prefetch(features)

    def step(self, learning_rate: float | None = None) -> PushAck:
        """Pushes the gradients of the oldest training forward that has not been pushed; nothing if it had no backward.

        Every `reselect_every` steps it re-selects after that, or as soon as no step is prefetched.
        Errors: NotReady without such a forward; the store's. After an error the step is still open.
        """
        ack = self._steps.step(self.learning_rate if learning_rate is None else learning_rate)
        is_due = self._reselect_every and ack.step - self._reselected_step >= self._reselect_every
        if is_due and self._steps.is_between_steps:
            self.reselect()
        return ack

    def reselect(self) -> dict[str, Moves]:
        """Freezes, thaws and forgets rows of all tables of the job, as their policies say; what moved, by table.

        Between two steps, by one worker while the others wait. NotReady if a step is open or prefetched.
        """
        step = self._steps.last_pulled_step
        moves = reselect(self._store, self._steps.who, step)
        self._reselected_step = step
        return moves

    def delete_rows(self, ids: Mapping[str, RowIds]) -> dict[str, Erased]:
        """Deletes row_ids for good, by table, as EmbeddingStore.delete_rows; what was there of them, by table.

        This and the next three: between two steps, by every worker with the same arguments. NotReady if a step is open
        or prefetched, or another worker went on without it; InvalidInput if they differ.
        """
        return self._changes.delete_rows(ids)

    def add_table(self, config: BaseEmbeddingConfig, spec: TableSpec | None = None) -> None:
        """Adds a table, of the collection's optimizer and policy or of a whole spec, behind the others.

        A table of its name and spec that the store has already is taken as it is; another spec is TableConflict.
        """
        if not isinstance(config, BaseEmbeddingConfig) or not isinstance(spec, TableSpec | None):
            what = config if not isinstance(config, BaseEmbeddingConfig) else spec
            raise InvalidInput(f"add_table takes a TorchRec config and perhaps a TableSpec, and got {what!r:.200}")
        if config.name in self._specs:
            raise InvalidInput(f"table {config.name!r} is in the collection already; give every table its own name")
        spec = self._specs_of([config], {spec.name: spec} if spec is not None else None)[0]
        _feature_names(config)
        self._changes.add_table(spec, config)
        self._change([*self._configs, config], {**self._specs, spec.name: spec})

    def drop_table(self, name: str) -> None:
        """Drops a table: its rows are gone, its features with it. One table stays."""
        left = [config for config in self._configs if config.name != name]
        if not isinstance(name, str) or name not in self._specs or not left:
            raise InvalidInput(
                f"table {name!r} cannot be dropped: the collection has {list(self._specs)}, and one table must stay"
            )
        self._changes.drop_table(name)
        self._change(left, {known: spec for known, spec in self._specs.items() if known != name})

    def add_feature(self, table: str, feature: str) -> None:
        """Another feature looks up rows of `table`: a row that two of them name in a step has one visit, and the sum of
        their gradients.

        Its output has the name that TorchRec would give it: `feature`, or `feature@table` if two tables have it.
        """
        configs = list(self._configs)
        at = next((k for k, config in enumerate(configs) if config.name == table), None)
        if at is None or feature in configs[at].feature_names:
            what = "is not in the collection" if at is None else f"has feature {feature!r} already"
            raise InvalidInput(f"table {table!r} {what}; the tables are {list(self._specs)}")
        check_features(table, [feature])
        self._changes.add_feature(table, feature)
        # a copy: the config is its owner's
        configs[at] = replace(configs[at], feature_names=[*configs[at].feature_names, feature])
        self._change(configs, self._specs)

    def _change(self, configs: Sequence[BaseEmbeddingConfig], specs: dict[str, TableSpec]) -> None:
        self._specs = specs
        self._lay_out(configs)
        self._plan = self._new_plan()
        self._steps.use(self._plan, self._decaying())
        self._reselect_every = self._usual_steps_between()

    def load(
        self, files: Files, kind: FileFormat = "torchrec", folder: str | Path | None = None
    ) -> dict[str, tuple[int, bool]]:
        """Replaces all rows by those of files (interchange.py), all hot: (rows, with their optimizer state) by table.

        files: of torchrec one; of safetensors and parquet {table: file}. folder: where they lie meanwhile, which shards
        on other machines must see; None: that of temporary files. Between two steps, and only of a collection that was
        given no identity, for it begins an epoch. InvalidInput, naming file and rule: nothing was changed if it is a
        file's fault. Rows that come without state begin with the optimizer's initial one.
        """
        self._check_alone("load")
        with TemporaryDirectory(prefix="frostline-load-", dir=folder) as temporary:
            imported = import_files(list(self._specs.values()), files, kind, Path(temporary))
            self.restore(imported.path)
        return {name: (rows, imported.has_state[name]) for name, rows in imported.rows.items()}

    def save(self, folder: str | Path) -> Path:
        """Writes all rows as a cut in `folder`, which all shards must see, and returns the cut when it is whole.

        Between two steps, by one worker while the others wait. Dense layers are the caller's. NotReady if a step is
        open or prefetched; StoreUnavailable, with why, if a shard cannot write it: nothing of it is left then.
        """
        self._check_between_steps("save")
        return save_rows(self._store, self._steps.who, self._steps.last_pulled_step, Path(folder))

    def restore(self, cut: str | Path, anew: Collection[str] = ()) -> None:
        """Replaces all rows by those of a cut, at whose step the collection then is; dense layers are the caller's.

        anew: tables that have been trained here, which the cut lacks, and which begin empty.
        Between two steps, and only of a collection that was given no identity, for it begins an epoch. InvalidInput,
        SegmentCorrupt: the tables are empty then.
        """
        self._check_alone("restore")
        assert self._mode is not None
        self._begin(*restore_rows(self._store, self.identity.job, self._mode, Path(cut), anew))

    def _check_alone(self, what: str) -> None:
        if self._mode is None:
            raise InvalidInput(
                f"{what} begins an epoch, and this collection was given an identity of one; have one worker call"
                " begin_epoch(will_restore=True) and store.restore before the collections are made"
            )
        self._check_between_steps(what)

    def _check_between_steps(self, what: str) -> None:
        if not self._steps.is_between_steps:
            raise NotReady(f"{what}: a step is open or prefetched; call .step() first")

    def take_gradients(self, learning_rate: float | None = None) -> StepGradients:
        """step() in two halves, for a loop that pushes in the background: take, then `push` from any thread."""
        return self._steps.take_gradients(self.learning_rate if learning_rate is None else learning_rate)

    def push(self, gradients: StepGradients) -> PushAck:
        return self._steps.push(gradients)

    def take_lookups(self) -> Lookups | None:
        """The look-ups of the last training forward, once; its arrays are used again after the step's push."""
        lookups, self._last_lookups = self._last_lookups, None
        return lookups

    def _rows_of(self, features: KeyedJaggedTensor) -> tuple[torch.Tensor, Lookups]:
        """(output float32 [B, sum of dims] or [N, D], the look-ups it came from)."""
        is_step = self.training and torch.is_grad_enabled()
        opened = self._steps.begin(features) if is_step else None
        lookups = opened.lookups if opened else self._steps.look_up(features)
        if opened:
            self._last_lookups = lookups
        anchor = torch.empty(0, requires_grad=True) if is_step else None
        weights = features.weights() if self._plan.is_weighted else None
        out: torch.Tensor = _PoolRows.apply(anchor, weights, lookups, opened)
        return out.to(self._device), lookups


def _checked_steps(steps: int) -> int:
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise InvalidInput(f"reselect_every={steps!r} must be a number of steps, or 0 for no re-selection of its own")
    return steps


class FrostlineEmbeddingBagCollection(_Collection, EmbeddingBagCollectionInterface):
    """Pooled embeddings: KeyedJaggedTensor -> KeyedTensor float32 [B, sum of dims], tables and features in order.

    tables: TorchRec's configs, unchanged; num_embeddings only sets the default initial range. init_fn is refused.
    """

    def __init__(
        self,
        tables: list[EmbeddingBagConfig],
        store: EmbeddingStore,
        is_weighted: bool = False,
        **options: Unpack[CollectionOptions],
    ) -> None:
        super().__init__(tables, store, is_weighted, options)

    def _check_config(self, config: BaseEmbeddingConfig) -> None:
        pooling = getattr(config, "pooling", None)
        if pooling not in (PoolingType.SUM, PoolingType.MEAN):
            raise InvalidInput(f"table {config.name!r}: pooling={pooling} must be SUM or MEAN for bags")

    def _name_outputs(self) -> None:
        self._dims = [c.embedding_dim for c in self._configs for _ in c.feature_names]
        self._embedding_names = [name for names in get_embedding_names_by_table(self._configs) for name in names]

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        out, _ = self._rows_of(features)
        return KeyedTensor(keys=self._embedding_names, length_per_key=self._dims, values=out)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return self._configs

    def is_weighted(self) -> bool:
        return self._is_weighted


class FrostlineEmbeddingCollection(_Collection, EmbeddingCollectionInterface):
    """Sequence embeddings: KeyedJaggedTensor -> {name: JaggedTensor float32 [values of the feature, D]}.

    All tables have the same dim, as in TorchRec; need_indices puts the row_ids into the JaggedTensors' weights.
    """

    def __init__(
        self,
        tables: list[EmbeddingConfig],
        store: EmbeddingStore,
        need_indices: bool = False,
        **options: Unpack[CollectionOptions],
    ) -> None:
        if not tables:
            raise InvalidInput("a collection needs at least one table")
        self._dim = tables[0].embedding_dim
        super().__init__(tables, store, False, options)
        self._need_indices = need_indices

    def _check_config(self, config: BaseEmbeddingConfig) -> None:
        if config.embedding_dim != self._dim:
            dims = sorted({self._dim, config.embedding_dim})
            raise InvalidInput(f"the tables have dims {dims}; a sequence collection has tables of one dim")

    def _name_outputs(self) -> None:
        self._names_by_table = get_embedding_names_by_table(self._configs)
        self._embedding_names = [name for names in self._names_by_table for name in names]

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        out, lookups = self._rows_of(features)
        num_values = np.diff(np.append(lookups.slots[:, kernels.FIRST_LOOKUP], lookups.num_lookups)).tolist()
        by_key = features.to_dict()
        result = {}
        for name, (_, feature), values in zip(
            self._embedding_names, self._plan.slot_names, out.split(num_values), strict=True
        ):
            of_key = by_key[feature]
            indices = of_key.values() if self._need_indices else None
            result[name] = JaggedTensor(values=values, lengths=of_key.lengths(), weights=indices)
        return result

    def embedding_configs(self) -> list[EmbeddingConfig]:
        return self._configs

    def need_indices(self) -> bool:
        return self._need_indices

    def embedding_dim(self) -> int:
        return int(self._plan.dims[0])

    def embedding_names_by_table(self) -> list[list[str]]:
        return self._names_by_table


def _feature_names(config: EmbeddingBagConfig | EmbeddingConfig) -> list[str]:
    """A config without features has one named as the table; as in TorchRec, the config then says so."""
    if not config.feature_names:
        config.feature_names = [config.name]
    check_features(config.name, config.feature_names)
    return config.feature_names
