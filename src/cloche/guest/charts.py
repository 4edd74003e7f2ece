"""The numbers behind what a Python context shows: charts of matplotlib figures, columns of data frames.

The text of this module travels inside the interpreter's bootstrap and is compiled there when a figure or a table first
appears, hence the same rules: CPython from 3.8, standard library only. matplotlib and pandas are never imported for
their own sake: the objects passed in come from them, so they are loaded.

A chart has the shape that E2B's clients read:

    {"type": "line" | "scatter", "title", "x_label", "y_label", "x_unit", "y_unit", "x_ticks", "x_tick_labels",
     "x_scale", "y_ticks", "y_tick_labels", "y_scale", "elements": [{"label", "points": [[x, y], …]}, …]}
    {"type": "bar",  … labels and units …, "elements": [{"label", "group", "value"}, …]}
    {"type": "box_and_whisker", … labels and units …,
     "elements": [{"label", "min", "first_quartile", "median", "third_quartile", "max", "outliers"}, …]}
    {"type": "pie", "title", "elements": [{"label", "angle", "radius"}, …]}
    {"type": "superchart", "title", "elements": [chart, …]}        several axes in one figure
    {"type": "unknown", "title", "elements": []}

It is read back from the drawn artists, since that is all a figure keeps. What cannot be read is `unknown`; the caller
turns an exception into a note, so nothing here needs to be careful.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    Chart = dict[str, Any]

MAX_POINTS = 20_000  # of a chart or a table; beyond, the picture has to do


def picture(figure: Any) -> bytes:
    import io

    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", bbox_inches="tight")
    return buffer.getvalue()


def chart(figure: Any) -> Chart | None:
    """What a figure shows; nothing if it has no axes."""
    charts = [axes_chart(axes) for axes in figure.axes if axes.get_label() != "<colorbar>"]
    if len(charts) > 1:
        title = getattr(figure, "get_suptitle", str)()
        return {"type": "superchart", "title": title, "elements": charts}
    return charts[0] if charts else None


def axes_chart(axes: Any) -> Chart:
    title = axes.get_title()
    for kind, read in (
        ("pie", wedges),
        ("box_and_whisker", boxes),
        ("bar", bars),
        ("line", lines),
        ("scatter", dots),
    ):
        elements = read(axes)
        if elements:
            described = {"type": kind, "title": title, "elements": elements}
            if kind != "pie":
                described.update(labels(axes))
            if kind in ("line", "scatter"):
                described.update(scales(axes))
            return described
    return {"type": "unknown", "title": title, "elements": []}


def labels(axes: Any) -> Chart:
    x, y = axes.get_xlabel(), axes.get_ylabel()
    return {"x_label": x or None, "y_label": y or None, "x_unit": unit(x), "y_unit": unit(y)}


def unit(label: str) -> str | None:
    """`s` of "Time (s)" or "Time [s]"."""
    for left, right in ("()", "[]"):
        if label.endswith(right) and left in label:
            return label[label.rindex(left) + 1 : -1].strip() or None
    return None


def scales(axes: Any) -> Chart:
    result: Chart = {}
    for name, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        ticks = [tick for tick in axis.get_ticklocs() if low <= tick <= high]
        result[f"{name}_ticks"] = values(axis, ticks)
        result[f"{name}_tick_labels"] = [str(text) for text in axis.get_major_formatter().format_ticks(ticks)]
        result[f"{name}_scale"] = scale(axis)
    return result


def scale(axis: Any) -> str:
    module = type(axis.get_major_locator()).__module__
    kinds = {"matplotlib.dates": "datetime", "matplotlib.category": "categorical"}
    return kinds.get(module) or str(axis.get_scale())


def values(axis: Any, numbers: Iterable[Any]) -> list[Any]:
    """Numbers on an axis as what they stand for: moments as ISO 8601, categories as their names."""
    kind = scale(axis)
    if kind == "datetime":
        to_date = sys.modules["matplotlib.dates"].num2date
        return [to_date(float(number)).isoformat() for number in numbers]
    if kind == "categorical":
        names = {position: str(name) for name, position in axis.units._mapping.items()}
        return [names.get(float(number), clean(number)) for number in numbers]
    return [clean(number) for number in numbers]


def clean(value: Any) -> Any:
    """A value as JSON can have it: no NaN, no library's own numbers."""
    if hasattr(value, "isoformat"):
        return value.isoformat() if value == value else None
    if hasattr(value, "item"):
        value = value.item()
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)):
        return value if abs(value) < float("inf") else None
    return str(value)


def named(artist: Any) -> str:
    """The label that the user gave; matplotlib's own begin with an underscore."""
    label = str(artist.get_label())
    return "" if label.startswith("_") else label


def points(axes: Any, xs: Any, ys: Any) -> list[list[Any]]:
    if len(xs) > MAX_POINTS:
        raise ValueError(f"{len(xs)} points, the limit is {MAX_POINTS}")
    return [list(pair) for pair in zip(values(axes.xaxis, xs), values(axes.yaxis, ys))]  # noqa: B905 - not in 3.8


def lines(axes: Any) -> list[Chart]:
    result = []
    for line in axes.lines:
        # axhline and the like run from edge to edge, in other coordinates than the data's
        if line.get_visible() and all(line.get_transform().contains_branch_seperately(axes.transData)):
            result.append({"label": named(line), "points": points(axes, *line.get_data(orig=False))})
    return result


def dots(axes: Any) -> list[Chart]:
    result = []
    for collection in axes.collections:
        if type(collection).__name__ == "PathCollection":
            offsets = collection.get_offsets()
            result.append({"label": named(collection), "points": points(axes, offsets[:, 0], offsets[:, 1])})
    return result


def bars(axes: Any) -> list[Chart]:
    result = []
    for container in axes.containers:
        if type(container).__name__ == "BarContainer":
            upright = container.orientation != "horizontal"
            name = positions(axes.xaxis if upright else axes.yaxis)
            for bar in container.patches:
                middle = bar.get_x() + bar.get_width() / 2 if upright else bar.get_y() + bar.get_height() / 2
                value = clean(bar.get_height() if upright else bar.get_width())
                result.append({"label": name(middle), "group": named(container), "value": value})
    return result


def positions(axis: Any) -> Any:
    """A function from a place on the axis to its name: the nearest tick's, if ticks were given, else the number."""
    ticks = list(axis.get_ticklocs())
    texts = [str(text) for text in axis.get_major_formatter().format_ticks(ticks)]
    fixed = scale(axis) == "categorical" or type(axis.get_major_locator()).__name__ == "FixedLocator"

    def name(place: float) -> str:
        if scale(axis) == "datetime":
            return str(values(axis, [place])[0])
        if not (fixed and ticks):
            return format(place, "g")
        return texts[min(range(len(ticks)), key=lambda index: abs(ticks[index] - place))]

    return name


def wedges(axes: Any) -> list[Chart]:
    return [
        {"label": named(patch), "angle": round(abs(patch.theta2 - patch.theta1), 3), "radius": clean(patch.r)}
        for patch in axes.patches
        if type(patch).__name__ == "Wedge"
    ]


def boxes(axes: Any) -> list[Chart]:
    """Boxes, if all lines of the axes are what `boxplot` draws: per box two whiskers, two caps, a median, fliers.

    The box itself is a closed line or a patch and tells nothing that the whiskers do not.
    """
    result: list[Chart] = []
    rest = [line for line in axes.lines if len(line.get_xdata()) not in (5, 11) or not closed(line)]
    while len(rest) >= 5:
        whiskers, caps, median, rest = rest[:2], rest[2:4], rest[4], rest[5:]
        if any(len(line.get_xdata()) != 2 for line in [*whiskers, *caps, median]):
            return []
        upright = equal(whiskers[0].get_xdata()) and equal(whiskers[1].get_xdata())
        along = "get_ydata" if upright else "get_xdata"
        if not equal(getattr(caps[0], along)()) or not equal(getattr(median, along)()):
            return []
        outliers = []
        if rest and rest[0].get_linestyle() == "None":
            outliers = [clean(value) for value in getattr(rest.pop(0), along)()]
        axis, place = (
            (axes.xaxis, whiskers[0].get_xdata()[0]) if upright else (axes.yaxis, whiskers[0].get_ydata()[0])
        )
        (first, low), (third, high) = (map(float, getattr(line, along)()) for line in whiskers)
        middle = float(getattr(median, along)()[0])
        box = {"label": positions(axis)(place), "min": low, "first_quartile": first, "median": middle}
        box.update({"third_quartile": third, "max": high, "outliers": outliers})
        if box not in result:  # drawn twice, to colour it
            result.append(box)
    return [] if rest else result


def closed(line: Any) -> bool:
    xs, ys = line.get_xdata(), line.get_ydata()
    return bool(xs[0] == xs[-1] and ys[0] == ys[-1])


def equal(pair: Any) -> bool:
    return bool(pair[0] == pair[1])


def table(frame: Any) -> Chart | None:
    """A data frame by column; nothing if it is large."""
    if frame.size > MAX_POINTS:
        raise ValueError(f"{frame.size} values, the limit is {MAX_POINTS}")
    return {str(name): [clean(value) for value in column] for name, column in frame.items()}
