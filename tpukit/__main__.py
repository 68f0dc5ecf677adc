"""`python -m tpukit` and the `tpukit` script."""

from tpukit.cli import main

if __name__ == "__main__":
    main()
