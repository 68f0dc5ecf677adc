"""Reports that commands print: tables, charts, explanations."""
