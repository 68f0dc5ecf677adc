"""A hub whose server does not answer."""

import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tpukit.errors import DataError
from tpukit.io.hub_data import is_hub_silent, local_data
from tpukit.tasks.hub.models import download
from tpukit.tasks.llm.data.tokenizer_choice import load_tokenizer


@pytest.fixture
def silent_hub(monkeypatch, tmp_path):
    """Takes connections, and says nothing."""
    monkeypatch.setattr("tpukit.io.hub_data.SECONDS_TO_ANSWER", 0.2)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        yield


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("load", "said"),
    [
        (lambda: load_tokenizer("gpt2"), "The GPT-2 tokenizer is not here"),
        (lambda: download("owner/name", "--init owner/name"), "--init owner/name: not a local"),
        (lambda: local_data("hf://owner/name"), "hf://owner/name: it could not be downloaded"),
    ],
    ids=["tokenizer", "model", "data"],
)
def test_it_is_not_waited_for(silent_hub, load, said):
    with pytest.raises(DataError, match=said) as caught:
        load()
    assert caught.value.hint


def test_one_that_refuses_is_not_silent(silent_hub, monkeypatch):
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        monkeypatch.setattr("tpukit.io.hub_data.SECONDS_TO_ANSWER", 30.0)
        assert not is_hub_silent()
