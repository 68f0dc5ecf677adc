"""What commands print: tables, charts, explanations."""
