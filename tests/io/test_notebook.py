"""Where a command knows that it runs in a notebook."""

import pytest

from tpukit.io.notebook import in_notebook

INLINE = "module://matplotlib_inline.backend_inline"


@pytest.mark.parametrize(
    "kernel",
    [
        pytest.param({"JPY_PARENT_PID": "17"}, id="Jupyter"),
        pytest.param({"KAGGLE_KERNEL_RUN_TYPE": "Interactive", "MPLBACKEND": "agg"}, id="Kaggle"),
        pytest.param({"COLAB_JUPYTER_TRANSPORT": "ipc"}, id="Colab"),
        pytest.param({"VSCODE_PID": "17", "MPLBACKEND": INLINE}, id="VS Code"),
    ],
)
def test_the_variables_of_a_kernel_tell(kernel):
    assert in_notebook({"TERM": "xterm-color", **kernel})


@pytest.mark.parametrize(
    "shell",
    [
        pytest.param({"TERM": "xterm-256color", "MPLBACKEND": "agg"}, id="terminal"),
        pytest.param({"VSCODE_PID": "17", "TERM_PROGRAM": "vscode"}, id="VS Code's terminal"),
        pytest.param({"COLAB_RELEASE_TAG": "release-colab"}, id="a shell in Colab's image"),
    ],
)
def test_a_terminal_is_none(shell):
    assert not in_notebook(shell)
