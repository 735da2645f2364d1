"""Compares two plans of a sweep: which differences only let it grow.

More seeds, values of a field, draws, chosen settings or epochs leave trained runs valid. Any other change would mix
runs that were trained differently.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

_GROWS = re.compile(r"seeds|space\.grid\.[^[]+|space\.samples|adaptive|epochs")
_NOTHING = object()


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Return the differences of two plans as texts, apart from growth; values as JSON has them."""
    rungs = here.get("halving") is not None
    return list(_differences("", there, here, rungs))


def added_epochs(there: Mapping[str, Any], here: Mapping[str, Any]) -> int | None:
    """Return the stored number of epochs where the new plan has more; else None."""
    before, now = there.get("epochs"), here.get("epochs")
    return before if isinstance(before, int) and isinstance(now, int) and now > before else None


def _differences(name: str, there: Any, here: Any, rungs: bool) -> Iterator[str]:
    if _has_grown(name, there, here) and not (name == "epochs" and rungs):
        return
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        for key in {**there, **here}:
            path = f"{name}.{key}" if name else key
            yield from _differences(path, there.get(key, _NOTHING), here.get(key, _NOTHING), rungs)
    elif isinstance(there, list) and isinstance(here, list) and len(there) == len(here):
        for number, (value, other) in enumerate(zip(there, here, strict=True)):
            yield from _differences(f"{name}[{number}]", value, other, rungs)
    else:
        texts = [_text(value) for value in (there, here)]
        if texts[0] != texts[1]:
            short = [text if len(text) <= 60 else f"{text[:40]} ... {text[-15:]}" for text in texts]
            because = " (with halving, the number of epochs cannot grow)" if name == "epochs" and rungs else ""
            yield f"{name or 'plan'}: {short[0]} there, {short[1]} here{because}"


def _has_grown(name: str, there: Any, here: Any) -> bool:
    """Return whether a value may grow, and has grown or stayed."""
    if not _GROWS.fullmatch(name):
        return False
    if isinstance(there, list) and isinstance(here, list):
        return set(map(_text, there)) <= set(map(_text, here))
    return isinstance(there, int) and isinstance(here, int) and there <= here


def _text(value: Any) -> str:
    return "nothing" if value is _NOTHING else json.dumps(value)
