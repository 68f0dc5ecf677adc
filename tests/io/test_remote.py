"""Addresses, requests that are tried again, and copies of what lies at an address."""

import os
import time

import pytest
from s3_server import ALL, KEY, SECRET

from tpukit.errors import ConfigError, DataError
from tpukit.io import mirror, remote
from tpukit.io.mirror import local_copy, output_here, send_output
from tpukit.io.remote import Remote, RemoteError, address_of


@pytest.mark.parametrize(("place", "address"), [
    ("s3://bucket/a/b", "s3://bucket/a/b"), ("gs://bucket/a/", "gs://bucket/a"),
    ("memory://a", "memory://a"), ("data", None), ("/a/b:c", None), (None, None), ("C:/x", None),
])  # fmt: skip
def test_what_is_an_address(place, address):
    from pathlib import Path

    assert address_of(place) == address
    if place and place != "C:/x":  # as the command line makes a path of a text
        assert address_of(Path(place)) == address
    assert address_of(Path("file:///a/b")) == "file:///a/b"


def test_a_password_in_an_address_is_refused_and_not_printed():
    with pytest.raises(ConfigError) as caught:
        address_of("sftp://me:hunter2@host/run")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(("address", "says"), [
    ("gs://bucket/data", "pip install gcsfs"), ("nowhere://x/y", "not a scheme that fsspec knows"),
])  # fmt: skip
def test_a_scheme_without_its_package_is_named(address, says):
    with pytest.raises(ConfigError) as caught:
        Remote(address).find()
    assert says in str(caught.value) and len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize("how", ["fail", "lost"])
def test_a_request_that_fails_is_sent_again(s3, how):
    address, faults = s3
    there = Remote(address)
    faults.arm(how, at=[1, 4])
    there.write("a/b.txt", b"one")
    assert there.read("a/b.txt") == b"one"
    assert there.find()["a/b.txt"].size == 3
    there.remove(["a/b.txt", "missing"])
    assert faults.met == 2 and not there.find()


def test_a_request_that_hangs_is_sent_again(s3, monkeypatch):
    monkeypatch.setattr(remote, "ATTEMPT_SECONDS", 0.5)
    address, faults = s3
    faults.arm("hang", at=[1])
    Remote(address).write("a", b"one")
    assert faults.met == 1 and Remote(address).read("a") == b"one"


@pytest.mark.parametrize("how", ["fail", "denied", "hang"])
def test_the_error_has_two_lines_and_no_secret(s3, monkeypatch, how):
    monkeypatch.setattr(remote, "ATTEMPT_SECONDS", 0.3)
    monkeypatch.setattr(remote, "DEADLINE_SECONDS", 1.0)
    address, faults = s3
    faults.arm(how, at=ALL)
    with pytest.raises(RemoteError) as caught:
        Remote(address).write("a/b", b"one")
    text = str(caught.value)
    assert len(text.splitlines()) == 2 and f"{address}/a/b" in text
    assert KEY not in text and SECRET not in text


def test_a_copy_follows_its_address(s3, tmp_path):
    """Files that did not change are not read again; those that are gone there go here."""
    address, faults = s3
    there, said = Remote(address), []
    for name in ("train.csv", "test.csv", "images/0.png"):
        there.write(name, name.encode())
    here = local_copy(address, said.append)
    assert (here / "images" / "0.png").read_bytes() == b"images/0.png"
    assert "Copied 3 of 3 files" in said[0] and address in said[0] and str(here) in said[0]
    there.write("train.csv", b"other")
    there.remove(["test.csv"])
    faults.arm()
    assert local_copy(address, said.append) == here
    read = {request for request in faults.requests if "png" in request}
    assert not read and (here / "train.csv").read_bytes() == b"other"
    assert not (here / "test.csv").exists() and "Copied 1 of 2 files" in said[1]
    assert local_copy(f"{address}/train.csv").read_bytes() == b"other"
    with pytest.raises(DataError, match="nothing is there"):
        local_copy(f"{address}/missing")


def test_copies_are_bounded(s3, monkeypatch):
    """The one that nobody uses goes; what does not fit is an error that names the limit."""
    address, _ = s3
    for name in ("a", "b", "c"):
        Remote(address).write(f"{name}/data", bytes(40_000))
    monkeypatch.setenv(mirror.LIMIT_VARIABLE, "100kB")
    first, second = (local_copy(f"{address}/{name}") for name in ("a", "b"))
    os.close(mirror._used.pop(first.parent))  # as if its process had ended
    time.sleep(0.01)
    assert local_copy(f"{address}/c").is_dir()
    assert not first.exists() and second.exists()
    monkeypatch.setenv(mirror.LIMIT_VARIABLE, "10kB")
    with pytest.raises(DataError, match="TPUKIT_MIRROR_LIMIT"):
        local_copy(address)


def test_an_output_is_sent(s3, tmp_path):
    from pathlib import Path

    address, _ = s3
    out = Path(f"{address}/out/submission.csv")
    output_here(out).write_text("id\n")
    send_output(out)
    assert Remote(address).read("out/submission.csv") == b"id\n"
    assert output_here(tmp_path) == tmp_path


def test_names_that_lead_elsewhere_are_not_copied(s3):
    """A store may hold any name."""
    address, _ = s3
    Remote(address).write("a/../../../escaped", b"x")
    Remote(address).write("a/inside", b"x")
    here = local_copy(f"{address}/a")
    assert [path.name for path in here.rglob("*")] == ["inside"]
