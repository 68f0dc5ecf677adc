"""How anything is learned: the one engine and what it stands on."""
