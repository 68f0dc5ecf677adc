"""A realistic log for every entry of the knowledge (known_logs.toml)."""

import tomllib
from pathlib import Path

TB = "Traceback (most recent call last):\n"
TB += '  File "/kaggle/working/train.py", line 212, in <module>\n    main()\n'
UW = "/usr/local/lib/python3.12/site-packages/"

_TEXTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
LOGS = {id: text.replace("{TB}", TB).replace("{UW}", UW) for id, text in _TEXTS.items()}
