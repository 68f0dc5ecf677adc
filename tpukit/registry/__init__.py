"""The tasks that are installed: what they declare, their classes, their trained runs."""
