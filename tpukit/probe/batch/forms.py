"""A search for each of a task's forms, and the fastest of their recommendations."""

from collections.abc import Sequence
from dataclasses import replace

from tpukit.errors import OutOfMemoryError
from tpukit.probe.batch.recommend import Evaluator, Log, Recommendation, Recommender
from tpukit.probe.batch.search import SearchSettings


def recommend_form(
    evaluator: Evaluator, settings: SearchSettings, log: Log, names: Sequence[str]
) -> Recommendation:
    """Searches each of a task's forms; the recommendation of the fastest of them.

    Only those whose recommendation is as asked count, where there is one; where a speed is unknown,
    the first is taken. Where speed alone decides, the first that fits is the only one searched.

    Raises: as `Recommender.recommend`; OutOfMemoryError where nothing fits in any form.
    """
    found: dict[str, Recommendation | None] = {}
    for form, name in enumerate(names):
        if len(names) > 1:
            log(f"With {name}:")
        try:
            recommender = Recommender(evaluator, settings, log, form)
            recommender.search_seconds /= len(names)
            found[name] = replace(recommender.recommend(), form=name)
        except OutOfMemoryError as error:
            if form + 1 == len(names) and not any(found.values()):
                raise
            log(f"  {error.message}")
            found[name] = None
        if evaluator.by_speed and found[name]:
            break
    fitting = [each for each in found.values() if each]
    eligible = [each for each in fitting if each.as_asked] or fitting
    known = all(each.samples_per_second for each in eligible)
    best = max(eligible, key=lambda each: (known and each.samples_per_second) or 0.0)
    return replace(best, forms=found) if len(names) > 1 else best
