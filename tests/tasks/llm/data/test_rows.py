"""Real CSV files are read; every fault is named by file, row and column."""

# ruff: noqa: E501 - a fault a line
import json
from pathlib import Path

import pytest

from tpukit.errors import DataError
from tpukit.io.tables import table_file
from tpukit.tasks.llm.data.rows import extra_columns, read_rows


def write(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "train.csv"
    path.write_bytes(content)
    return path


def test_what_real_files_hold(tmp_path: Path) -> None:
    big = 'word, "quoted" ' * 700_000
    content = (
        "\ufeffid,dialogue,summary\r\n"
        '1,"Ann: hi 😀\r\nBob: ""hello"", you",A greets B.\r\n'
        "\r\n"
        f'2,"{big.replace(chr(34), chr(34) * 2)}",long\r\n'
        "3,plain,x"
    ).encode()
    assert len(content) > 10_000_000
    rows = list(read_rows(write(tmp_path, content), summaries=True))
    assert [row.number for row in rows] == [1, 2, 3]
    assert rows[0].dialogue == 'Ann: hi 😀\r\nBob: "hello", you'
    assert rows[1].dialogue == big
    assert rows[2].summary == "x"


FAULTS = {
    "no summary column": (b"id,dialogue,sumary\n1,a,b\n", "no column 'summary'", "'sumary' to 'summary'"),
    "twice the column": (b"id,id,dialogue,summary\n1,1,a,b\n", "'id' occurs 2 times", "all but one"),
    "too many fields": (b"id,dialogue,summary\n1,a,b\n2,a, b,c\n", "row 2 .line 3. has 4 fields", "quotes"),
    "empty id": (b"id,dialogue,summary\n1,a,b\n ,a,b\n", "row 2 .line 3., column 'id' is empty", "id"),
    "id again": (b"id,dialogue,summary\n1,a,b\n2,a,b\n1,c,d\n", "row 3 .*'1' was row 1's", "unique"),
    "empty dialogue": (b'id,dialogue,summary\n7,"  ",b\n', "row 1 .*'dialogue' is empty .id '7'.", ""),
    "empty summary": (b"id,dialogue,summary\n7,a,\n", "row 1 .*'summary' is empty", ""),
    "not utf-8": ("id,dialogue,summary\n1,é,b\n2,caf".encode() + b"\xe9,b\n", "line 3: byte 0xe9", "UTF-8"),
    "open quote": (b'id,dialogue,summary\n1,a,b\n2,"a,b\n3,c,d\n', "row 2 .line 3.: a quote is opened", "twice"),
    "stray quote": (b'id,dialogue,summary\n1,"a"b,c\n', "row 1 .*not valid CSV", "doubled"),
    "half a character": (b'{"id": 1, "dialogue": "a\\ud83d", "summary": "b"}', r"'dialogue': .ud83d alone is not UTF-8", ""),
    "packed": (b"\x1f\x8b", "damaged", "Unpack"),
    "no rows": (b"id,dialogue,summary\n", "no rows", "at least one"),
    "nothing": (b"", "is empty", "header"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_named(tmp_path: Path, name: str) -> None:
    content, message, hint = FAULTS[name]
    path = write(tmp_path, content)
    path = path.rename(
        path.with_suffix({b"{": ".jsonl", b"\x1f": ".csv.gz"}.get(content[:1], ".csv"))
    )
    with pytest.raises(DataError, match=message) as caught:
        list(read_rows(path, summaries=True))
    assert str(path) in caught.value.message
    assert hint in (caught.value.hint or "")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        list(read_rows(tmp_path / "none.csv", summaries=True))


def test_extra_columns_are_named(tmp_path: Path) -> None:
    path = write(tmp_path, b"id,dialogue,topic,Sumary\n1,a,b,c\n")
    assert extra_columns(path) == ["topic", "Sumary (did you mean 'summary'?)"]
    assert [row.dialogue for row in read_rows(path, summaries=False)] == ["a"]


def test_an_array_of_objects_is_read_as_lines_are(tmp_path: Path) -> None:
    """What is called .json is one or the other; an item at fault is named."""
    objects = [{"id": str(n), "dialogue": f"{n}\nAnn", "summary": "Bob"} for n in range(3)]
    lines, array, also_lines = (tmp_path / n for n in ("a.jsonl", "b.json", "c.json"))
    lines.write_text("".join(json.dumps(each) + "\n" for each in objects))
    array.write_text("\ufeff\n " + json.dumps(objects, indent=2), encoding="utf-8")
    also_lines.write_bytes(lines.read_bytes())
    expected, *others = (list(read_rows(p, summaries=True)) for p in (lines, array, also_lines))
    assert [row.dialogue for row in expected] == ["0\nAnn", "1\nAnn", "2\nAnn"]
    assert others == [expected, expected]
    assert table_file(tmp_path, "b") == array and table_file(tmp_path, "x").name == "x.csv"
    array.write_text(json.dumps([*objects, "Ann"]))
    with pytest.raises(DataError, match=r"b\.json, item 4: a str"):
        list(read_rows(array, summaries=True))
    array.write_text("[1, ")
    with pytest.raises(DataError, match="not JSON"):
        list(read_rows(array, summaries=True))
    with pytest.raises(DataError, match=r"\.xlsx is not read"):
        list(read_rows(tmp_path / "x.xlsx", summaries=True))
