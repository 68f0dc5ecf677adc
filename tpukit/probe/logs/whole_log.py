"""What a whole log shows of its program, for the advice of any line: the framework, and the hosts
that have a TPU."""

import re
from collections.abc import Iterable

from tpukit.knowledge.error_table import line_words
from tpukit.probe.logs.explanations import Explanation
from tpukit.probe.logs.log_text import Line

_OF_JAX, _OF_TORCH, _HAS_TPU = (
    re.compile(line_words(name)) for name in ("of_jax", "of_torch", "has_tpu")
)
_MOST_CHARACTERS = 400


class WholeLog:
    """Reads each line once."""

    def __init__(self) -> None:
        self._is_of_jax = self._is_of_torch = False
        self._ranks_with_tpu: set[str] = set()
        """Ranks that show a TPU; empty for lines that name no rank."""

    def feed(self, lines: Iterable[Line]) -> None:
        for line in lines:
            text = line.text[:_MOST_CHARACTERS]
            self._is_of_jax = self._is_of_jax or _OF_JAX.search(text) is not None
            self._is_of_torch = self._is_of_torch or _OF_TORCH.search(text) is not None
            if _HAS_TPU.search(text):
                self._ranks_with_tpu.add(line.stream)

    def captures(self, explanation: Explanation) -> dict[str, str]:
        """`jax` where the program is one of JAX alone; `tpu` where the log shows a TPU; `host`, the
        rank that wrote the line, where other ranks have a TPU and it shows none."""
        found = {"jax": "jax"} if self._is_of_jax and not self._is_of_torch else {}
        found |= {"tpu": "TPU"} if self._ranks_with_tpu else {}
        rank, others = explanation.stream, self._ranks_with_tpu - {""}
        return found | ({"host": rank} if rank and others and rank not in others else {})
