"""ServedModel: a snapshot as it is served: rows and, unless they alone are asked for, the model of the same version."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from embedding_server.errors import InvalidInput
from embedding_server.heap import release_free_heap
from embedding_server.lookup import Version
from embedding_server.served_snapshot import ServedSnapshot
from trainer.snapshots import chain_of, read_records

if TYPE_CHECKING:
    from trainer.scoring import ScoringModel

ROWS_ONLY = "this server has rows alone; start it without --rows-only"


@dataclass(frozen=True, slots=True)
class ServeWhat:
    """What is served of each snapshot."""

    rows_only: bool = False  # then neither torch nor the dense layers are loaded
    factories: Collection[str] = ()  # module:factory names that a snapshot's job may have as its model.kind


class ServedModel:
    """Thread safety: any thread; close once nobody reads."""

    def __init__(self, cut: Path, what: ServeWhat) -> None:
        """Rows are checked as they are first read, or by check_rows.

        SegmentCorrupt, naming the file, InvalidInput or OSError if it cannot be served.
        """
        if not cut.is_dir():
            raise InvalidInput(f"serve {cut}: it is no folder; name a snapshot, URI/JOB/cut-<step>-<epoch>")
        manifests = [manifest for _, manifest in chain_of(cut)]
        read_records(cut, manifests[0])  # shard.json of all parts are those that the manifest vouches for
        self.snapshot = ServedSnapshot(cut)
        self._model: ScoringModel | None = None
        self.no_model = ROWS_ONLY
        try:
            if not what.rows_only:
                self._load_model(cut, what)
        except BaseException:
            self.close()
            raise

    def _load_model(self, cut: Path, what: ServeWhat) -> None:
        from trainer.scoring import ScoringModel

        try:
            self._model, self.no_model = ScoringModel(cut, self.snapshot, what.factories), ""
        except InvalidInput as error:  # rows are served all the same
            self.no_model = str(error)

    @property
    def version(self) -> Version:
        return self.snapshot.snapshot_version

    @property
    def has_model(self) -> bool:
        return self._model is not None

    @property
    def model(self) -> ScoringModel:
        """InvalidInput, with the reason, if there is none."""
        if self._model is None:
            raise InvalidInput(f"Predict: {self.no_model}")
        return self._model

    def close(self) -> None:
        self._model = None
        self.snapshot.close()
        release_free_heap()
