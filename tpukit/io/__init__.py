"""Files, locks, cache folders, progress, worker processes and units, shared by all packages."""
