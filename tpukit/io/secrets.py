"""Secrets in text that is printed or kept: replaced by `[left out]`."""

import re

HIDDEN = "[left out]"
_NAMES = "token|secret|passw(?:or)?d|passphrase"
_SECRETS = re.compile(
    # Name and password, or a token, in a URL.
    r"(?:(?<=://)[^\s/\"'\\]+(?=@)"
    # Tokens that name their issuer; `hf_sentiment_analysis` is a folder.
    r"|\b(?:hf_[a-z0-9]{30,}|hf_(?=[a-z0-9]*\d|[a-z0-9]{16})[a-z0-9]{8,}(?!\w)|(?:gh[opsu]_|github_pat_|glpat-|xox[abp]-|AKIA|AIza)[\w-]{8,})"
    r"|\bsk-(?=[\w-]*\d)[\w-]{16,}|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"
    # `npm_...`: a prefix, then many letters of both cases and digits.
    r"|\b(?:[a-z][a-z0-9]{0,9}[_-]){1,2}(?-i:(?=[a-z0-9]*[A-Z])(?=[A-Z0-9]*[a-z]))"
    r"(?=(?:[a-z]*\d){3})[a-z0-9]{30,}\b)"
    # `token=...`, `--password ...`
    rf"|((?:{_NAMES}|[?&][\w-]*sig(?:nature)?)=)(?![`.…]+(?!\w)|[a-z_]+\.[a-z_]*token\b)[^\s\"'\\&,;]+|(key=)[^\s\"'\\&,;]{{6,}}"
    rf"|(--(?:{_NAMES}) )[^\s\"'\\]+"
    # `"token": "..."`, `password = ...`, `Bearer ...`: with letters and digits, unlike a word.
    rf"|((?:{_NAMES})[\"']?[ \t]*[=:][ \t]*[\"']?|\bbearer[ \t]+"
    r"|--api-key[ \t]+|(?<![a-z])key[\"']?[ \t]*[=:][ \t]*[\"']?(?=[\w+/-]{16}))"
    r"(?=[^\s\"']*[a-z])(?=[^\s\"']*\d)[\w./+~-]{6,}",
    re.IGNORECASE,
)


def without_secrets(text: str) -> str:
    """The text, with what looks like a password or a token hidden."""
    return _SECRETS.sub(rf"\1\2\3\4{HIDDEN}", text)
