"""Hooks: text that is put into PyTorch's own files, behind or in the place of lines quoted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hook:
    """One change of a file.

    Attributes:
        path: the file, below the root of PyTorch's repository.
        anchor: lines that stand in it once.
        text: what stands there afterwards.
    """

    path: str
    anchor: str
    text: str

    def applied(self, source: str) -> str:
        """The file with the hook.

        Raises:
            LookupError: the anchor does not stand in it once: this PyTorch is another one.
        """
        if source.count(self.anchor) != 1:
            raise LookupError(
                f"{self.path}: these lines should stand in it once, and do "
                f"{source.count(self.anchor)} times; give the hook other lines:\n{self.anchor}"
            )
        return source.replace(self.anchor, self.text)


def behind(path: str, anchor: str, text: str) -> Hook:
    """A hook that adds ``text`` behind ``anchor``."""
    return Hook(path, anchor, anchor + text)
