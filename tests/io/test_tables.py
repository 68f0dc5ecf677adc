"""Tables in forty forms, by each task: the same rows, or the same error of two lines."""

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import unicodedata
import zipfile

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import tpukit
from tpukit.errors import DataError
from tpukit.io.tables import column_place, read_table, table_file, write_csv
from tpukit.tasks.images.data.listing import labelled_images
from tpukit.tasks.images.settings import ImagesConfig
from tpukit.tasks.llm.data.rows import Columns, read_rows
from tpukit.train.labelled import labelled, table_with_rows
from tpukit.train.submission import match_sample

COLUMNS = Columns(prompt="text", completion="label")
HEADER = ["id", "text", "label"]
ROWS = [
    ["01", 'A: hé;\r\n"x", |y\t', "None"],
    ["été_00", "a\u2028b 😀\rc", "cat"],
    ["3", "z", "dog"],
]
CSV = [HEADER, *ROWS]


def as_csv(rows=CSV, **dialect):
    file = io.StringIO(newline="")
    csv.writer(file, quoting=csv.QUOTE_ALL, **dialect).writerows(rows)
    return file.getvalue()


def packed(text, member="train.csv", *more):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in (member, "__MACOSX/._x", *more):
            archive.writestr(name, text)
    return file.getvalue()


RECORDS = [dict(zip(HEADER, row, strict=True)) for row in ROWS]
COLUMNS_OF_ROWS = {name: {str(i): row[name] for i, row in enumerate(RECORDS)} for name in HEADER}
SPLIT = {"columns": HEADER, "index": [0, 1, 2], "data": ROWS}
SCHEMA = {"schema": {"fields": []}, "data": [{"index": 7, **row} for row in RECORDS]}
NFD = unicodedata.normalize("NFD", as_csv())
WIDE = [HEADER, *ROWS[:2], ["3", "z" * 200_000, "dog"]]

READ = {
    "comma.csv": as_csv().encode(),
    "semicolon.csv": as_csv(delimiter=";").encode(),
    "tab.csv": as_csv(delimiter="\t").encode(),
    "tab.tsv": as_csv(delimiter="\t").encode(),
    "declared.csv": b"sep=|\r\n" + as_csv(delimiter="|").encode("utf-8"),
    "pipe.csv": as_csv(delimiter="|").encode(),
    "mac.csv": as_csv(lineterminator="\r").encode(),
    "unix.csv": as_csv(lineterminator="\n").encode(),
    "mark.csv": as_csv().encode("utf-8-sig"),
    "two marks.csv": b"\xef\xbb\xbf" * 2 + b"id,text,label\n" + as_csv(ROWS).encode(),
    "utf-16.csv": as_csv(delimiter="\t").encode("utf-16"),
    "utf-16-be.csv": codecs.BOM_UTF16_BE + as_csv().encode("utf-16-be"),
    "unmarked.csv": as_csv(delimiter=";").encode("utf-16-le"),
    "unmarked-be.csv": as_csv().encode("utf-16-be"),
    "utf-32.csv": as_csv().encode("utf-32"),
    "blank lines.csv": as_csv(lineterminator="\n\n  \n").encode(),
    "header.csv": as_csv([["id ", " text", "label\xa0"], *ROWS]).encode(),
    "spaces.csv": b"id, text, label\n" + as_csv(ROWS).encode(),
    "index.csv": as_csv([["", *HEADER], *([i, *row] for i, row in enumerate(ROWS))]).encode(),
    "unnamed.csv": as_csv([["Unnamed: 0", *HEADER], *(["0", *row] for row in ROWS)]).encode(),
    "empty columns.csv": as_csv([[*HEADER, "", ""], *([*row, "", ""] for row in ROWS)]).encode(),
    "more.csv": as_csv([[*HEADER, "fold"], *([*row, "1"] for row in ROWS)]).encode(),
    "wide.csv": as_csv(WIDE).encode(),
    "nfd.csv": NFD.encode(),
    "gzip.csv.gz": gzip.compress(as_csv().encode()),
    "gzip under its name.csv": gzip.compress(as_csv().encode()),
    "zip.csv.zip": packed(as_csv()),
    "bz2.csv.bz2": bz2.compress(as_csv().encode()),
    "xz.jsonl.xz": lzma.compress("\n".join(map(json.dumps, RECORDS)).encode()),
    "lines.jsonl": "\n\n".join(json.dumps(row, ensure_ascii=False) for row in RECORDS).encode(),
    "lines.ndjson": "\r\n".join(map(json.dumps, RECORDS)).encode(),
    "lines.json": "\n".join(map(json.dumps, RECORDS)).encode("utf-8-sig"),
    "records.json": json.dumps(RECORDS, indent=2).encode(),
    "utf-16.json": json.dumps(RECORDS, ensure_ascii=False).encode("utf-16"),
    "columns.json": json.dumps(COLUMNS_OF_ROWS).encode(),
    "columns.jsonl": json.dumps(COLUMNS_OF_ROWS).encode(),
    "index.json": json.dumps({str(i): row for i, row in enumerate(RECORDS)}, indent=1).encode(),
    "split.json": json.dumps(SPLIT).encode(),
    "table.json": json.dumps(SCHEMA).encode(),
    "lists.json": json.dumps({name: [r[name] for r in RECORDS] for name in HEADER}).encode(),
}
"""File -> its content: always the rows `ROWS`."""
ONE = b'{"id": "a", "text": "b", "label": "c"}'
REFUSED = {
    "values.json": (json.dumps(ROWS).encode(), "rows without names of columns .orient='values'."),
    "unclear.json": (json.dumps({"a": {"id": 1}, "b": {"id": 2}}).encode(), "is not clear"),
    "uneven.json": (b'{"id": ["1", "2"], "text": ["a"]}', "other lengths than the columns"),
    "twice.jsonl": (b'{"id": 1, "id": 2, "text": "a"}', "is there twice"),
    "other names.jsonl": (ONE + b'\n{"id": 2}', "line 2 has id; the first has id, text, label"),
    "text.json": (b"[" + ONE + b', "a"]', "item 2: a str"),
    "cut.json": (b'[{"id": 1, ', "not JSON"),
    "half.jsonl": (ONE.replace(b"a", b"\\ud83d", 1), "column 'id': .ud83d alone"),
    "twice.csv": (b"id,label, label\n1,a,b\n", "'label' occurs 2 times .'label', ' label'."),
    "ragged.csv": (
        b"id,text,label\n1,a,b\n2,a,b,c\n",
        r"row 2 .line 3. has 4 fields, the header 3",
    ),
    "ragged below a separator.csv": (
        b"sep=;\nid;text;label\n1;a;b\n2\n",
        "row 2 .line 4. has 1 fields",
    ),
    "bare return.csv": (b"id,text,label\n1,a\rb,c\n", r"row 1 .line 2. has 2 fields"),
    "open.csv": (b'id,text,label\n1,"a,b\n2,a,b\n', "row 1 .line 2.: a quote is opened"),
    "stray.csv": (b'id,text,label\n1,"a"b,c\n', "row 1 .line 2.: not valid CSV"),
    "damaged.csv": ("id,text,label\n1,é,b\n2,a".encode() + b"\xe9,b\n", "line 3: byte 0xe9"),
    "cyrillic.csv": ("id,text,label\n1,привет,b\n".encode("cp1251"), "line 2: byte 0xef"),
    "nul.csv": (b"id,text,label\n1,\0,b\n", "not a CSV or JSON file: NUL in line 2"),
    "cut.csv.gz": (gzip.compress(as_csv().encode())[:-9], "damaged, or packed otherwise"),
    "several.zip": (packed("id\n", "a.csv", "b.csv"), r"packs 2 files .'a.csv', 'b.csv'."),
    "nothing.csv": (b"\xef\xbb\xbf\n", "is empty"),
    "sheet.xlsx": (b"", "[.]xlsx is not read"),
    "nowhere.csv": (None, "Cannot read .*nowhere.csv: No such file"),
}
"""File -> its content, and what is said of it."""


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    for name in ("01", "été_00", "3"):
        Image.new("L", (2, 2)).save(folder / f"{name}.png")
    return folder


def by_user(path, images):
    return [(row["id"], row["label"], row["text"]) for row in tpukit.read_table(path).records()]


def by_summarize(path, images):
    rows = read_rows(path, summaries=True, columns=COLUMNS)
    return [(row.id, row.summary, row.dialogue) for row in rows]


def by_images(path, images):
    table = table_with_rows(path)
    config = ImagesConfig(data_path=str(path.parent / "none"), columns="label")
    found = labelled_images(labelled(table, config), images)
    names = [file.rpartition("/")[2][:-4] for file in found.files]
    return [(n, found.classes[k]) for n, k in zip(names, found.labels, strict=True)]


def write(tmp_path, name, content):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    return path


@pytest.mark.parametrize("name", READ)
def test_every_task_reads_the_same_rows_of(tmp_path, images, name):
    path = write(tmp_path, name, READ[name])
    rows = WIDE[1:] if name == "wide.csv" else ROWS
    form = "NFD" if name == "nfd.csv" else "NFC"
    expected = [(r[0], r[2], unicodedata.normalize(form, r[1])) for r in rows]
    users = by_user(path, images)
    assert [(unicodedata.normalize("NFC", i), k, text) for i, k, text in users] == expected
    assert by_summarize(path, images) == users
    # Names of files are those on the disk.
    assert by_images(path, images) == [row[:2] for row in expected]


@pytest.mark.parametrize("name", REFUSED)
def test_every_task_says_the_same_of(tmp_path, images, name):
    content, said = REFUSED[name]
    path, errors = write(tmp_path, name, content), []
    for read in (by_user, by_summarize, by_images):
        with pytest.raises(DataError, match=said) as caught:
            read(path, images)
        errors.append(str(caught.value))
    assert errors == errors[:1] * 3
    assert len(errors[0].splitlines()) == 2 and str(path) in errors[0]


def test_a_file_that_is_not_utf_8_is_read_as_windows_writes_it(tmp_path, images, capsys):
    path = write(tmp_path, "latin.csv", "id;text;label\n01;“caf\xe9”;b\n3;x;c\n".encode("cp1252"))
    expected = [("01", "b", "“café”"), ("3", "c", "x")]
    assert by_user(path, images) == by_summarize(path, images) == expected
    assert by_images(path, images) == [row[:2] for row in expected]
    assert capsys.readouterr().err.count(f"{path} is not UTF-8: it is read as cp1252") == 1


def test_files_in_the_other_form_of_unicode_are_found(tmp_path):
    for name in ("e\u0301te\u0301_00", "b"):
        Image.new("L", (2, 2)).save(tmp_path / f"{name}.png")
    path = write(tmp_path, "train.csv", "id,label\nété_00,x\nb ,y\n".encode())
    assert [label for _, label in by_images(path, tmp_path)] == ["x", "y"]
    path.write_text("id,label\nеte,x\nb,y\n")  # the first letter is Cyrillic
    with pytest.raises(DataError, match=r"there is no image 'еte' .'.u0435te'."):
        by_images(path, tmp_path)


@pytest.mark.parametrize(
    ("header", "hint"),
    [("id,Text,label", "Rename 'Text' to 'text'?"), ("id,label", "--set prompt_column=NAME"),
     ("id,tеxt,label", r"Rename 'tеxt' ('t\u0435xt') to 'text'?")],
)  # fmt: skip
def test_what_differs_from_a_missing_name_is_shown(tmp_path, header, hint):
    path = write(tmp_path, "t.csv", f"{header}\n".encode())
    with pytest.raises(DataError, match="has no column 'text'; it has 'id'") as caught:
        list(read_rows(path, summaries=True, columns=COLUMNS))
    assert hint in caught.value.hint


def test_a_column_alone_stays_one(tmp_path):
    path = write(tmp_path, "t.csv", b'"a, b"\n"x;y,z"\n""\n')
    assert read_table(path).columns == ["a, b"] and read_table(path).rows == [["x;y,z"], [""]]
    assert read_table(write(tmp_path, "u.csv", b"id\na;b\nc|d\n")).rows == [["a;b"], ["c|d"]]


def test_the_table_of_a_name_is_found_in_any_form(tmp_path):
    assert table_file(tmp_path, "train").name == "train.csv"
    (tmp_path / "train.tsv.gz").touch()
    assert table_file(tmp_path, "train").name == "train.tsv.gz"


# -- written and read again ----------------------------------------------------------------------
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
MARKS = st.text("\r\n\",;|\t' a", max_size=6)


@st.composite
def tables(draw):
    columns = draw(st.integers(1, 4))
    row = st.lists(TEXTS | MARKS, min_size=columns, max_size=columns)
    return [[f"column{i}" for i in range(columns)], *draw(st.lists(row, max_size=5))]


def spreadsheet(text):
    """Rows as a spreadsheet cuts them: at any line end that is not within quotes."""
    quoted, rows = False, 1
    for place, character in enumerate(text):
        quoted ^= character == '"'
        is_end = character == "\n" or (character == "\r" and text[place + 1 : place + 2] != "\n")
        rows += is_end and not quoted
    return rows - 1


@given(tables())
def test_what_is_written_is_read_as_it_was(tmp_path_factory, rows):
    path = tmp_path_factory.getbasetemp() / "written.csv"
    write_csv(path, rows)
    table = read_table(path)
    assert [table.columns, *table.rows] == rows
    with path.open(newline="", encoding="utf-8") as file:
        text = file.read()
        file.seek(0)
        assert [*csv.reader(file)] == rows
    assert spreadsheet(text) == len(rows)


@given(
    tables(), st.sampled_from(",;\t|"), st.sampled_from(["\n", "\r\n", "\r"]),
    st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-32"]),
)  # fmt: skip
def test_any_separator_line_end_and_encoding_is_read(tmp_path_factory, rows, mark, end, encoding):
    path = tmp_path_factory.getbasetemp() / "any.csv"
    path.write_bytes(as_csv(rows, delimiter=mark, lineterminator=end).encode(encoding))
    table = read_table(path)
    assert [table.columns, *table.rows] == rows


def test_a_submission_with_a_bare_carriage_return_has_its_rows(tmp_path):
    out, answers = tmp_path / "out.csv", ["a\rb", "c\r\nd", "\r"]
    write_csv(out, [("id", "summary"), *enumerate(answers)])
    sample = write(tmp_path, "sample.csv", b"id, summary\n2,x\n1,x\n0,x\n")
    match_sample(out, read_table(sample), print)
    with out.open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["id", " summary"]
    assert rows == [["2", "\r"], ["1", "c\r\nd"], ["0", "a\rb"]]
    assert column_place(read_table(out).columns, "summary") == 1
