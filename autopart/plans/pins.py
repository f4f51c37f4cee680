"""Pins: placements and stage boundaries that a user fixes by name. The solver chooses all others.

```python
pins = {
    "model.layers.*.mlp.down_proj.weight": {"tp": "S(1)"},  # a parameter: its stored placement
    "model.layers.*.self_attn.q_proj": {"tp": "R"},  # a module: its weights and operators are replicated
    "model.layers.*.mlp.up_proj/linear": {"tp": "S(2)"},  # an operator: its output, or all tensors: "R, S(0) -> S(2)"
    "stages": {
        "cut_before": ["model.layers.16"],  # a stage begins with this module (or operator)
        "together": [["model.norm", "lm_head"], ["model.layers.*"]],  # on one stage; no layer is split
    },
}
```

In names with placements, `*` matches any text, as in `fnmatch`. If a pin has a block number (`model.layers.3.mlp`), the
layouts of this block are chosen separately. In names under `stages`, `*` matches one component of a name, and each
match is a separate pin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from autopart.common.files import read_text
from autopart.common.json_text import parse_json
from autopart.errors import OptionError
from autopart.ir.layout import Placement
from autopart.ir.mesh import AXES, Axis
from autopart.plans.plan import line_of

FORM = "pins={'model.layers.*.mlp.down_proj.weight': {'tp': 'S(1)'}, 'stages': {'cut_before': ['model.layers.16']}}"


@dataclass(frozen=True)
class LayoutPin:
    """Pin of a placement on one axis, for all parameters or operators whose names match a pattern.

    `text` is the placement, such as `S(0)` or `R -> S(2)`. `of_operator` is True if the pattern is for names of
    operators, False if it is for names of parameters.
    """

    name: str
    axis: str
    text: str

    @property
    def of_operator(self) -> bool:
        return "/" in self.name

    @property
    def is_replicated(self) -> bool:
        return self.text == "R"

    def matches(self, name: str) -> bool:
        return fnmatchcase(name, self.name)

    def __str__(self) -> str:
        return f"'{self.name}' as {self.text} on {self.axis}"


@dataclass(frozen=True)
class CutPin:
    """Pin of a stage boundary: a stage begins with the module or operator `name`."""

    name: str

    def __str__(self) -> str:
        return f"cut_before '{self.name}'"


@dataclass(frozen=True)
class TogetherPin:
    """Pin of several modules to one stage.

    If the names contain `*`, each match is a separate pin: `model.layers.*` keeps each layer on one stage.
    """

    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"together {', '.join(repr(name) for name in self.names)}"


Pin = LayoutPin | CutPin | TogetherPin


@dataclass(frozen=True)
class Pins:
    """All pins of a plan: placements and stage boundaries that a user fixes.

    `text`: content of the pins file, from which error messages take line numbers.
    """

    layouts: tuple[LayoutPin, ...] = ()
    cuts: tuple[CutPin, ...] = ()
    together: tuple[TogetherPin, ...] = ()
    text: str = field(default="", compare=False, repr=False)

    def __bool__(self) -> bool:
        return bool(self.layouts or self.cuts or self.together)

    @staticmethod
    def parse(pins: Pins | Mapping[str, Any] | str | Path | None, axes: tuple[Axis, ...] = AXES) -> Pins:
        """Parse pins from a dict of the form in this module's docstring, or from a JSON file with such a dict.

        Args:
            axes: the mesh axes that can be pinned.
        Raises OptionError for an invalid entry.
        """
        if isinstance(pins, Pins):
            return pins
        text = ""
        if isinstance(pins, (str, Path)):
            pins, text = _read(Path(pins))
        if pins is None:
            return Pins()
        if not isinstance(pins, Mapping):
            raise OptionError(
                f"pins={pins!r} cannot be read",
                why=f"pins must be a dict or a path, not a {type(pins).__name__}",
                hint=FORM,
            )
        known = [axis.name for axis in axes]
        named = [(name, places) for name, places in pins.items() if name != "stages"]
        layouts = [pin for name, places in named for pin in _layouts(name, places, text, known)]
        return Pins(tuple(layouts), *_stages(pins.get("stages", {})), text)

    def where(self, pin: Pin) -> str:
        """Return the line number of a pin in its file, as text; "" if the pins are not from a file."""
        if not self.text:
            return ""
        if isinstance(pin, TogetherPin):
            return line_of(self.text, "together", pin.names[0])
        return line_of(self.text, *["cut_before"] * isinstance(pin, CutPin), pin.name)

    def as_data(self) -> dict[str, Any]:
        """Return the pins as a dict that `parse` accepts."""
        data: dict[str, Any] = {}
        for pin in self.layouts:
            data.setdefault(pin.name, {})[pin.axis] = pin.text
        stages: dict[str, Any] = {}
        if self.cuts:
            stages["cut_before"] = [pin.name for pin in self.cuts]
        if self.together:
            stages["together"] = [list(pin.names) for pin in self.together]
        return data | ({"stages": stages} if stages else {})


def _read(path: Path) -> tuple[Any, str]:
    if not path.exists():
        raise OptionError(f"there is no file of pins at {path}", hint=f"a JSON file like {FORM.removeprefix('pins=')}")
    text = read_text(path, "a file of pins", OptionError, f"a JSON file like {FORM.removeprefix('pins=')}")
    return parse_json(text, str(path), OptionError), text


def _layouts(name: str, places: Any, text: str, known: Sequence[str]) -> list[LayoutPin]:
    where = line_of(text, name) if text else ""
    if not isinstance(places, Mapping) or not places:
        raise OptionError(f"the pin '{name}' names no mesh axis: {places!r}", where=where, hint=FORM)
    pins = []
    for axis, place in places.items():
        if axis not in known:
            why = f"the axes are {', '.join(known)}"
            raise OptionError(f"the pin '{name}' names an unknown axis '{axis}'", why=why, where=where)
        try:
            placed = str(place) if "/" in name and "->" in str(place) else str(Placement.parse(str(place)))
        except ValueError as error:
            hint = (
                "R, or S(d) to shard dim d: S(0) for the weight of a column-parallel nn.Linear, S(1) of a row-parallel"
            )
            raise OptionError(
                f"the pin '{name}' has the invalid placement '{place}'", why=str(error), where=where, hint=hint
            ) from None
        pins.append(LayoutPin(name, axis, placed))
    return pins


def _stages(stages: Any) -> tuple[tuple[CutPin, ...], tuple[TogetherPin, ...]]:
    hint = "'stages': {'cut_before': ['model.layers.16'], 'together': [['model.norm', 'lm_head']]}"
    known = {"cut_before", "together"}
    if not isinstance(stages, Mapping) or not stages.keys() <= known:
        raise OptionError(
            f"pins['stages'] = {stages!r} cannot be read", why="its keys are 'cut_before' and 'together'", hint=hint
        )
    cuts, together = stages.get("cut_before", ()), stages.get("together", ())
    if not _are_names(cuts):
        raise OptionError(f"cut_before = {cuts!r} is not a list of names", hint=hint)
    if not isinstance(together, Sequence) or not all(_are_names(names) and names for names in together):
        raise OptionError(f"together = {together!r} is not a list of lists of names", hint=hint)
    for names in together:
        if len({name.count("*") for name in names}) > 1:
            why = "each match of * is a separate pin, so all names of a list need as many *"
            raise OptionError(f"together {', '.join(map(repr, names))} mixes names with and without *", why=why)
    return tuple(map(CutPin, cuts)), tuple(TogetherPin(tuple(names)) for names in together)


def _are_names(names: Any) -> bool:
    return isinstance(names, (list, tuple)) and all(isinstance(name, str) and name for name in names)
