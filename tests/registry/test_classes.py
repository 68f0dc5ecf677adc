"""Names of task classes, which decide the default folder and what a run is of."""

from tiny_task import Tiny

from tpukit.registry.classes import own_class
from tpukit.train.task import Task


def test_a_class_without_a_name_does_not_take_its_base_s():
    """Both would train in the folder of the base, where the second one's run is finished."""

    class Base(Task):
        pass

    class Variant(Base):
        pass

    class Named(Variant):
        name = "chosen"

    class Below(Named):
        pass

    for _ in range(2):
        names = [own_class(cls).name for cls in (Base, Variant, Named, Below)]
        assert names == ["base", "variant", "chosen", "chosen"]
    assert own_class(type("Other", (Tiny,), {})).name == "tiny"
