"""The subcommands: one file each; parse, wire, render. Nothing heavy at import."""
