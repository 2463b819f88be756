"""The picture: one immutable value, which shows itself."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cute_sharding.tools.drawing import figure, terminal
from cute_sharding.tools.drawing.parts import Contents


@dataclass(frozen=True, slots=True)
class Picture(Contents):
    """What :func:`cute_sharding.draw` returns.

    It shows itself in a notebook; ``print`` and :meth:`show` write it to a terminal, :meth:`save`
    to a file.

    Attributes:
        title: what is drawn.
        sections: its parts, in order.
        legend: which devices the labels and colours stand for.
        captions: what else is to be said: above all what is left out.
    """

    def __repr__(self) -> str:
        panels = sum(len(section.panels) for section in self.sections)
        return f"<Picture of {self.title}: {panels} panel{'s' * (panels != 1)}>"

    def __str__(self) -> str:
        """The picture as text without colour, 100 columns wide. Needs rich."""
        return self.text()

    def text(self, width: int = 100, *, colour: bool = False) -> str:
        """The picture as text of so many columns; with colour, as ANSI escapes. Needs rich.

        >>> from cute_sharding import draw
        >>> from cute_sharding.sharding import Shard, Sharding
        >>> print(draw(Sharding((2, 4), (2,), (Shard(1),))).text(40))
        (2, 4) on mesh (mesh0=2) as [S(1)]
        <BLANKLINE>
        down: dim 0 (2)
        across: dim 1 (4), on mesh0
           0  1  2  3
        0  0  0  1  1
        1  0  0  1  1
        <BLANKLINE>
         0  device 0 (mesh0=0): holds (2, 2)
         1  device 1 (mesh0=1): holds (2, 2)
        """
        return terminal.as_text(self, width, colour)

    def show(self, file: Any = None) -> None:
        """Write the picture to a terminal, or to a text file, as wide as it is. Needs rich.

        In colour where the terminal has colours and NO_COLOR is not set.
        """
        terminal.show(self, file)

    def save(self, path: str | Path) -> Path:
        """Write the picture to a file, by its suffix: .svg, .png, or .txt.

        .svg and .png need matplotlib, .txt needs rich. The same picture makes the same SVG.

        Returns:
            The path.

        Raises:
            ValueError: another suffix.
            ImportError: the library that it takes is not installed.
        """
        path = Path(path)
        if path.suffix == ".txt":
            path.write_text(self.text() + "\n", encoding="utf-8")
        elif path.suffix in figure.SUFFIXES:
            figure.save(self, path)
        else:
            raise ValueError(
                f"{str(path)!r} ends in {path.suffix!r}: give a file name for the picture that "
                f"ends in one of {', '.join(figure.SUFFIXES)}, .txt"
            )
        return path

    def to_dict(self) -> dict[str, Any]:
        """The picture as plain data, for JSON."""
        data = asdict(self)
        for section in data["sections"]:
            if section["table"] is not None:
                section["table"]["marked"] = sorted(section["table"]["marked"])
        return data

    def svg(self) -> str:
        """The picture as the text of an SVG. Needs matplotlib."""
        return figure.svg(self)

    def _repr_svg_(self) -> str:
        return self.svg()

    def _repr_html_(self) -> str:
        # Notebooks prefer this to the SVG, and a wide picture is then scrolled, not squeezed.
        text = self.svg()
        return f'<div style="overflow-x: auto">{text[text.index("<svg") :]}</div>'

    def __rich_console__(self, console: Any, options: Any) -> Any:
        yield from terminal.renderables(self, options.max_width)
