"""`pytest --tpu`: runs the tests marked `tpu`, which are skipped without it."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tpu", action="store_true", help="run the tests marked `tpu` (tpukit)")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "tpu: trains on virtual TPU devices; run with --tpu")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--tpu"):
        for item in items:
            if item.get_closest_marker("tpu"):
                item.add_marker(pytest.mark.skip(reason="needs --tpu"))
