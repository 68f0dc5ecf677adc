"""Which images and classes are found, and what is said where something is missing."""

import os
import re

import pytest
from PIL import Image

from tpukit.errors import ConfigError, DataError
from tpukit.tasks.images.data.listing import (
    find_training_images,
    ids_of,
    image_files,
    remarks,
)
from tpukit.tasks.images.settings import ImagesConfig
from tpukit.train.config import build_settings
from tpukit.train.labelled import split_rows
from tpukit.train.target import Target


def put(path, colour=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 4), (colour, 0, 0)).save(path)


def find(root, classes=None, **settings):
    known = classes and Target("class", ("label",), tuple(classes))
    config = build_settings(ImagesConfig, {"data_path": str(root), **settings})
    return find_training_images(config, known)


def test_folders_of_classes_with_a_validation_part(tmp_path):
    for part, count in (("train", 3), ("val", 2)):
        for name in ("cat", "dog"):
            for i in range(count):
                put(tmp_path / part / name / f"{i}.png")
    (tmp_path / "train" / "cat" / "notes.txt").write_text("no image")
    train, valid = find(tmp_path)
    assert train.classes == valid.classes == ("cat", "dog")
    assert (train.labels, valid.labels) == ((0, 0, 0, 1, 1, 1), (0, 0, 1, 1))
    assert all(str(tmp_path / "val") in file for file in valid.files)


@pytest.mark.parametrize("inner", ["", "train"])
def test_a_fraction_of_each_class_is_for_validation(tmp_path, inner):
    for name, count in {"cat": 20, "dog": 4, "fox": 1}.items():
        for i in range(count):
            put(tmp_path / inner / name / f"{i}.jpg")
    train, valid = find(tmp_path)
    assert [valid.labels.count(k) for k in range(3)] == [2, 1, 0]
    assert [train.labels.count(k) for k in range(3)] == [18, 3, 1]
    assert not set(train.files) & set(valid.files)
    assert find(tmp_path) == (train, valid)
    assert len(find(tmp_path, valid_fraction=0.0)[1]) == 0


def test_a_table_of_ids_and_labels(tmp_path):
    for name in ("a.jpg", "b.png", "c.jpeg"):
        put(tmp_path / "train_images" / name)
    (tmp_path / "train.csv").write_text("image_id,breed\na,10\nb.png,9\nc,10\n")
    train, _ = find(tmp_path, valid_fraction=0.0)
    # Numbers in the order of numbers.
    assert train.classes == ("9", "10")
    assert [file.rpartition("/")[2] for file in train.files] == ["a.jpg", "b.png", "c.jpeg"]
    assert train.labels == (1, 0, 1)
    (tmp_path / "other.csv").write_text("label,extra,path\nx,1,a\ny,2,b\n")
    named = find(tmp_path, table="other.csv", id_column="path", columns="label",
                 valid_fraction=0.0)[0]  # fmt: skip
    assert named.classes == ("x", "y")


def test_a_table_whose_file_is_missing_names_the_line(tmp_path):
    put(tmp_path / "images" / "a.jpg")
    (tmp_path / "train.csv").write_text("id,label\na,1\nb,2\nc,1\n")
    with pytest.raises(
        DataError, match=r"csv, row 2 \(line 3\): there is no image 'b' .* and 1 more"
    ):
        find(tmp_path)


def test_an_id_that_two_images_have_is_refused(tmp_path):
    """The images of train and test often have the same numbers."""
    for place in ("test/1.jpg", "train/1.jpg", "train/2.jpg", "train/2.png", "1.png"):
        put(tmp_path / "images" / place)
    for ids, said in ((["train/1", "1.jpg"], r"line 3\): '1\.jpg' is .*st/1\.jpg or .*in/1\.jpg"),
                      (["train/2", "1"], r"line 2\): 'train/2' is .*\.jpg or .*png")):  # fmt: skip
        rows = "".join(f"{name},{n}\n" for n, name in enumerate(ids))
        (tmp_path / "train.csv").write_text(f"id,label\n{rows}")
        with pytest.raises(DataError, match=said) as caught:
            find(tmp_path)
        assert "folder=NAME" in caught.value.hint
    # A path is itself, whatever else has its name.
    (tmp_path / "train.csv").write_text("id,label\ntrain/2.png,1\ntest/1.jpg,2\n1,3\n1.png,3\n")
    train, _ = find(tmp_path, valid_fraction=0.0)
    ends = ("train/2.png", "test/1.jpg", "images/1.png", "images/1.png")
    assert [file.endswith(end) for file, end in zip(train.files, ends, strict=True)] == [True] * 4


def test_ids_may_be_in_other_letters_than_the_files(tmp_path):
    for name in ("1.JPG", "b/2.png", "B/2.PNG", "c.png"):
        put(tmp_path / "images" / name)
    for ids, found in (
        (["1.jpg", "C.PNG"], ["1.JPG", "c.png"]),
        (["b/2", "B/2"], ["b/2.png", "B/2.PNG"]),
    ):
        rows = "".join(f"{name},{n}\n" for n, name in enumerate(ids))
        (tmp_path / "train.csv").write_text(f"id,label\n{rows}")
        train, _ = find(tmp_path, valid_fraction=0.0)
        assert [os.path.relpath(file, tmp_path / "images") for file in train.files] == found
    (tmp_path / "train.csv").write_text("id,label\nc,0\nB/2.png,1\n")
    with pytest.raises(DataError, match=r"'B/2\.png' is .*images/B/2\.PNG or .*images/b/2\.png"):
        find(tmp_path)


def test_numbers_that_name_images_too_are_no_ids(tmp_path):
    for i in range(8):
        put(tmp_path / "train" / f"{i}.png")
    rows = "".join(f"{i % 2},{i}.png,{'ab'[i % 2]}\n" for i in range(8))
    (tmp_path / "train.csv").write_text(f"species,file,label\n{rows}")
    with pytest.raises(DataError, match=r"by species several rows have one image, by file each"):
        find(tmp_path)
    assert len(find(tmp_path, id_column="file", valid_fraction=0.0)[0]) == 8
    assert len({*find(tmp_path, id_column="species", valid_fraction=0.0)[0].files}) == 2


def test_what_a_notebook_leaves_beside_images_is_none(tmp_path):
    put(tmp_path / "cat" / "a.jpg")
    put(tmp_path / "dog" / "b.jpg")
    put(tmp_path / "dog" / ".ipynb_checkpoints" / "b-checkpoint.jpg")
    put(tmp_path / ".ipynb_checkpoints" / "c-checkpoint.jpg")
    put(tmp_path / "__MACOSX" / "d.jpg")
    train, _ = find(tmp_path, valid_fraction=0.0)
    assert train.classes == ("cat", "dog") and len(train) == 2


def test_folders_that_are_no_classes(tmp_path):
    """An archive's own folder, parts under other names, images to predict beside the classes."""
    for part in ("archive/shapes", "sets/training_set", "sets/test_set", "both/Training",
                 "both/Validation", "flat", "seg/seg_train/seg_train", "seg/seg_test/seg_test",
                 "seg/seg_pred"):  # fmt: skip
        for name in ("cat", "dog"):
            put(tmp_path / part / name / "1.png")
    put(tmp_path / "flat" / "test" / "1.png")
    for place, hint in (("archive", "archive/shapes"), ("sets", "sets/training_set")):
        with pytest.raises(DataError, match="no classes to tell apart") as caught:
            find(tmp_path / place)
        assert caught.value.hint == f"Give the folder of cat, dog: --data-path {tmp_path / hint}"
    with pytest.raises(DataError, match="no classes to tell apart") as caught:
        find(tmp_path / "seg")
    assert "seg/seg_train" in caught.value.hint
    train, valid = find(tmp_path / "both")
    assert [len(train), len(valid)] == [2, 2] and valid.classes == ("cat", "dog")
    assert find(tmp_path / "flat", valid_fraction=0.0)[0].classes == ("cat", "dog")


def test_numbers_are_in_their_order_in_every_process(tmp_path):
    """quadratic_kappa takes it; ranks that sorted "nan" otherwise would learn other labels."""
    for name in ("10", "9", "nan", "-1.5", "inf", "a"):
        put(tmp_path / name / "1.png")
    train, _ = find(tmp_path, valid_fraction=0.0)
    assert train.classes == ("-1.5", "9", "10", "a", "inf", "nan")
    # A run that began with another order keeps it, and its files' order.
    before = sorted(train.classes)
    again, _ = find(tmp_path, classes=before, valid_fraction=0.0)
    assert again.classes == tuple(before) and again.labels == tuple(range(6))


@pytest.mark.parametrize("settings", [{}, {"fold": 0}, {"valid_fraction": 0.5}])
def test_the_copies_of_an_image_are_in_one_part(tmp_path, settings):
    """Rows that are there twice, as where a rare class is repeated."""
    rows = [f"{i % 20},{'ab'[i % 2]},{i // 4 % 5}" for i in range(60)]
    for i in range(20):
        put(tmp_path / "train" / f"{i}.png")
    (tmp_path / "train.csv").write_text("\n".join(["id,label,fold", *rows]))
    train, valid = find(tmp_path, **settings)
    assert len(train) + len(valid) == 60 and len(valid)
    assert not {*train.files} & {*valid.files}
    (tmp_path / "train.csv").write_text("id,label\n1,a\n2,b\n1.png,b\n")
    with pytest.raises(DataError, match=r"line 4\): .*1\.png is 'b', above it is 'a'"):
        find(tmp_path)


def test_what_spreadsheets_and_pandas_add_to_a_table(tmp_path):
    """Blanks around a label; the numbers of the rows, as a column without a name."""
    for name in "0123":
        put(tmp_path / "train" / f"{name}.png")
    for index in ("", "Unnamed: 0"):
        rows = "0,3,cat\n1,2, cat\n2,1,dog \n3,0,dog\n"
        (tmp_path / "train.csv").write_text(f"{index},id,label\n{rows}")
        train, _ = find(tmp_path, valid_fraction=0.0)
        assert train.classes == ("cat", "dog")
        assert [file[-5] for file in train.files] == list("3210")
    (tmp_path / "train.csv").write_text(",label\n1,cat\n2,dog\n")
    assert [file[-5] for file in find(tmp_path, valid_fraction=0.0)[0].files] == ["1", "2"]
    (tmp_path / "train.csv").write_text("id,breed\n0,cat\n1,cat\n")
    with pytest.raises(DataError, match="every breed is 'cat'"):
        find(tmp_path)


@pytest.mark.parametrize(
    ("header", "settings"),
    [
        ("file,patient,target", {}),
        ("file,target,patient", {}),
        ("file,patient,kind", {"columns": "kind"}),
        ("kind,file,patient", {"id_column": "file"}),
        ("file,kind,patient", {}),
        ("file,diagnosis,target", {}),
        ("target,file,patient", {}),
        ("file,fold,kind", {}),
        ("file,fold,patient,kind", {"group_column": "patient"}),
    ],
)
def test_the_classes_are_in_the_column_that_looks_like_them_or_the_first_beside_the_ids(
    tmp_path, header, settings
):
    place = {"file": "abcd", "patient": "1234", "target": "xxyy", "kind": "xxyy", "fold": "0101",
             "diagnosis": "pqrs"}  # fmt: skip
    for name in place["file"]:
        put(tmp_path / "train" / f"{name}.png")
    rows = zip(*(place[name] for name in header.split(",")), strict=True)
    (tmp_path / "train.csv").write_text("\n".join([header, *map(",".join, rows)]))
    train = find(tmp_path, valid_fraction=0.0, **settings)[0]
    assert train.classes == ("x", "y")
    found = [*remarks(ImagesConfig(data_path=str(tmp_path), **settings), train)]
    assert any("2 classes by the column" in s for s in found)


def test_a_class_keeps_images_to_learn_from(tmp_path):
    for name, count in (("cat", 1), ("dog", 2), ("fox", 10)):
        for i in range(count):
            put(tmp_path / name / f"{i}.png")
    train, valid = find(tmp_path, valid_fraction=0.9)
    assert [part.labels.count(k) for part in (train, valid) for k in range(3)] == [1, 1, 1, 0, 1, 9]


def test_names_in_another_encoding(tmp_path):
    """Latin-1, as an archive from Windows leaves them."""
    for name in ("cat", "dog"):
        put(tmp_path / name / "1.png")
        (tmp_path / name / "1.png").rename(tmp_path / name / "caf\udce9.png")
        (tmp_path / name).rename(tmp_path / f"{name}\udce9")
    train, valid = find(tmp_path)
    assert len({train.digest(), valid.digest()}) == 2


def test_ids_without_a_table(tmp_path):
    """Names, or paths where two images have one name."""
    put(tmp_path / "a" / "1.jpg")
    put(tmp_path / "b" / "2.jpg")
    assert ids_of(image_files(tmp_path), tmp_path) == ["1", "2"]
    put(tmp_path / "b" / "1.jpg")
    assert ids_of(image_files(tmp_path), tmp_path) == ["a/1.jpg", "b/1.jpg", "b/2.jpg"]


def test_a_label_that_is_not_there_is_refused(tmp_path):
    for name in "ab":
        put(tmp_path / "images" / f"{name}.jpg")
    (tmp_path / "train.csv").write_text("id,label\na,1\nb,\n")
    with pytest.raises(DataError, match=r"line 3\): there is no label"):
        find(tmp_path)


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(DataError, match="there is no folder") as caught:
        find(tmp_path / "nowhere")
    assert "tpukit data images" in caught.value.hint
    with pytest.raises(DataError, match="no folders of classes"):
        find(tmp_path)
    put(tmp_path / "train" / "cat" / "1.png")
    (tmp_path / "train" / "dog").mkdir()
    with pytest.raises(DataError, match="class 'dog' is empty"):
        find(tmp_path)
    with pytest.raises(DataError, match=r"table 'x\.csv'"):
        find(tmp_path, table="x.csv")
    put(tmp_path / "train" / "dog" / "1.png")
    with pytest.raises(DataError, match="class 'dog' is not one of the model's 1"):
        find(tmp_path, classes=("cat",))
    (tmp_path / "train.csv").write_text("id,label\n1,a\n")
    with pytest.raises(DataError, match="columns breed: there is no such column") as caught:
        find(tmp_path, table="train.csv", columns="breed")
    assert "id, label" in caught.value.hint
    (tmp_path / "train.csv").write_text("id,label\n1,a\n2,b,c\n")
    with pytest.raises(DataError, match=r"train.csv, row 2 \(line 3\) has 3 fields, the header 2"):
        find(tmp_path, table="train.csv")


def test_the_digest_sees_other_labels(tmp_path):
    for name in ("cat", "dog"):
        for i in range(2):
            put(tmp_path / name / f"{i}.png")
    first = find(tmp_path, valid_fraction=0.0)[0].digest()
    (tmp_path / "cat" / "0.png").rename(tmp_path / "dog" / "7.png")
    assert find(tmp_path, valid_fraction=0.0)[0].digest() != first


@pytest.fixture
def table(tmp_path):
    """60 images of three classes in 15 groups and 5 folds."""
    rows = ["id,label,fold,patient"]
    for i in range(60):
        put(tmp_path / "images" / f"{i}.png")
        rows.append(f"{i},{'abbccc'[i % 6]},{i % 5},p{i // 4}")
    (tmp_path / "train.csv").write_text("\n".join(rows))
    return tmp_path


def numbers(images):
    return {int(file.rpartition("/")[2][:-4]) for file in images.files}


def test_the_rows_of_a_fold_are_validated_on(table):
    train, valid = find(table, fold=3)
    assert numbers(valid) == {i for i in range(60) if i % 5 == 3}
    assert numbers(train) == {*range(60)} - numbers(valid)
    by_name = find(table, fold_column="patient", fold="p2")[1]
    assert numbers(by_name) == {8, 9, 10, 11}
    with pytest.raises(DataError, match="no row has '7' in the column 'fold'") as caught:
        find(table, fold=7)
    assert "0, 1, 2, 3, 4" in caught.value.hint
    with pytest.raises(DataError, match="fold_column wave: there is no such column"):
        find(table, fold_column="wave", fold=0)
    for wrong in ({"fold_column": "fold"}, {"fold": 0, "group_column": "patient"}):
        with pytest.raises(ConfigError):
            find(table, **wrong)
    assert "column fold is not used" in [*remarks(ImagesConfig(data_path=str(table)), train)][1]
    assert len([*remarks(ImagesConfig(data_path=str(table), fold="1"), train)]) == 1
    # Of the patients that this one part has, none is left to learn the class from.
    rows = (table / "train.csv").read_text().replace(",b,3,", ",rare,3,").replace(",a,3,", ",b,3,")
    (table / "train.csv").write_text(rows)
    train = find(table, fold=3)[0]
    told = next(remarks(ImagesConfig(data_path=str(table), fold="3"), train))
    assert told == "No training image is of class rare: it will not be learned."


@pytest.mark.parametrize("fraction", [0.1, 0.3, 0.01])
def test_a_group_is_in_one_part_alone(table, fraction):
    train, valid = find(table, group_column="patient", valid_fraction=fraction)
    groups = [{i // 4 for i in numbers(part)} for part in (train, valid)]
    assert not groups[0] & groups[1] and len(groups[0] | groups[1]) == 15
    assert numbers(train) | numbers(valid) == {*range(60)}
    counts = [valid.labels.count(k) for k in range(3)]
    assert max(abs(counts[k] - fraction * (10, 20, 30)[k]) for k in range(3)) <= 3
    assert find(table, group_column="patient", valid_fraction=fraction) == (train, valid)


def test_rows_without_a_group_are_not_one_group(table):
    """All of them would be in one part: 40 of 60 rows here."""
    lines = (table / "train.csv").read_text().splitlines()
    nan = [re.sub(r"p\d+", "nan", line) if n % 3 else line for n, line in enumerate(lines)]
    (table / "train.csv").write_text("\n".join([lines[0], *nan[1:]]))
    parts = [numbers(find(table, group_column="patient", folds=5, fold=n)[1]) for n in range(5)]
    assert sum(map(len, parts)) == 60 and max(map(len, parts)) <= 14
    config = ImagesConfig(data_path=str(table), group_column="patient")
    told = [*remarks(config, find(table)[0])][-1]
    assert told == "40 of 60 rows have no patient: each is a group of its own."


def test_folds_of_groups_of_rare_classes_share_out_the_groups():
    """scikit-learn's splitter refuses classes that all have fewer rows than there are folds."""
    groups = [row // 2 for row in range(20)]
    parts = [split_rows([*range(20)], groups, fold=n, folds=5) for n in range(5)]
    assert [len(part) for part in parts] == [4] * 5 and len(set.union(*parts)) == 20


def test_folds_and_groups_need_a_table(tmp_path):
    put(tmp_path / "cat" / "1.png")
    with pytest.raises(DataError, match=r"group_column 'patient': there is no table"):
        find(tmp_path, group_column="patient")


def test_columns_of_0_and_1_are_classes(tmp_path):
    """As a sample submission has them, with a class that no image is of."""
    for i in range(6):
        put(tmp_path / "images" / f"{i}.png")
    rows = [f"{i},{i % 2:d}.0,0,{(i + 1) % 2}" for i in range(6)]
    (tmp_path / "train.csv").write_text("\n".join(["id,rust,scab,none", *rows]))
    train, valid = find(tmp_path)
    assert train.classes == ("none", "rust", "scab") and train.class_counts() == (2, 2, 0)
    assert {*zip(numbers(valid), valid.labels, strict=True)} <= {(i, i % 2) for i in range(6)}
    told = [*remarks(ImagesConfig(data_path=str(tmp_path)), train)]
    assert told[0].startswith("No training image is of class scab")
    assert told[1].startswith("Learning 3 classes by the columns rust, scab, none")
    assert find(tmp_path, columns="rust")[0].classes == ("0.0", "1.0")
    for rust, count in (("1", 2), ("0", 0)):
        rows = f"0,1,0\n1,{rust},{rust}\n2,0,1\n"
        (tmp_path / "train.csv").write_text(f"id,rust,scab\n{rows}")
        # Several labels by themselves.
        assert find(tmp_path)[0].target.kind == "labels"
        with pytest.raises(DataError, match=rf"line 3\): {count} of the columns rust, scab"):
            find(tmp_path, target="class", columns="rust,scab")


def test_numbers_to_predict_are_no_classes(tmp_path):
    for i in range(24):
        put(tmp_path / "train" / f"{i}.png")
    for values, number in ((10, None), (13, ("number", 0))):
        rows = "".join(f"{i},{i % values}.5\n" for i in range(24))
        (tmp_path / "train.csv").write_text(f"id,score\n{rows}")
        found = find(tmp_path)[0]
        assert (found.target.kind, len(found.classes)) == (
            ("number", 0) if number else ("class", 10)
        )
        if number:
            with pytest.raises(DataError, match=r"13 values of score for 24 rows are no classes"):
                find(tmp_path, target="class")


def test_a_table_for_validation(tmp_path):
    for i in range(8):
        put(tmp_path / "images" / f"{i}.png")
    for name, places in (("train", range(6)), ("val", (7, 6))):
        rows = "".join(f"{i},{'ab'[i % 2]},{i % 3}\n" for i in places)
        (tmp_path / f"{name}.csv").write_text(f"id,label,fold\n{rows}")
    train, valid = find(tmp_path)
    assert numbers(train) == {*range(6)} and valid.labels == (1, 0)
    assert [file[-5] for file in valid.files] == ["7", "6"]
    assert numbers(find(tmp_path, fold=1)[1]) == {1, 4}
    # The images of that part may have a folder of their own.
    put(tmp_path / "val" / "6.png")
    put(tmp_path / "val" / "7.png")
    assert all("/val/" in file for file in find(tmp_path)[1].files)
    (tmp_path / "val.csv").write_text("id,label,fold\n6,c,0\n")
    with pytest.raises(DataError, match=r"val\.csv, column 'label': class 'c' is not one of"):
        find(tmp_path)


@pytest.mark.parametrize(
    "start", ["train/", "./train/", "train\\", "{folder}/train/", "../{name}/train/", "x/", "x\\"]
)
def test_ids_that_are_paths_from_a_folder_above(tmp_path, start):
    for i in range(4):
        put(tmp_path / "train" / ("x" if start[0] == "x" else "") / f"{i}.png")
    start = start.format(folder=tmp_path, name=tmp_path.name)
    rows = "".join(f"{start}{i}.png,{i % 2}\n" for i in range(4))
    (tmp_path / "train.csv").write_text(f"path,label\n{rows}")
    assert numbers(find(tmp_path, valid_fraction=0.0)[0]) == {0, 1, 2, 3}
    (tmp_path / "train.csv").write_text("path,label\nother/0.png,1\nother/1.png,0\n")
    with pytest.raises(DataError, match=r"there is no image 'other/0\.png' in") as caught:
        find(tmp_path)
    assert "id_column=NAME" in caught.value.hint


def test_folders_that_every_class_has_are_said(tmp_path):
    """Masks beside images would be learned as images."""
    for name in ("cat", "dog"):
        for inner in ("images", "masks", f"only {name}"):
            put(tmp_path / name / inner / "1.png")
    train = find(tmp_path, valid_fraction=0.0)[0]
    told = [*remarks(ImagesConfig(data_path=str(tmp_path)), train)]
    assert told == ["Each class has folders images, masks: images of all are taken."]


def test_the_table_that_is_there_is_named(tmp_path):
    put(tmp_path / "train" / "1.png")
    for name in ("sample_submission.csv", "trainLabels.csv"):
        (tmp_path / name).write_text("id,label\n")
    with pytest.raises(DataError, match="no folders of classes") as caught:
        find(tmp_path)
    assert caught.value.hint.endswith("--set table=trainLabels.csv")
