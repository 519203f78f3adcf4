from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks.harness import ROOT
from benchmarks.quality.__main__ import report
from benchmarks.quality.acceptance import check, frontier_at
from benchmarks.quality.auc import Interval, auc_of, delong, over_seeds
from benchmarks.quality.cases import full_cases, smoke_cases
from benchmarks.quality.comparison import Compared, compare
from benchmarks.quality.contestants import CONTESTANTS, OPTIMIZERS
from benchmarks.quality.results import Results, digest_of
from benchmarks.quality.rivals import QuantisedStore, rival_bytes, round_rows
from benchmarks.quality.runner import run_cases
from benchmarks.quality.samples import MOVIELENS, STREAMS, MovieLens, open_data
from benchmarks.quality.stream import TEST_DURATION, PlantedStream, StreamSpec
from benchmarks.quality.training import Case, run_case
from embedding_server.spec import PolicySpec, TableSpec
from embedding_server.store import Identity, RoutedIds, TableGradients, TableStats
from trainer.metrics import auc

SPEC = StreamSpec("tiny", num_train=20_000, num_test=10_000, cardinalities=(5_000, 300, 40))


# streams ----------------------------------------------------------------------------------------------------------


def test_samples_depend_on_their_number_alone() -> None:
    stream = PlantedStream(SPEC, seed=3)
    whole = stream.train(0, 1_000)
    part = PlantedStream(SPEC, seed=3).train(400, 700)
    np.testing.assert_array_equal(part.row_ids, whole.row_ids[:, 400:700])
    np.testing.assert_array_equal(part.labels, whole.labels[400:700])
    np.testing.assert_array_equal(part.logits, whole.logits[400:700])
    assert (stream.test(0, 300).row_ids != whole.row_ids[:, :300]).any()
    assert (PlantedStream(SPEC, seed=4).train(0, 300).row_ids != whole.row_ids[:, :300]).all(axis=1).any()
    assert stream.train(19_990, 30_000).labels.size == 10


def test_ranks_are_zipf() -> None:
    spec = replace(SPEC, cardinalities=(1_000,), turnover=0.0, num_train=200_000, exponent=1.2)
    counts = np.sort(np.unique(PlantedStream(spec, 0).train(0, 200_000).row_ids, return_counts=True)[1])[::-1]
    edges = np.arange(1, 12, dtype=np.float64)
    top = 1_001.0**-0.2 - 1.0
    expected = (edges[1:] ** -0.2 - edges[:-1] ** -0.2) / top * 200_000
    np.testing.assert_allclose(counts[:10], expected, rtol=0.05)


def test_labels_follow_the_truth_and_ids_their_effect() -> None:
    spec = replace(SPEC, num_train=200_000)
    samples = PlantedStream(spec, 1).train(0, 200_000)
    probability = 1.0 / (1.0 + np.exp(-samples.logits))
    for low, high in ((0.0, 0.25), (0.25, 0.4), (0.4, 1.0)):
        inside = (probability >= low) & (probability < high)
        error = 4.0 * math.sqrt(0.25 / inside.sum())
        assert samples.labels[inside].mean() == pytest.approx(probability[inside].mean(), abs=error)
    spread = samples.logits.std()
    effects = math.sqrt(3) * spec.effect_std  # three fields; the pair adds a little, Zipf heads take away
    assert 0.6 * effects < spread < 1.5 * effects


def test_new_ids_arrive_and_effects_drift() -> None:
    still = replace(SPEC, cardinalities=(200,), pair_std=0.0, drift=0.0, turnover=0.0)
    early, late = (PlantedStream(still, 0).train(first, first + 2_000) for first in (0, 18_000))
    of_early = dict(zip(early.row_ids[0].tolist(), early.logits.tolist(), strict=True))
    both = [row_id for row_id in late.row_ids[0].tolist() if row_id in of_early]
    of_late = dict(zip(late.row_ids[0].tolist(), late.logits.tolist(), strict=True))
    assert len(both) > 1_500
    assert all(of_early[row_id] == of_late[row_id] for row_id in both)

    drifting = PlantedStream(replace(still, drift=1.0), 0)
    effects = [
        dict(zip(s.row_ids[0].tolist(), (s.logits - still.bias).tolist(), strict=True))
        for s in (drifting.train(0, 2_000), drifting.train(18_000, 20_000))
    ]
    shared = sorted(effects[0].keys() & effects[1].keys())
    then, now = (np.array([of_time[row_id] for row_id in shared]) for of_time in effects)
    assert np.corrcoef(then, now)[0, 1] == pytest.approx(math.cos(0.9), abs=0.2)

    renewed = PlantedStream(replace(still, turnover=3.0, lasting_share=0.0), 0)
    first, last = (set(renewed.train(n, n + 1_000).row_ids[0].tolist()) for n in (0, 19_000))
    assert not first & last
    soon = set(renewed.test(0, 1_000).row_ids[0].tolist())
    assert len(soon & last) > 0.7 * len(last)
    assert TEST_DURATION < 0.05


def test_rare_ids_can_be_without_effect() -> None:
    spec = replace(SPEC, cardinalities=(5_000,), turnover=0.0, rare_visits=5.0)
    samples = PlantedStream(spec, 0).train(0, 20_000)
    row_ids, at, counts = np.unique(samples.row_ids[0], return_inverse=True, return_counts=True)
    is_mute = samples.logits == spec.bias
    assert is_mute[counts[at] == 1].mean() > 0.95
    assert not is_mute[counts[at] > 30].any()
    assert row_ids.size > 1_000


def test_every_stream_has_what_its_name_says() -> None:
    assert {"S1", "S0", "zipf-0.9", "zipf-1.2", "rare-mute"} == set(STREAMS)
    assert STREAMS["S1"].num_train >= 2_000_000 and STREAMS["S1"].num_test >= 1_000_000
    assert STREAMS["S1"].exponent == 1.05 and STREAMS["S1"].drift > 0.0 and STREAMS["S1"].turnover > 0.0

    def rare_share(name: str) -> float:
        batch = PlantedStream(STREAMS[name].scaled(0.01), 0).train(0, 1 << 30)
        counts = np.concatenate([np.unique(ids, return_counts=True)[1] for ids in batch.row_ids])
        return float((counts <= 2).mean())

    assert rare_share("S0") < 0.02
    assert rare_share("S1") > 0.5


def test_hottest_ids_are_the_most_frequent() -> None:
    data = open_data("S1", seed=0, batch_size=500, share=0.002)
    hottest = data.hottest_ids(0.05)
    assert hottest.keys() == data.large_tables
    counts: dict[int, int] = {}
    for batch in data.train_batches(0):
        for row_id in batch.sparse["field_0"].values().tolist():
            counts[row_id] = counts.get(row_id, 0) + 1
    chosen = set(hottest["field_0"].tolist())
    assert len(chosen) == round(0.05 * len(counts))
    assert min(counts[i] for i in chosen) >= max(n for i, n in counts.items() if i not in chosen)


def test_movielens_shuffles_each_pass_and_tests_on_what_comes_later() -> None:
    data = MovieLens(seed=0, batch_size=4_096)
    first, again, second = (
        np.concatenate([batch.labels.numpy() for batch in data.train_batches(data_pass)]) for data_pass in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, again)
    assert (first != second).any() and first.sum() == second.sum()
    assert -(-first.size // 4_096) == data.steps_per_pass
    assert data.large_tables <= data.schema.tables.keys()
    assert sum(batch.num_samples for batch in data.test_batches()) > 15_000
    assert data.oracle_logits() is None


# AUC and intervals ------------------------------------------------------------------------------------------------


def scored(n: int = 400, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    labels = (random.random(n) < 0.3).astype(np.uint8)
    signal = labels + random.normal(size=n)
    return labels, np.round(signal + random.normal(size=n), 1), np.round(signal + 0.5 * random.normal(size=n), 1)


def test_auc_is_the_trainers() -> None:
    labels, scores, _ = scored()
    assert auc_of(labels, scores) == pytest.approx(auc(labels, scores), abs=1e-12)
    assert math.isnan(auc_of(np.ones(3), np.arange(3)))


def test_delong_is_its_definition() -> None:
    labels, a, b = scored()
    positive, negative = np.flatnonzero(labels), np.flatnonzero(labels == 0)
    psi = [
        (s[positive][:, None] > s[negative][None]) + 0.5 * (s[positive][:, None] == s[negative][None]) for s in (a, b)
    ]
    difference = psi[0] - psi[1]
    variance = difference.mean(1).var(ddof=1) / positive.size + difference.mean(0).var(ddof=1) / negative.size
    interval = delong(labels, a, b)
    assert interval.mean == pytest.approx(100 * (auc_of(labels, a) - auc_of(labels, b)), abs=1e-9)
    assert interval.standard_error == pytest.approx(100 * math.sqrt(variance), rel=1e-9)
    assert interval.high - interval.mean == pytest.approx(1.96 * interval.standard_error)
    same = delong(labels, a, a)
    assert (same.mean, same.low, same.high) == (0.0, 0.0, 0.0)


def test_delong_covers_the_truth() -> None:
    """Two models of equal worth: the interval holds 0 in about 95% of draws."""
    inside = 0
    for seed in range(200):
        random = np.random.default_rng(seed)
        labels = (random.random(300) < 0.5).astype(np.uint8)
        a, b = (labels + random.normal(size=300) for _ in range(2))
        interval = delong(labels, a, b)
        inside += interval.low <= 0.0 <= interval.high
    assert 0.9 < inside / 200 < 0.99


def test_interval_over_seeds_is_students() -> None:
    interval = over_seeds([0.0, 1.0, 2.0, 3.0, 4.0])
    error = math.sqrt(2.5 / 5)
    assert (interval.mean, interval.standard_error, interval.num_seeds) == (2.0, pytest.approx(error), 5)
    assert interval.high == pytest.approx(2.0 + 2.776 * error)
    assert interval.is_inside(4.0) and not interval.is_inside(3.9)


# rivals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_is_unbiased_and_stays_on_the_grid(bits: int) -> None:
    random = np.random.default_rng(0)
    row = random.normal(size=64).astype(np.float32)
    rows = np.tile(row, (4_000, 1))
    round_rows(rows, np.arange(4_000, dtype=np.int64), bits, np.uint64(1))
    scale = (row.max() - row.min()) / (2**bits - 1)
    inner = (row > row.min() + 2 * scale) & (row < row.max() - 2 * scale)  # float16 scale and bias clip the ends
    np.testing.assert_allclose(rows.mean(axis=0)[inner], row[inner], atol=4 * scale / 2 / math.sqrt(4_000))
    assert np.abs(rows - row).max() <= scale * 1.01
    assert max(np.unique(rows[:, column]).size for column in np.flatnonzero(inner)) == 2
    assert np.unique(rows).size <= 2**bits


def test_rounding_constant_rows() -> None:
    rows = np.array([[0.5] * 4, [0.0] * 4], np.float32)
    round_rows(rows, np.arange(2, dtype=np.int64), 4, np.uint64(0))
    np.testing.assert_array_equal(rows, [[0.5] * 4, [0.0] * 4])


def test_quantised_store_rounds_what_it_updates_but_for_float_ids() -> None:
    ids = np.arange(40, dtype=np.int64)
    store = QuantisedStore(4, {"a": ids[:10]}, seed=0, memory_limit_bytes=1 << 26)
    store.create_tables([TableSpec(name=name, dim=8, policy=PolicySpec(kind="off")) for name in ("a", "b")])
    who = Identity("q", store.begin_epoch("q", 1, "sync").epoch, 0)
    routed = RoutedIds(ids, np.array([0, 40]))
    store.pull(who, 1, {"a": routed, "b": routed})
    gradient = np.random.default_rng(0).normal(size=(40, 8)).astype(np.float32)
    store.push(who, 1, {name: TableGradients(routed, gradient, 0.1) for name in ("a", "b")})
    rows = {name: r.values for name, r in store.lookup({"a": routed, "b": routed}).items()}
    steps = (rows["a"] - rows["a"].min(axis=1, keepdims=True)) * 15 / np.ptp(rows["a"], axis=1)[:, None]
    is_on_grid = np.abs(steps - np.round(steps)).max(axis=1) < 0.02
    assert is_on_grid[10:].all() and not is_on_grid[:10].any()
    on_b = (rows["b"] - rows["b"].min(axis=1, keepdims=True)) * 15 / np.ptp(rows["b"], axis=1)[:, None]
    assert (np.abs(on_b - np.round(on_b)).max(axis=1) > 0.02).all()
    stats = store.stats().tables["a"]
    assert rival_bytes(stats, 8, 1, 4, 10) == 30 * (4 + 4) + 10 * 32 + 40 * 4 + stats.bytes_index
    store.close()


def test_rival_bytes_of_eight_bits() -> None:
    assert rival_bytes(TableStats(rows_hot=100, bytes_index=1_500), 64, 1, 8, 0) == 100 * (72 + 4) + 1_500


# comparison and criteria ------------------------------------------------------------------------------------------


def figure(contestant: str, saved: float, mean: float, width: float = 0.01, **more: object) -> Compared:
    interval = Interval(mean, mean - width, mean + width, width / 2, "t", 5)
    made = Compared("S1", contestant, "rowwise_adagrad", 1, 0.7, 0.8, interval, saved_end=saved, saved_peak=saved)
    return replace(made, **more)  # type: ignore[arg-type]


def test_frontier_joins_points_and_is_level_beyond() -> None:
    points = [(0.5, -0.2), (0.0, 0.0), (0.7, -0.4)]
    assert frontier_at(points, 0.25) == pytest.approx(-0.1)
    assert frontier_at(points, 0.6) == pytest.approx(-0.3)
    assert frontier_at(points, 0.9) == pytest.approx(-0.4)


def test_criteria_hold_what_they_say() -> None:
    seeds = [0.01, -0.01, 0.0, 0.02, -0.02]
    compared = [
        figure("off", 0.0, 0.0),
        figure("min-count-2", 0.5, -0.1),
        figure("min-count-3", 0.6, -0.2),
        figure("min-count-5", 0.7, -0.3),
        figure("idle", 0.7, 0.0, by_seed=seeds),
        figure("compact", 0.8, -0.15),
        figure("compact", 0.9, 0.5, data_pass=2),
        figure("topk", 0.1, -0.25, gradient_rows_saved=0.2),
        figure("random", 0.1, -2.0, by_seed=[s - 2.0 + 0.1 * k for k, s in enumerate(seeds)]),
        figure("cold", 0.7, -0.01, by_seed=[s + 0.3 * (-1) ** k for k, s in enumerate(seeds)]),
        figure("idle-16", 0.67, 0.0),
        figure("idle", 0.7, 0.0, 0.2, stream="S0"),
    ]
    met = {criterion.name: criterion.is_met for criterion in check(compared)}
    assert len(met) == 10
    missed = [name for name, is_met in met.items() if not is_met]
    assert len(missed) == 3
    assert any("cold" in name for name in missed)
    assert any("idle-16" in name for name in missed)
    assert any("S0" in name for name in missed)


def test_criteria_without_their_cases_are_left_out() -> None:
    assert check([figure("off", 0.0, 0.0)]) == []


def test_a_study_runs_every_contestant_everywhere() -> None:
    cases = full_cases()
    assert len({case.key for case in cases}) == len(cases)
    for stream in (*STREAMS, MOVIELENS):
        assert {case.contestant for case in cases if case.stream == stream} == set(CONTESTANTS)
    for name in ("off", "idle", "compact", "topk", "random", "cold"):
        assert len([c for c in cases if (c.stream, c.contestant, c.optimizer) == ("S1", name, "rowwise_adagrad")]) == 5
    assert {(case.optimizer, case.contestant) for case in cases if case.optimizer != "rowwise_adagrad"} == {
        (optimizer, name) for optimizer in ("adagrad", "adam") for name in ("off", "idle")
    }


# a study ----------------------------------------------------------------------------------------------------------


def test_outcome_accounts_for_rows_and_bytes() -> None:
    outcome = run_case(Case("S1", "idle", share=0.004, batch_size=256, data_passes=2))
    first, second = outcome.passes
    assert first["rows_hot"] + first["rows_frozen"] == second["rows_hot"] + second["rows_frozen"] > 1_000
    assert first["rows_frozen"] > first["rows_hot"]
    assert first["bytes_end"] <= first["bytes_peak"] <= second["bytes_peak"]
    assert second["rows_pushed"] == 2 * first["rows_pushed"]
    assert second["moves_thawed"] > first["moves_thawed"] > 0
    assert outcome.labels.size == outcome.scores[0].size == STREAMS["S1"].scaled(0.004).num_test
    assert outcome.oracle_auc is not None and outcome.oracle_auc > first["auc"] > 0.5


@pytest.fixture
def say() -> list[str]:
    return []


def test_a_study_resumes_compares_and_reports(tmp_path: Path, say: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    cases = smoke_cases(("off", "idle", "4-bit-hot"), share=0.004)
    results = Results(tmp_path / "work")
    run_cases(results, cases[:2], 1, say.append)
    run_cases(Results(tmp_path / "work"), cases, 1, say.append)
    assert say.count("3 cases, 1 to run in 1 processes") == 1

    results = Results(tmp_path / "work")
    compared = {(c.contestant, c.data_pass): c for c in compare(results, cases)}
    assert compared.keys() == {("off", 1), ("off", 2), ("idle", 1), ("idle", 2), ("4-bit-hot", 1)}
    assert compared["off", 1].difference.mean == 0.0 == compared["off", 1].saved_end
    idle = compared["idle", 1]
    assert idle.saved_end > 0.3 and idle.saved_peak > 0.3 and idle.gradient_rows_saved == 0.0
    assert abs(idle.difference.mean) < 0.5 and idle.difference.kind == "delong"
    assert compared["4-bit-hot", 1].saved_end > 0.6

    report("quality-test", results, cases, tmp_path / "out", say.append)
    document = json.loads((tmp_path / "out" / "quality-test.json").read_text())
    assert len(document["compared"]) == len(compared)
    assert document["config"]["streams"]["S1"]["num_train"] == STREAMS["S1"].scaled(0.004).num_train
    assert any("idle" in line and "%" in line for line in say)
    image = Image.open(tmp_path / "out" / "quality-test.png")
    assert image.format == "PNG" and len(image.getcolors(1 << 20) or []) > 3

    faster = replace(OPTIMIZERS["rowwise_adagrad"], learning_rate=0.5)
    monkeypatch.setitem(OPTIMIZERS, "rowwise_adagrad", faster)
    assert Results(tmp_path / "work").of(cases[0]) is None


def test_cases_run_side_by_side_in_processes(tmp_path: Path) -> None:
    """From a script, because what a spawned process may import depends on how the study was started."""
    script = "from benchmarks.quality.cases import smoke_cases; from benchmarks.quality.results import Results; "
    script += "from benchmarks.quality.runner import run_cases; from pathlib import Path; import sys; "
    script += "run_cases(Results(Path(sys.argv[1])), smoke_cases(('off', 'idle'), share=0.004), 2, print)"
    (tmp_path / "__main__.py").write_text(f"if __name__ == '__main__':\n    {script}\n")
    command = [sys.executable, str(tmp_path), str(tmp_path / "work")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert "failed" not in done.stdout and done.returncode == 0, done.stdout + done.stderr
    results = Results(tmp_path / "work")
    assert all(results.of(case) is not None for case in smoke_cases(("off", "idle"), share=0.004))


def test_a_line_cut_short_is_run_again(tmp_path: Path) -> None:
    case = Case("S1", "off", share=0.01)
    results = Results(tmp_path)
    results.add({"key": case.key, "digest": digest_of(case), "passes": []})
    with (tmp_path / "cases.jsonl").open("a") as file:
        file.write('{"key": "S1-idle-seed0", "dig')
    assert Results(tmp_path).of(case) is not None
    assert Results(tmp_path).of(replace(case, contestant="idle")) is None
    assert Results(tmp_path).of(replace(case, share=0.02)) is None
