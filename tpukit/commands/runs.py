"""`tpukit runs`: trained runs beside each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tpukit.commands.output import DebugOption, JsonOption, Output, plain
from tpukit.io.files import write_file, writing_errors

app = typer.Typer()


@app.command()
def runs(
    *,
    folders: Annotated[
        list[Path], typer.Argument(help="Run folders, or folders of such.", metavar="FOLDER...")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Write the table as an HTML page too.", metavar="FILE.html")
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Compare trained runs: settings that differ, best metric, time, MFU and state."""
    from tpukit.train.report.beside import (
        compared_fields,
        compared_runs,
        table_lines,
        table_of,
        table_page,
    )

    output = Output(as_json=as_json)
    found = compared_runs(folders)
    table = table_of(found)
    for line in table_lines(table):
        output.text(line)
    if out is not None:
        with writing_errors(out.parent):
            write_file(out, table_page(table).encode())
        output.text(f"Table: {out}")
    output.result(
        {"runs": plain(compared_fields(found)), "path": None if out is None else str(out)}
    )
