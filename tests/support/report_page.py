"""Read a report: the JSON that its page shows, and all texts in it."""

import json
import re


def data_of(html):
    """Return the data of a page."""
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)
    return json.loads(text)


def texts_of(html):
    """Return all strings of a page's data as one text."""
    return "\n".join(_strings(data_of(html)))


def _strings(value):
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
