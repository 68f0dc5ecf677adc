"""Finds mistakes of PyTorch training code, nearly all of which raise nothing: each has a section in
docs/doctor_rules.md.

A rule reports only what the file itself shows; where the other half may stand elsewhere (a class
of another module, a library's loop), it reports nothing.
"""
