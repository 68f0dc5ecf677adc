# ruff: noqa: E501 - logs are as long as they are
"""Explains a text as `doctor --explain` does, and logs that several tests read."""

from tpukit.knowledge.error_table import known_errors
from tpukit.probe.logs.explain import LogExplainer, unpack
from tpukit.probe.logs.explanations import Explanation
from tpukit.probe.logs.log_text import clean_lines

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
KEY_ERROR = """Traceback (most recent call last):
  File "/code/train.py", line 40, in <module>
    main()
  File "/code/train.py", line 31, in main
    loss = step(batch["labels"])
           ~~~~~^^^^^^^^^^
  File "/usr/lib/python3.12/site-packages/datasets/row.py", line 9, in __getitem__
    return self.data[key]
KeyError: 'labels'
"""
TORCHRUN = """E1120 10:00:01.000 5150 torch/distributed/elastic/multiprocessing/api.py:882] failed (exitcode: 1) local_rank: 1 (pid: 5161) of binary: /usr/bin/python3
Traceback (most recent call last):
  File "/usr/bin/torchrun", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
"""
STEPS = "\n".join(f"step {i} loss 2.{i}" for i in range(100, 110))


def explained(text: str) -> list[Explanation]:
    """Everything that is found, the first cause first."""
    explainer = LogExplainer(known_errors())
    explainer.feed(list(clean_lines(unpack(list(enumerate(text.split("\n"), start=1))))))
    return explainer.explanations()


def causes(text: str) -> list[str]:
    """The ids of the causes."""
    return [e.id for e in explained(text) if e.role == "cause"]
