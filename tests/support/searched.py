"""Prints trials of a task on the CPU as JSON: python searched.py TASK SETTINGS LIMIT BATCH..."""

import dataclasses
import json
import sys

from tpukit.probe.trial import TaskSource, TrialRequest
from tpukit.probe.trials.evaluators import MeasuredEvaluator
from tpukit.train.config import TrainConfig

task, settings, limit, *batches = sys.argv[1:]
spec = {"spec": task, "settings": json.loads(settings), "data_path": ""}
source = TaskSource("tpukit.registry.classes:load_task", spec)
config = TrainConfig(hw="cpu", memory_limit=int(limit) or None)
with MeasuredEvaluator(source, config, None) as evaluator:
    trials = [evaluator.evaluate(TrialRequest(int(batch))) for batch in batches]
print(json.dumps([dataclasses.asdict(trial) for trial in trials]))
