"""A client names folders of snapshots; a shard writes and reads within its root alone, whatever the client says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from embedding_server.errors import InvalidInput
from services.snapshot_paths import MAX_FOLDER_CHARS, SnapshotPaths, is_loopback

CUT = "cut-000000000012-3"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root" / "job").mkdir(parents=True)
    return tmp_path / "root"


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("[::1]", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("[::]", False),
        ("10.0.0.7", False),
        ("shard-0.example", False),
        ("localhost.example", False),
        ("", False),
    ],
)
def test_hosts_that_only_this_machine_reaches(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_folders_of_cuts_within_the_root_are_taken_whether_they_exist_or_not(root: Path) -> None:
    paths = SnapshotPaths(root, "0.0.0.0")
    assert paths.checked("Restore", f"{root}/job/{CUT}") == root / "job" / CUT
    (root / "job" / CUT).mkdir()
    assert paths.checked("Restore", f"{root}/job/{CUT}") == root / "job" / CUT
    assert paths.checked("Restore", f"{root}/a/b/{CUT}") == root / "a" / "b" / CUT


def test_a_root_that_is_a_link_is_the_folder_it_leads_to(root: Path) -> None:
    link = root.parent / "link"
    link.symlink_to(root)
    for folder in (link, root):
        assert SnapshotPaths(link, "0.0.0.0").checked("Restore", f"{folder}/job/{CUT}") == root / "job" / CUT


@pytest.mark.parametrize(
    "folder",
    [
        "",
        CUT,
        f"job/{CUT}",
        f"./job/{CUT}",
        f"ROOT/job/../job/{CUT}",
        f"ROOT/./job/{CUT}",
        f"ROOT//job/{CUT}",
        f"ROOT/job/{CUT}/",
        f"/ROOT/job/{CUT}",
        f"file://ROOT/job/{CUT}",
        f"ROOT/job\0/{CUT}",
        f"~/job/{CUT}",
    ],
)
def test_paths_that_are_not_absolute_and_normalised_are_refused(root: Path, folder: str) -> None:
    folder = folder.replace("ROOT", str(root))
    for paths in (SnapshotPaths(root, "0.0.0.0"), SnapshotPaths(None, "127.0.0.1")):
        with pytest.raises(InvalidInput, match=r"^Restore: folder .* must be an absolute path"):
            paths.checked("Restore", folder)


@pytest.mark.parametrize(
    "name", ["job", "cut-12-3", "cut-000000000012", f"{CUT}.partial", f"{CUT}\n", "cut-00000000001\u0662-3", f"x{CUT}"]
)
def test_a_folder_that_is_not_named_as_a_cut_is_refused(root: Path, name: str) -> None:
    for paths in (SnapshotPaths(root, "0.0.0.0"), SnapshotPaths(None, "127.0.0.1")):
        with pytest.raises(InvalidInput, match="must end in cut-STEP-EPOCH"):
            paths.checked("Restore", f"{root}/job/{name}")


def test_what_lies_outside_the_root_is_refused(root: Path) -> None:
    paths = SnapshotPaths(root, "0.0.0.0")
    # objects/ of a cut right in the root would be a sibling of jobs; of one above it, outside
    for folder in (f"/{CUT}", f"/etc/{CUT}", f"{root.parent}/{CUT}", f"{root}-other/job/{CUT}", f"{root}/{CUT}"):
        with pytest.raises(InvalidInput, match=rf"does not lie within .*--snapshot-root.*{root}/JOB/{CUT}"):
            paths.checked("Restore", folder)


def test_links_are_resolved_before_the_root_is_looked_at(root: Path) -> None:
    outside = root.parent / "outside"
    (outside / CUT).mkdir(parents=True)
    (root / "way-out").symlink_to(outside)
    (root / "way-up").symlink_to("..")
    (root / "job" / CUT).symlink_to(outside / CUT)
    (root / "job" / "cut-000000000013-3").symlink_to(outside / CUT)
    (root / "around").symlink_to("around")
    paths = SnapshotPaths(root, "0.0.0.0")
    for folder in (f"way-out/{CUT}", f"way-up/outside/{CUT}"):
        with pytest.raises(InvalidInput, match="does not lie within"):
            paths.checked("Restore", f"{root}/{folder}")
    for folder in (f"job/{CUT}", "job/cut-000000000013-3"):
        with pytest.raises(InvalidInput, match="is a symbolic link"):
            paths.checked("Restore", f"{root}/{folder}")
    with pytest.raises(InvalidInput, match=r"cannot be looked at|does not lie within"):
        paths.checked("Restore", f"{root}/around/{CUT}")
    # the other way round: a link outside that leads in
    (outside / "in").symlink_to(root)
    assert paths.checked("Restore", f"{outside}/in/a/{CUT}") == root / "a" / CUT


def test_a_refusal_does_not_tell_where_links_lead(root: Path) -> None:
    (root / "way-out").symlink_to("/a-secret-place")
    with pytest.raises(InvalidInput) as refused:
        SnapshotPaths(root, "0.0.0.0").checked("Restore", f"{root}/way-out/{CUT}")
    assert "secret" not in str(refused.value)


def test_long_paths_are_refused_and_shown_in_part(root: Path) -> None:
    with pytest.raises(InvalidInput, match=f"more than {MAX_FOLDER_CHARS}") as refused:
        SnapshotPaths(root, "0.0.0.0").checked("Restore", f"{root}/{'a/' * 5000}{CUT}")
    assert len(str(refused.value)) < 400
    with pytest.raises(InvalidInput):
        SnapshotPaths(root, "0.0.0.0").checked("Restore", f"/{'a' * 500}/{CUT}")


def test_without_a_root_any_folder_on_loopback_and_none_beyond(root: Path) -> None:
    assert SnapshotPaths(None, "127.0.0.1").checked("Restore", f"/somewhere/{CUT}") == Path(f"/somewhere/{CUT}")
    for host in ("0.0.0.0", "10.0.0.7", "shard-0"):
        with pytest.raises(InvalidInput, match="was started without --snapshot-root"):
            SnapshotPaths(None, host).checked("Restore", f"{root}/job/{CUT}")


def test_the_root_must_be_a_folder(root: Path) -> None:
    (root / "file").write_text("")
    for bad in (root / "missing", root / "file"):
        with pytest.raises(InvalidInput, match=r"--snapshot-root .* is not a folder; make it"):
            SnapshotPaths(bad, "127.0.0.1")
    before = os.getcwd()
    os.chdir(root)
    try:
        assert SnapshotPaths(Path("job"), "0.0.0.0").checked("Restore", f"{root}/job/a/{CUT}")
    finally:
        os.chdir(before)
