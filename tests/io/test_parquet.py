"""Parquet files and data sets of the hub, as tables."""

import json
import sys
from datetime import datetime
from decimal import Decimal

import pytest

from tpukit.errors import DataError
from tpukit.io.hub_data import local_data, tables_of
from tpukit.io.tables import read_table, table_file


@pytest.fixture
def pyarrow():
    return pytest.importorskip("pyarrow")


def write(pyarrow, path, rows):
    from pyarrow import parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def test_rows_are_those_of_json(pyarrow, tmp_path):
    messages = [{"role": "user", "content": "é\n1"}]
    rows = [
        {"id": "01", "n": 3, "x": None, "good": True, "messages": messages},
        {"id": "02", "n": 4, "x": 0.5, "good": False, "messages": []},
    ]
    write(pyarrow, tmp_path / "train.parquet", rows)
    (tmp_path / "same.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found, same = read_table(table_file(tmp_path, "train")), read_table(tmp_path / "same.jsonl")
    assert found.path.name == "train.parquet"
    assert (found.columns, found.rows) == (same.columns, same.rows)
    assert json.loads(found.column("messages")[0]) == messages
    assert found.where(1) == f"{found.path}, row 2"


def test_bytes_of_text_are_text(pyarrow, tmp_path):
    write(pyarrow, tmp_path / "train.parquet", [{"text": "é\n".encode(), "image": b"\x89PNG"}])
    assert read_table(tmp_path / "train.parquet").rows == [["é\n", "\\x89PNG"]]


def test_decimals_and_dates_are_written_without_quotes(pyarrow, tmp_path):
    """A decimal was no number, and so a class."""
    when = datetime(2020, 1, 2, 3, 4)
    write(
        pyarrow, tmp_path / "train.parquet", [{"y": Decimal("1.50"), "on": when.date(), "t": when}]
    )
    assert read_table(tmp_path / "train.parquet").rows == [["1.50", "2020-01-02", str(when)]]


def test_what_cannot_be_read(pyarrow, tmp_path, monkeypatch):
    path = tmp_path / "train.parquet"
    with pytest.raises(DataError, match="Cannot read"):
        read_table(path)
    path.write_bytes(b"id,text")
    with pytest.raises(DataError, match="not Parquet"):
        read_table(path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for ask in (lambda: read_table(path), lambda: local_data("hf://owner/name")):
        with pytest.raises(DataError, match="pyarrow, which is not installed"):
            ask()


def test_a_data_set_of_the_hub_is_a_folder_of_tables(pyarrow, tmp_path, monkeypatch):
    monkeypatch.setenv("TPUKIT_CACHE_DIR", str(tmp_path / "cache"))
    snapshot = tmp_path / "snapshot"
    for number in range(2):
        part = snapshot / "default" / "partial-train" / f"000{number}.parquet"
        write(pyarrow, part, [{"text": f"{number}"}])
    write(pyarrow, snapshot / "other" / "test" / "0000.parquet", [{"text": "x"}])
    folder = tables_of(snapshot, "owner/name", None)
    assert read_table(table_file(folder, "train")).rows == [["0"], ["1"]]
    assert tables_of(snapshot, "owner/name", None) == folder
    assert [path.name for path in tables_of(snapshot, "owner/name", "other").iterdir()] == [
        "test.parquet"
    ]
    with pytest.raises(DataError, match="configurations default, other"):
        tables_of(snapshot, "owner/name", "third")


def test_names_on_the_hub(pyarrow, tmp_path, monkeypatch):
    assert local_data(tmp_path) == tmp_path
    with pytest.raises(DataError, match="not a data set's name"):
        local_data("hf://name")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="hf://owner/name: it could not be downloaded from the Hub"):
        local_data("hf://owner/name")
