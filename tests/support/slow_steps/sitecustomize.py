"""With this folder in PYTHONPATH a step takes longer than the shortest time limit, a second."""

import sys
import time
from importlib.abc import MetaPathFinder
from importlib.util import find_spec

LEARNER = "tpukit.train.learner"


def slow_down(module):
    step = module.Learner.train_step

    def slow(*args, **kwargs):
        time.sleep(1.1)
        return step(*args, **kwargs)

    module.Learner.train_step = slow


class SlowSteps(MetaPathFinder):
    """Changes `Learner.train_step` as its module is imported."""

    def find_spec(self, fullname, path, target=None):
        if fullname != LEARNER:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            slow_down(module)

        spec.loader.exec_module = exec_module
        return spec


if LEARNER in sys.modules:  # of a fork
    slow_down(sys.modules[LEARNER])
else:
    sys.meta_path.insert(0, SlowSteps())
