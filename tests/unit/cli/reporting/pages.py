"""What a page of HTML holds, read as a browser reads it, and what none may hold."""

import re
from html.parser import HTMLParser

VOID = {"meta", "img", "br", "hr"}
# Elements that SVG closes by a slash.
_ADDRESSES = re.compile(r"^(?:data:image/png;base64,|#)")


class Page(HTMLParser):
    """Text, tables and pictures of a page; a mismatched tag, an address or a handler of events is an error."""

    def __init__(self, text):
        super().__init__()
        self.open, self.text, self.images, self.tags = [], "", [], []
        self.tables = []
        self.feed(text)
        self.close()
        assert self.open == [], "elements that are not closed"

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        for name, value in attributes:
            assert not name.startswith("on"), f"<{tag} {name}>"
            if name in ("src", "href", "xlink:href", "srcset", "action", "data"):
                assert _ADDRESSES.match(value), f"<{tag} {name}={value[:40]}>"
        if tag == "img":
            self.images.append(dict(attributes)["src"])
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> without its beginning"
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("style", "script"):
            return
        self.text += data
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data

    def table(self, heading):
        """Return the rows of the table with this heading, by heading."""
        head, *rows = next(table for table in self.tables if heading in table[0])
        return [dict(zip(head, row, strict=True)) for row in rows]
