"""`tpukit data`: makes data sets on the spot."""

from __future__ import annotations

import typer

app = typer.Typer(no_args_is_help=True)


@app.command()
def eit(n: int = 5) -> None:
    """x"""
    print(n)


@app.command()
def dialogues() -> None:
    """y"""
