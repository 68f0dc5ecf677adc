"""Secrets in text that is printed or kept: replaced by `***`."""

from __future__ import annotations

import re

HIDDEN = "***"
_SECRETS = re.compile(
    # Name and password, or a token, in a URL.
    r"(?<=://)[^\s/@\"'\\]+(?=@)"
    # Tokens that name their issuer.
    r"|\b(?:hf_|gh[opsu]_|github_pat_|glpat-|sk-|xox[abp]-|AKIA)[\w-]{12,}"
    # `token=...`, `--password ...`
    r"|(?<=token=)[^\s\"'\\&,;]{6,}|(?<=secret=)[^\s\"'\\&,;]{6,}|(?<=password=)[^\s\"'\\&,;]{6,}"
    r"|(?<=key=)[^\s\"'\\&,;]{6,}|(?<=--token )[^\s\"'\\]+|(?<=--password )[^\s\"'\\]+",
    re.IGNORECASE,
)


def without_secrets(text: str) -> str:
    """The text, with what looks like a password or a token hidden."""
    return _SECRETS.sub(HIDDEN, text)
