"""Facts as data files (error texts, versions, devices) and their readers."""
