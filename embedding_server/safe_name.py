"""File names from any text: table names, job names."""

from __future__ import annotations

import hashlib
import re


def safe_name(text: str) -> str:
    """A file name for any text, different for different texts, that still tells people what it is."""
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8).hexdigest()
    return f"{re.sub(r'[^A-Za-z0-9_-]', '_', text)[:40]}-{digest}"
