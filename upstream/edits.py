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


@dataclass(frozen=True)
class EitherHook:
    """A change of lines that releases have in different words: the hook whose lines stand there.

    Attributes:
        hooks: of one file.
    """

    hooks: tuple[Hook, ...]

    @property
    def path(self) -> str:
        return self.hooks[0].path

    def applied(self, source: str) -> str:
        """The file with that hook.

        Raises:
            LookupError: the lines of none or of several stand in it: this PyTorch is another one.
        """
        fitting = [hook for hook in self.hooks if source.count(hook.anchor) == 1]
        if len(fitting) != 1:
            raise LookupError(
                f"{self.path}: the lines of one of these hooks should stand in it, and those of "
                f"{len(fitting)} do; add a hook with other lines:\n"
                + "\n".join(hook.anchor for hook in self.hooks)
            )
        return fitting[0].applied(source)


def either(*hooks: Hook) -> EitherHook:
    """The one of ``hooks`` whose lines the file has."""
    return EitherHook(hooks)


def behind(path: str, anchor: str, text: str) -> Hook:
    """A hook that adds ``text`` behind ``anchor``."""
    return Hook(path, anchor, anchor + text)
