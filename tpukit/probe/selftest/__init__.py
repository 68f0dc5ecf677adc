"""`doctor --selftest`: whether this hardware computes, trains and resumes as it should."""
