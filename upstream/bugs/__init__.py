"""Bugs of torch's own that this package patches around (docs/lists/patches.md): each a patch by
itself, with a test that fails without it.
"""
