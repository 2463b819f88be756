"""The patches that hand PyTorch what this package does: ``python -m upstream``.

Nothing is written twice. What a patch adds to PyTorch is this project's own code, taken out of its
sources definition by definition and put into PyTorch's form (:mod:`upstream.extract`), in the order
that a template of the file gives; only what has no counterpart here stands in the template itself:
imports, the hooks, and what turns PyTorch's placements into cuts.

- :mod:`upstream.extract`: definitions of this project, rewritten
- :mod:`upstream.wrap`: comments and docstrings within PyTorch's line length
- :mod:`upstream.edits`: the hooks in PyTorch's own files
- :mod:`upstream.stack`: patches as ``git format-patch`` writes them, and what they count
- :mod:`upstream.patches`: which there are
"""
