"""Bearer tokens: files of them, and which role a call's metadata shows.

    # a server's file: a role and a token a line
    train  Zm9vYmFyYmF6cXV4cXV1eA
    serve  c2VydmluZ3NlcnZpbmdzZXJ2

A server keeps no token: only digests under a key of its own, drawn at its start. What is compared is a digest that
nobody outside can predict or choose, so neither the look-up by digest nor the comparison, which is in constant time,
tells anything about the tokens by how long it takes. No message shows a word of a file: it might be a token.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Literal, get_args

from embedding_server.errors import InvalidInput
from services.secret_files import read_file

Role = Literal["train", "serve", "admin"]
ROLES: tuple[Role, ...] = get_args(Role)

AUTHORIZATION = "authorization"
_SCHEME = "bearer "
#: RFC 6750's b64token; 16 characters at least, for a token is guessed by whoever can call
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]{16,512}={0,2}", re.ASCII)
_TOKEN_RULE = "16 to 512 letters, digits or . _ ~ + / -, then = or == at most; `openssl rand -hex 32` makes one"
_DIGEST_KEY = secrets.token_bytes(32)
_NO_DIGEST = bytes(32)


def _digest(token: str) -> bytes:
    return blake2b(token.encode("utf-8", "surrogateescape"), key=_DIGEST_KEY, digest_size=32).digest()


class TokenSet:
    """Roles by token. Immutable."""

    def __init__(self, roles: Iterable[tuple[Role, str]]) -> None:
        """roles: (role, token)."""
        self._known = {digest: (digest, role) for role, digest in ((role, _digest(token)) for role, token in roles)}

    def role_of(self, token: str) -> Role | None:
        digest = _digest(token)
        known, role = self._known.get(digest, (_NO_DIGEST, None))
        return role if hmac.compare_digest(digest, known) else None

    def __str__(self) -> str:
        counts = Counter(role for _, role in self._known.values())
        return ", ".join(f"{counts[role]} {role}" for role in ROLES if counts[role])


def bearer_token(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """The token of a call, None if it has none. Two are as good as a wrong one: a proxy may read the other one."""
    found = None
    for key, value in metadata:
        if key == AUTHORIZATION:
            text = value if isinstance(value, str) else ""
            found = "" if found is not None or text[: len(_SCHEME)].lower() != _SCHEME else text[len(_SCHEME) :]
    return found


def read_server_tokens(path: Path) -> TokenSet:
    """InvalidInput, naming the line, if the file is not one of roles and tokens."""
    found: dict[str, tuple[Role, int]] = {}
    for number, words in _lines(path):
        if len(words) != 2 or words[0] not in ROLES:
            raise InvalidInput(
                f"token file {path}, line {number}: must be a role ({', '.join(ROLES)}), a space and a token"
            )
        token = _checked_token(words[1], path, number)
        if token in found:
            raise InvalidInput(
                f"token file {path}, line {number}: has the token of line {found[token][1]}; each has one role"
            )
        found[token] = (words[0], number)
    if not found:
        raise InvalidInput(f"token file {path}: has no token, so nobody could call; a line is a role and a token")
    return TokenSet((role, token) for token, (role, _) in found.items())


def read_client_token(path: Path) -> str:
    """The one token of a client's file. InvalidInput if it has none, or several."""
    lines = list(_lines(path))
    if len(lines) != 1 or len(lines[0][1]) > 2:
        raise InvalidInput(
            f"token file {path}: has {len(lines)} lines; a client's has one, with its token or with a role, a space and"
            " the token"
        )
    number, words = lines[0]
    return _checked_token(words[-1], path, number)


def _lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """(number, words) of the lines that are neither empty nor comments."""
    data = read_file(path, "token file", is_secret=True)
    for number, line in enumerate(data.decode("ascii", "replace").splitlines(), 1):
        words = line.split()
        if words and not words[0].startswith("#"):
            yield number, words


def _checked_token(token: str, path: Path, number: int) -> str:
    if not _TOKEN.fullmatch(token):
        raise InvalidInput(f"token file {path}, line {number}: a token has {_TOKEN_RULE}")
    return token
