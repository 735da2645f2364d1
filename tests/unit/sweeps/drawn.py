"""Whether the texts of a figure can be read."""

import itertools


def check_widths(pictures, figures):
    """Check that every picture is there for both widths, with texts that can be read."""
    for picture in pictures:
        assert picture.count("<svg ") == 2
    assert len(figures) == 2 * len(pictures)
    for figure in figures:
        check_texts(figure)


def check_texts(figure):
    """Check that no text reaches out of a picture that was drawn, and no tick's label into the next one's."""
    width, height = figure.bbox.size
    texts = [*figure.texts]  # the title over all panels
    texts += [text for legend in figure.legends for text in (*legend.get_texts(), legend.get_title())]
    for axes in figure.axes:
        if not axes.get_visible():
            continue
        texts += [axes.title, axes.xaxis.label, axes.yaxis.label]
        for axis, limits in ((axes.xaxis, sorted(axes.get_xlim())), (axes.yaxis, sorted(axes.get_ylim()))):
            ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
            ticks = sorted(ticks, key=lambda tick: tick.get_loc())
            ticks = [tick for tick in ticks if limits[0] <= tick.get_loc() <= limits[1]]
            labels = [tick.label1 for tick in ticks if tick.label1.get_visible() and tick.label1.get_text()]
            texts += labels
            if all(label.get_rotation() in (0, 90) for label in labels):
                boxes = [label.get_window_extent() for label in labels]
                assert not any(box.overlaps(other) for box, other in itertools.pairwise(boxes)), labels
    for text in texts:
        box = text.get_window_extent()
        if text.get_text() and text.get_visible():
            assert box.x0 >= 0, text
            assert box.y0 >= 0, text
            assert box.x1 <= width, text
            assert box.y1 <= height, text
