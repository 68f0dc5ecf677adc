"""Large fields are read; what is wrong with a row is named by file, row and column."""

# ruff: noqa: E501 - a fault a line
from pathlib import Path

import pytest

from tpukit.errors import DataError
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
    "no dialogue column": (b"id,asked,summary\n1,a,b\n", "no column 'dialogue'", "--set prompt_column=NAME"),
    "no summary column": (b"id,dialogue,sumary\n1,a,b\n", "no column 'summary'", "'sumary' to 'summary'"),
    "a pair": (b"id,dialogue,chosen,rejected\n1,a,b,c\n", "no column 'summary'", "--set rejected_column=rejected"),
    "empty id": (b"id,dialogue,summary\n1,a,b\n ,a,b\n", "row 2 .line 3., column 'id' is empty", "id"),
    "id again": (b"id,dialogue,summary\n1,a,b\n2,a,b\n1,c,d\n", "row 3 .*'1' was row 1's", "unique"),
    "empty dialogue": (b'id,dialogue,summary\n7,"  ",b\n', "row 1 .*'dialogue' is empty .id '7'.", ""),
    "empty summary": (b"id,dialogue,summary\n7,a,\n", "row 1 .*'summary' is empty", ""),
    "no rows": (b"id,dialogue,summary\n", "no rows", "at least one"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_named(tmp_path: Path, name: str) -> None:
    content, message, hint = FAULTS[name]
    path = write(tmp_path, content)
    with pytest.raises(DataError, match=message) as caught:
        list(read_rows(path, summaries=True))
    assert str(path) in caught.value.message
    assert hint in (caught.value.hint or "")


def test_extra_columns_are_named(tmp_path: Path) -> None:
    path = write(tmp_path, b"id,dialogue,topic,Sumary\n1,a,b,c\n")
    assert extra_columns(path) == ["topic", "Sumary (did you mean 'summary'?)"]
    assert [row.dialogue for row in read_rows(path, summaries=False)] == ["a"]
