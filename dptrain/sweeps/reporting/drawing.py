"""Shared parts of a report's pictures: two widths as inline SVG, escaped user text, logarithmic axes."""

import html
import io
import os
import re
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from dptrain.errors import ConfigError
from dptrain.runtime.extras import pip_install
from dptrain.runtime.failure import describe
from dptrain.runtime.output.streams import write_error
from dptrain.sweeps.reporting import formatting
from dptrain.sweeps.reporting.fields import is_wide

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, distinct to the colour-blind too, without the yellow that is invisible on white.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000")
BLUE, ORANGE, VERMILION = "#0072B2", "#E69F00", "#D55E00"

# Resolution of images within a picture.
_IMAGE_DPI = 100

_NOT_DRAWN = re.compile(r"<\?xml.*?\?>|<!DOCTYPE.*?>|<!--.*?-->|<metadata>.*?</metadata>", re.DOTALL)
_IDS = re.compile(r'(\bid="|\bhref="#|url\(#)')


@dataclass(frozen=True)
class Width:
    """A page width that a picture is drawn for."""

    name: str  # CSS class: "wide" or "narrow"
    inches: float  # width of the picture, 96 CSS pixels each
    font: float  # points
    name_length: int  # characters of a trial's name
    legend: Literal["outside right upper", "outside lower center"]  # Matplotlib location

    @property
    def is_narrow(self) -> bool:
        """Whether it is for a small screen, with panels below each other."""
        return self.name == "narrow"


WIDE = Width("wide", 11.5, 10, 44, "outside right upper")
NARROW = Width("narrow", 3.75, 8, 24, "outside lower center")


def why_not(extra: str = "sweep") -> str | None:
    """Return why no picture can be drawn, and the extra that installs Matplotlib; None if it can."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return f"matplotlib is not installed. For them: {pip_install(extra)}"
    except Exception as error:  # such as MPLBACKEND, which names no backend
        return f"matplotlib does not start: {trouble(error)}"
    return None


def trouble(error: BaseException) -> str:
    """Return why nothing can be drawn, and the remedy if a setting of the user's is the cause."""
    text = describe(error)
    return f"{text}; unset MPLBACKEND" if os.environ.get("MPLBACKEND") and "backend" in text else text


def draw(name: str, picture: Callable[[Width], "Figure"]) -> str:
    """Return a picture as two SVG elements, one for each width of the page, or an error paragraph."""
    try:
        from matplotlib import rc_context
    except ImportError as error:
        raise ConfigError(f"matplotlib is not installed: {pip_install('sweep')}") from error
    drawn = []
    try:
        for width in (WIDE, NARROW):
            with rc_context({"font.size": width.font, "svg.hashsalt": name, "svg.fonttype": "path"}):
                drawn.append(svg(picture(width), f"{name}-{width.name}", width))
    except Exception as error:  # the page matters more than one of its pictures
        write_error(f"dptrain: warning: no picture of {name}: {trouble(error)}\n")
        return f"<p>No picture: {html.escape(describe(error))}</p>"
    return "\n".join(drawn)


def svg(figure: "Figure", name: str, width: Width) -> str:
    """Return a figure as an inline SVG element whose ids begin with `name`."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    FigureCanvasSVG(figure)  # lays out texts as wide as in SVG
    text = io.StringIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # drawn as a box
        # By hand: a figure with its own layout engine is drawn twice.
        ConstrainedLayoutEngine().execute(figure)
        figure.savefig(text, format="svg", dpi=_IMAGE_DPI, metadata={"Date": None})
    element = _IDS.sub(rf"\g<1>{name}-", _NOT_DRAWN.sub("", text.getvalue())).strip()
    return element.replace("<svg ", f'<svg class="{width.name}" aria-hidden="true" ', 1)


def make_figure(width: Width, height: float) -> "Figure":
    """Return an empty figure; height in inches."""
    from matplotlib.figure import Figure

    # Inches of SVG have 72 points. Without a layout: `svg` makes it.
    return Figure(figsize=(width.inches, height), dpi=72, layout="none")  # type: ignore[arg-type]  # it may be "none"


def label(text: str, length: int) -> str:
    """Return a user's text for Matplotlib: short, one line, no mathematics."""
    visible = "".join(sign if sign.isprintable() else "?" for sign in text)
    return formatting.shortened(visible, length).replace("$", r"\$")


def trial_name(trial: int, setting: Mapping[str, Any], length: int) -> str:
    """Return a trial's number and the values of its setting, without their names."""
    values = ", ".join(
        f"{value:.3g}" if isinstance(value, float) else formatting.brief(value) for value in setting.values()
    )
    return label(f"{trial}: {values}" if setting else f"trial {trial}", length)


def names_title(setting: Mapping[str, Any], letters: int) -> str:
    """Return the field names that `trial_name` leaves out, on at most 4 lines."""
    lines = textwrap.wrap(label(f"trial: {', '.join(setting)}", 400), letters) if setting else []
    return "\n".join(lines[:4])


def log_if_wide(axes: "Axes", axis: str, values: Sequence[float]) -> None:
    """Make an axis logarithmic where its values are positive and span more than 2 decades."""
    if is_wide(values):
        (axes.set_xscale if axis == "x" else axes.set_yscale)("log")


def png(pixels: Any) -> bytes:
    """Return a PNG file of pixels, uint8 (height, width, 3)."""
    from matplotlib.image import imsave

    content = io.BytesIO()
    imsave(content, pixels, format="png")
    return content.getvalue()
