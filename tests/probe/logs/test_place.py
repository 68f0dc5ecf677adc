"""What the place of an exception says: the condition, what is installed, recorded values."""

import sys
import traceback

import pytest

from tpukit.io.recorder.record import append_record, plain_text
from tpukit.knowledge.error_table import known_errors
from tpukit.probe.logs import explain_log, open_log
from tpukit.probe.logs.place import source
from tpukit.probe.logs.place.installed import Installed
from tpukit.probe.logs.place.live import read_records
from tpukit.probe.logs.place.lost import refusing

LIBRARY = """
class FrobConfig:
    columns: int = 4
    hidden: str = ""


class Frob:
    def __init__(self, width, groups=3, args: FrobConfig | None = None, tokens: "Tokenizer" = None):
        self.width = width
        is_even = width % groups == 0
        if not is_even:
            raise ValueError(f"cannot cut {width}")
        if args is not None and args.hidden not in ("a", "b"):
            raise ValueError("hidden must be known")

    def use(self, key):
        data = {"speed": 1, "size": 2}
        return data[key]


def check(condition, message):
    if not condition:
        raise RuntimeError(message)


def stack(rows):
    check(len(rows) > 2, "too few")
"""
METADATA = "Metadata-Version: 2.1\nName: {}\nVersion: {}\n"


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A package `frob` 2.1 below site-packages, and `trainy`, which asks it for another name."""
    site = tmp_path / "site-packages"
    for name, files in {
        "frob": {"__init__.py": "from frob.core import Frob, check, stack\n", "core.py": LIBRARY,
                 "parts.py": "def join(a):\n    return a\n"},
        "trainy": {"__init__.py": "from frob import gone\n"},
    }.items():  # fmt: skip
        (site / name).mkdir(parents=True)
        for file, text in files.items():
            (site / name / file).write_text(text)
    for name, version, more in (
        ("frob", "2.1", ""), ("trainy", "0.3", "Requires-Dist: frob>=2,<3\n"),
    ):  # fmt: skip
        info = site / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(METADATA.format(name, version) + more)
    monkeypatch.syspath_prepend(str(site))
    yield site
    for name in [name for name in sys.modules if name.partition(".")[0] in ("frob", "trainy")]:
        del sys.modules[name]


@pytest.fixture
def answered(tmp_path, library):
    """The first explanation of a script that fails, with its record or by the log alone."""

    def answer(code: str, *, recorded: bool = True):
        script, log, record = (tmp_path / name for name in ("train.py", "out.log", "r.jsonl"))
        script.write_text(code)
        try:
            exec(compile(code, str(script), "exec"), {"__name__": "__main__"})
        except Exception as error:
            error.__traceback__ = error.__traceback__.tb_next
            log.write_text("".join(traceback.format_exception(error)))
            append_record(str(record), error)
        records = read_records(record) if recorded else ()
        return explain_log(open_log(str(log), 20.0), known_errors(), records).explanations[0]

    return answer


def test_the_condition_is_followed_one_assignment_back_and_turned_round(answered):
    for recorded in (True, False):  # the message has the value, too
        first = answered("from frob import Frob\nWIDTH = 7\nFrob(WIDTH)\n", recorded=recorded)
        assert first.id == "raise-site" and first.confidence == "probable"
        assert "core.py:12) raises it where `not width % groups == 0`" in first.cause
        assert "`width` is 7" in first.cause and "`width=WIDTH` (train.py:3)" in first.cause
        assert "Make `width` a multiple of `groups`" in first.fix
    assert "(6 or 9; 1, 7 divide 7)" in answered("from frob import Frob\nFrob(7)\n").fix


def test_both_conditions_are_ways_out(answered):
    code = "from frob import Frob\nfrom frob.core import FrobConfig\nFrob(6, args=FrobConfig())\n"
    first = answered(code)
    assert "Leave out `args` or make `args.hidden` one of ('a', 'b')." in first.fix


def test_a_helper_that_raises_is_asked_for_its_callers_condition(answered):
    first = answered("from frob import stack\nstack([1])\n")
    assert "core.py:27) raises it where `not (len(rows) > 2)`" in first.cause
    assert "Make `len(rows) > 2`." in first.fix


def test_another_machines_log_and_another_release_of_the_file_are_left_alone(answered, library):
    code = "from frob import Frob\nFrob(7)\n"
    file = library / "frob" / "core.py"
    assert answered(code, recorded=False).id == "raise-site"
    file.write_text(file.read_text().replace("cannot cut", "refuses"))
    source.tree.cache_clear()
    source.parents.cache_clear()
    log = library.parent / "out.log"
    text = log.read_text()
    assert explain_log(open_log(str(log), 20.0), known_errors()).explanations[0].id != "raise-site"
    log.write_text(text.replace(str(library.parent), "/nowhere"))
    assert explain_log(open_log(str(log), 20.0), known_errors()).explanations[0].id != "raise-site"


@pytest.mark.parametrize(
    ("code", "fix"),
    [
        ("from frob import join", "In train.py:1: `from frob.parts import join`."),
        ("from frob import join, Frob, chec", "import join`; `check` in place of `chec`"),
        ("from frob import unheard", "`unheard` is nowhere in frob 2.1"),
        ("import frob\nfrob.join(1)", "In train.py:2: `from frob.parts import join`."),
        ("import trainy", "`pip install -U trainy`, whose code asks for it"),
    ],
)
def test_a_missing_name_is_looked_up_in_what_is_installed(answered, code, fix):
    first = answered(code)
    assert fix in first.fix and "frob 2.1" in first.cause


def test_all_arguments_of_a_call_are_checked_at_once(answered):
    first = answered("from frob import Frob\nFrob(6, columns=3, tokenizer=1, group=2, odd=0)\n")
    assert "does not take `columns`, `tokenizer`, `group`, `odd` (train.py:2)" in first.cause
    assert "`columns` belongs to the `FrobConfig` that is given as `args`" in first.fix
    assert "`tokens=` in place of `tokenizer=`" in first.fix
    assert "`groups=` in place of `group=`" in first.fix
    assert "leave out `odd`: nothing there is like it" in first.fix


def test_recorded_keys_and_the_folder_of_a_file(answered, tmp_path):
    first = answered("from frob import Frob\nFrob(6).use('sped')\n")
    assert "`data` in core.py:18 has `speed`, `size`, and no `sped`" in first.cause
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train_v2.csv").touch()
    first = answered(f"open('{tmp_path}/data/train.csv')")
    assert f"`{tmp_path}/data` has no `train.csv`; it has `train_v2.csv`." in first.cause
    first = answered(f"open('{tmp_path}/runs/a.txt', 'w')")
    assert "does not exist" in first.cause and f"`mkdir -p {tmp_path}/runs`" in first.fix


def test_the_module_of_the_model_and_its_shapes(answered):
    code = (
        "import torch\nfrom torch import nn\n"
        "model = nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 2))\n"
        "model(torch.zeros(3, 4))\n"
    )
    first = answered(code)
    assert first.id == "linear-input-size"
    assert "It is the model's `1`, Linear(in_features=5, out_features=2)" in first.cause
    assert "`input` Tensor(3, 4) torch.float32 cpu" in first.cause


def test_a_part_that_holds_the_whole_model(answered):
    code = (
        "import torch\nfrom torch import nn\n"
        "model = nn.Sequential(nn.Linear(5, 2), nn.Linear(2, 2))\n"
        "model[1].whole = model\n"
        "model(torch.zeros(3, 4))\n"
    )
    assert "It is the model's `0`" in answered(code).cause


def test_a_pin_that_something_installed_refuses(library):
    installed = Installed((str(library),))
    assert refusing(installed, "frob", "<2") == "trainy 0.3 requires frob<3,>=2"
    assert refusing(installed, "frob", "<2.5") == refusing(installed, "frob", ">=2.5") == ""
    assert refusing(installed, "frob", ">=3.1").startswith("trainy")


def test_values_are_plain_and_nothing_of_the_programs_own_runs():
    class Loud:
        def __repr__(self):
            raise RuntimeError

        __len__ = __iter__ = __getattr__ = __repr__

    assert plain_text(Loud()) == "" and plain_text([Loud()]) == "list of 1"
    assert plain_text({"a": Loud()}) == "dict('a')" and plain_text("x" * 500).endswith("...'")
    assert plain_text((1, 2.5, None)) == "tuple(1, 2.5, None)"


def test_secrets_of_a_record_are_not_shown(answered):
    code = "from frob import Frob\ndata = {'hf_abcdefghij0123456789abcdefghij0123': 1}\ndata['a']\n"
    first = answered(code)
    assert "hf_abc" in first.cause and "hf_abc" not in str(first.as_json())
