"""Runs cells as a notebook's kernel does: python cells.py FILE (a JSON list of cells).

Like ipykernel: `__main__` has no file, each cell is compiled under a name of its own that linecache
knows, and an asyncio loop runs meanwhile.
"""

import asyncio
import json
import linecache
import sys
from pathlib import Path
from types import ModuleType


def run_cells(cells: list[str]) -> None:
    main = ModuleType("__main__")
    sys.modules["__main__"] = main

    async def kernel() -> None:
        for number, cell in enumerate(cells):
            name = f"/tmp/ipykernel_1/{number}.py"
            linecache.cache[name] = (len(cell), None, cell.splitlines(keepends=True), name)
            exec(compile(cell, name, "exec"), vars(main))

    asyncio.run(kernel())


if __name__ == "__main__":
    run_cells(json.loads(Path(sys.argv[1]).read_text()))
