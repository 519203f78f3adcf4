"""Files of tokens: what they may hold, who may read them, and that no message shows a word of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from embedding_server.errors import InvalidInput
from services.tokens import bearer_token, read_client_token, read_server_tokens
from tests.services.authority import write_secret

A, B, C = "a" * 16, "B0._~+/-" * 4 + "==", "c" * 512


def test_a_servers_file_gives_each_token_its_role(tmp_path: Path) -> None:
    text = f"# who may what\n\ntrain {A}\n  serve\t{B}  \r\nadmin {C}\n"
    tokens = read_server_tokens(write_secret(tmp_path / "tokens", text))
    assert [tokens.role_of(token) for token in (A, B, C)] == ["train", "serve", "admin"]
    for wrong in ("", A[:-1], A + "a", A.upper(), f" {A}", "ä" * 16, "\udcff" * 16, "x" * 100_000):
        assert tokens.role_of(wrong) is None
    assert str(tokens) == "1 train, 1 serve, 1 admin"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no token"),
        ("# nobody\n", "has no token"),
        (f"train {A}\n{A} serve\n", "line 2: must be a role"),
        (f"train {A}\n\nserve\n", "line 3: must be a role"),
        (f"reader {A}\n", "line 1: must be a role"),
        (f"train {A} {B}\n", "line 1: must be a role"),
        ("train 123456789012345\n", "line 1: a token has 16 to 512"),
        (f"train {C}c\n", "line 1: a token has 16 to 512"),
        ("train pass:word!pass:word!\n", "line 1: a token has 16 to 512"),
        ("train pässwörterpässwörter\n", "line 1: a token has 16 to 512"),
        (f"train {A}\nserve {A}\n", "line 2: has the token of line 1"),
    ],
)
def test_a_bad_file_of_a_server_is_refused_without_a_word_of_it(tmp_path: Path, text: str, message: str) -> None:
    path = write_secret(tmp_path / "tokens", text)
    with pytest.raises(InvalidInput, match=message) as refused:
        read_server_tokens(path)
    assert str(path) in str(refused.value)
    for word in text.split():
        assert len(word) < 15 or word not in str(refused.value)


def test_a_clients_file_has_one_token(tmp_path: Path) -> None:
    for text in (A, f"{A}\n", f"# mine\ntrain {A}\n"):
        assert read_client_token(write_secret(tmp_path / "token", text)) == A
    for text, message in (("", "has 0 lines"), (f"{A}\n{B}\n", "has 2 lines"), ("short", "line 1: a token has 16")):
        with pytest.raises(InvalidInput, match=message):
            read_client_token(write_secret(tmp_path / "token", text))


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602, 0o620, 0o666, 0o777])
def test_a_file_that_others_may_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = write_secret(tmp_path / "tokens", f"train {A}\n")
    path.chmod(mode)
    with pytest.raises(InvalidInput, match=f"its mode {mode:04o} lets others .*chmod 600"):
        read_server_tokens(path)


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o440, 0o640, 0o700])
def test_a_group_may_read(tmp_path: Path, mode: int) -> None:
    path = write_secret(tmp_path / "tokens", f"train {A}\n")
    path.chmod(mode)
    assert read_server_tokens(path).role_of(A) == "train"


def test_what_is_no_file_of_tokens_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"missing: cannot be read \(No such file"):
        read_server_tokens(tmp_path / "missing")
    with pytest.raises(InvalidInput, match=r"cannot be read \(Is a directory\)"):
        read_server_tokens(tmp_path)
    with pytest.raises(InvalidInput, match="is not a file"):
        read_server_tokens(Path("/dev/null"))
    with pytest.raises(InvalidInput, match="more than 1048576 bytes"):
        read_server_tokens(write_secret(tmp_path / "large", "#" * (1 << 20) + "\n"))


@pytest.mark.parametrize(
    ("metadata", "token"),
    [
        ((), None),
        ((("user-agent", "grpc"),), None),
        ((("authorization", f"Bearer {A}"),), A),
        ((("x", "y"), ("authorization", f"bearer {A}")), A),
        ((("authorization", f"Basic {A}"),), ""),
        ((("authorization", A),), ""),
        ((("authorization", ""),), ""),
        ((("authorization", f"Bearer {A}"), ("authorization", f"Bearer {A}")), ""),
        ((("authorization", f"Bearer {A}".encode()),), ""),
    ],
)
def test_the_token_of_a_call(metadata: tuple, token: str | None) -> None:
    assert bearer_token(metadata) == token
