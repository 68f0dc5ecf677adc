"""Which releases the TPU compiler takes, and where jax comes from."""

import importlib.metadata
from zipfile import ZipFile

import pytest

from tpukit.errors import HardwareError
from tpukit.knowledge.versions import jax_seen_with
from tpukit.probe.compiler import client


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """Has these releases installed, and an empty cache folder."""
    monkeypatch.setenv("TPUKIT_CACHE_DIR", str(tmp_path / "cache"))
    versions = {"torch": "2.9.0", "torch_xla": "2.9.0", "libtpu": "0.0.21"}

    def version(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    return versions


@pytest.mark.parametrize(
    ("torch", "torch_xla", "libtpu", "jax"),
    [
        ("2.9.0", "2.9.0", "0.0.21", "0.7.1"),
        ("2.9.1+cpu", "2.9.0", "0.0.21.1", "0.7.2"),
        ("2.8.0+cpu", "2.8.0", "0.0.17", "0.7.2"),
    ],
)
def test_releases_that_were_seen_to_compile_need_nothing(torch, torch_xla, libtpu, jax, installed):
    installed |= {"torch": torch, "torch_xla": torch_xla, "libtpu": libtpu}
    installed |= {"jax": jax, "jaxlib": jax}
    found = client.find_client(pytest.fail)
    assert found.environment == {} and found.versions == installed


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"libtpu": "0.0.210"}, "libtpu 0.0.210"),
        ({"torch": "2.10.0"}, "torch 2.10.0"),
        ({"torch": "2.7.0", "torch_xla": "2.7.0"}, "torch_xla 2.7.0"),
    ],
)
def test_releases_that_were_not_seen_to_compile_are_named(changed, said, installed):
    installed |= changed
    with pytest.raises(HardwareError, match=r"torch_xla 2\.9\.0 with libtpu 0\.0\.21") as caught:
        client.find_client(pytest.fail)
    assert caught.value.id == "plan-versions" and said in caught.value.message


def test_an_environment_with_neither_stack_is_told_of_the_extra(installed):
    del installed["torch_xla"]
    with pytest.raises(HardwareError, match="needs torch_xla") as caught:
        client.find_client(pytest.fail)
    assert caught.value.id == "no-plan-extra" and "[plan]" in caught.value.hint


def test_an_environment_with_torch_tpu_alone_is_told_of_another_in_one_line(installed):
    del installed["torch_xla"]
    installed |= {"torch": "2.13.0", "torch_tpu": "0.2.0", "libtpu": "0.0.52"}
    with pytest.raises(HardwareError, match="traced by torch_xla") as caught:
        client.find_client(pytest.fail)
    assert caught.value.id == "no-plan-extra" and "python -m venv" in caught.value.hint
    assert "\n" not in caught.value.message + caught.value.hint


@pytest.fixture
def attached(monkeypatch, tmp_path):
    """Wheels without content in a folder, and no network."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name, version in (("jax", "0.7.1"), ("jaxlib", "0.7.1"), ("ml_dtypes", "0.6.0"),
                          ("opt_einsum", "3.4.0")):  # fmt: skip
        info = f"{name}-{version}.dist-info"
        with ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/__init__.py", "")
            metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            wheel.writestr(f"{info}/METADATA", metadata)
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", f"{name}/__init__.py,,\n{info}/RECORD,,\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


def test_jax_is_installed_beside_once(installed, attached):
    installed |= {"jax": "0.9.9", "jaxlib": "0.9.9"}
    lines: list[str] = []
    found = client.find_client(lines.append)
    (line,) = lines
    assert "jax 0.7.1" in line and "here is jax 0.9.9" in line and "MB" in line
    assert found.versions["jax"] == found.versions["jaxlib"] == jax_seen_with(installed)[0]
    assert found.environment["PYTHONPATH"].startswith(str(found.folder))
    assert (found.folder / "jax/__init__.py").exists()
    assert client.find_client(pytest.fail) == client.find_client() == found


def test_what_cannot_be_installed_says_how_wheels_are_attached(installed, attached):
    (attached / "jaxlib-0.7.1-py3-none-any.whl").unlink()
    with pytest.raises(HardwareError) as caught:
        client.find_client(lambda line: None)
    assert caught.value.id == "plan-versions" and "jaxlib==0.7.1" in caught.value.message
    assert "PIP_NO_INDEX=1 PIP_FIND_LINKS=" in caught.value.hint
    # Nothing half is left, and nothing is installed where nobody is told.
    with pytest.raises(HardwareError, match="not in this environment"):
        client.find_client()


def test_another_system_or_processor_is_named(monkeypatch):
    monkeypatch.setattr(client.platform, "machine", lambda: "aarch64")
    with pytest.raises(HardwareError, match=r"Linux on x86-64 only; .* aarch64") as caught:
        client.find_client()
    assert caught.value.id == "no-compiler"
    monkeypatch.undo()
    monkeypatch.setattr(client.sys, "platform", "darwin")
    with pytest.raises(HardwareError, match="Linux on x86-64 only"):
        client.find_client()
