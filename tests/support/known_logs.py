"""A realistic log for every entry of the knowledge (known_logs.toml)."""

from cases import read_cases

LOGS = read_cases(__file__)
TB = LOGS.pop("texts")["TB"]
