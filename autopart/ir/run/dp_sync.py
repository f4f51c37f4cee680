"""What data-parallel ranks send each other: a method, for all parameters or by their names.

```python
dp_sync = "all_reduce"  # the sum of all gradients, as without
dp_sync = "top_k:0.01"  # the largest hundredth of every gradient, with a memory of what was left out
dp_sync = "*norm*=all_reduce,*.bias=all_reduce,*=top_k:0.01"  # by name: what matches first holds
dp_sync = {"strategy": "qsgd", "bits": 4, "from_step": 100, "seed": 1}  # exact for the first 100 steps
dp_sync = "gossip:ring"  # every rank its own model, averaged with its neighbours'
```

Methods of *gradients* change `.grad` alone: replicas of the model stay equal, bit for bit. With methods of *models*
every data rank has its own parameters, which are brought closer after the optimizer's step (`pm.attach(optimizer)`).

The axis is `dp`; on a mesh with `dpr` beside it, it is `dpr`, and over `dp` gradients are summed as they are: exact
inside a node, the method between nodes (`across="node"` asks for that in words). With `zero=1` methods of gradients are
given whole gradients, and do what they do without.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

from autopart.common.names import first_of
from autopart.errors import OptionError

if TYPE_CHECKING:
    from autopart.ir.mesh import Mesh

GRAPHS = ("ring", "grid", "exp", "one_peer", "complete")
"""Who averages with whom: neighbours on a ring, on a grid, those a power of two away, one of these after the other
(Ying et al. 2021, arXiv:2110.13363), all."""

FORM = "dp_sync='top_k:0.01', or {'strategy': 'top_k', 'ratio': 0.01, 'only': {'*.bias': 'all_reduce'}}"


@dataclass(frozen=True)
class Kind:
    """What there is to say of a method beside its name: what it changes, and the numbers that it takes, in order, with
    their defaults (None: it has to be given)."""

    changes: Literal["gradients", "models"]
    takes: Mapping[str, Any] = field(default_factory=dict)


METHODS: dict[str, Kind] = {
    "all_reduce": Kind("gradients"),
    "parameter_server": Kind("gradients"),
    "qsgd": Kind("gradients", {"bits": None}),
    "top_k": Kind("gradients", {"ratio": None, "memory": True}),
    "sign": Kind("gradients", {"memory": True}),
    "double_squeeze": Kind("gradients", {"compressor": None}),
    "ef21": Kind("gradients", {"ratio": None}),
    "ef21_sgdm": Kind("gradients", {"ratio": None, "momentum": 0.1}),
    "neolithic": Kind("gradients", {"ratio": None, "rounds": 2}),
    "powersgd": Kind("gradients", {"rank": None}),
    "gossip": Kind("models", {"graph": None, "every": 0}),
    "exact_diffusion": Kind("models", {"graph": None}),
    "gradient_tracking": Kind("models", {"graph": None}),
    "local": Kind("models", {"every": None}),
    "diloco": Kind("models", {"every": None, "outer_lr": 0.7, "outer_momentum": 0.9}),
}
"""Every method. PSGD: all_reduce, parameter_server. QSGD: Alistarh et al. 2017 (arXiv:1610.02132). top_k, sign: error
feedback, MEM-SGD (Stich et al. 2018, arXiv:1809.07599). DoubleSqueeze: Tang et al. 2019 (arXiv:1905.05957). EF21:
Richtarik et al. 2021 (arXiv:2106.05203), with momentum Fatkhullin et al. 2023 (arXiv:2305.15155). NEOLITHIC: Huang et
al. 2022 (arXiv:2206.03665). PowerSGD: Vogels et al. 2019 (arXiv:1905.13727). Gossip: decentralized SGD, Lian et al.
2017 (arXiv:1705.09056), with an average of all `every` so many steps Chen et al. 2021 (arXiv:2105.09080). Exact
diffusion: Yuan et al. 2019 (arXiv:1702.05122). Gradient tracking: Nedic et al. 2017 (arXiv:1607.03218). Local SGD:
Stich 2019 (arXiv:1805.09767). DiLoCo: Douillard et al. 2023 (arXiv:2311.08105)."""

COMPRESSORS = ("top_k", "sign", "qsgd")
"""What `double_squeeze` may send."""

_NUMBERS: dict[str, tuple[type, Any, str]] = {
    "bits": (int, lambda bits: 2 <= bits <= 8, "a number of bits from 2 to 8, the sign among them"),
    "ratio": (float, lambda ratio: 0 < ratio <= 1, "a share of the elements, above 0 and at most 1"),
    "memory": (bool, lambda memory: True, "true or false"),
    "momentum": (float, lambda momentum: 0 < momentum <= 1, "the weight of a new gradient, above 0 and at most 1"),
    "rounds": (int, lambda rounds: rounds >= 1, "a number of rounds from 1"),
    "rank": (int, lambda rank: rank >= 1, "a rank from 1"),
    "every": (int, lambda every: every >= 0, "a number of optimizer steps"),
    "outer_lr": (float, lambda rate: rate > 0, "a learning rate above 0"),
    "outer_momentum": (float, lambda momentum: 0 <= momentum < 1, "a momentum from 0, below 1"),
}


@dataclass(frozen=True)
class Method:
    """One method and its numbers, `{"ratio": 0.01}`, complete.

    >>> str(Method.parse("neolithic:0.05,2")), Method.parse("double_squeeze:sign").compressor
    ('neolithic:0.05,2', Method(name='sign', numbers=(('memory', True),)))
    """

    name: str
    numbers: tuple[tuple[str, Any], ...] = ()

    def __getattr__(self, name: str) -> Any:
        try:
            return dict(object.__getattribute__(self, "numbers"))[name]
        except KeyError:
            raise AttributeError(name) from None

    def __str__(self) -> str:
        takes = METHODS[self.name].takes
        shown = [takes[name] is None or number != takes[name] for name, number in self.numbers]
        last = max((index for index, is_shown in enumerate(shown) if is_shown), default=-1)
        texts = [str(number).lower() for _, number in self.numbers[: last + 1]]
        return ":".join([self.name, *([",".join(texts)] if texts else [])])

    @property
    def changes(self) -> str:
        """`"gradients"` or `"models"`."""
        return "gradients" if self == HOOK else METHODS[self.name].changes

    @property
    def is_exact(self) -> bool:
        """Whether the sum of all gradients comes of it."""
        return self.name in ("all_reduce", "parameter_server")

    @staticmethod
    def parse(method: Any) -> Method:
        """From `"top_k:0.01"` or `{"strategy": "top_k", "ratio": 0.01}`. Raises OptionError for anything else."""
        if isinstance(method, Method):
            return method
        if isinstance(method, str):
            name, _, rest = method.strip().partition(":")
            numbers = _numbers_of(name, rest)
        elif isinstance(method, Mapping) and isinstance(method.get("strategy"), str):
            name, _, rest = str(method["strategy"]).partition(":")
            numbers = {**_numbers_of(name, rest), **{key: value for key, value in method.items() if key != "strategy"}}
        else:
            raise OptionError(f"dp_sync={method!r} is no method", hint=FORM)
        takes = _kind_of(name).takes
        for key in numbers:
            if key not in takes:
                raise OptionError(f"dp_sync '{name}' has no {key}", why=f"it takes {', '.join(takes) or 'nothing'}",
                                  hint=FORM)  # fmt: skip
        complete = {**takes, **numbers}
        return Method(name, tuple((key, _checked(name, key, value)) for key, value in complete.items()))

    def as_data(self) -> dict[str, Any]:
        """In the form that `parse` reads, as a plan has it."""
        shown = {key: str(value) if isinstance(value, Method) else value for key, value in self.numbers}
        return {"strategy": self.name, **shown}


def _kind_of(name: str) -> Kind:
    if name not in METHODS:
        raise OptionError(f"unknown dp_sync='{name}'", why=f"the methods are {', '.join(METHODS)}", hint=FORM)
    return METHODS[name]


def _numbers_of(name: str, text: str) -> dict[str, Any]:
    """The numbers after a method's name: `0.05,2`; of `double_squeeze` all of it is the other method."""
    takes = list(_kind_of(name).takes)
    if not text:
        return {}
    if takes[:1] == ["compressor"]:
        return {"compressor": text}
    parts = text.split(",")
    if len(parts) > len(takes):
        why = f"'{name}' takes {', '.join(takes) or 'nothing'}"
        raise OptionError(f"dp_sync='{name}:{text}' says too much", why=why, hint=FORM)
    return dict(zip(takes, parts, strict=False))


def _checked(name: str, key: str, value: Any) -> Any:
    """A number of a method, as it is meant. Raises OptionError where it cannot be."""
    if key == "compressor":
        if value is None or (method := Method.parse(value)).name not in COMPRESSORS:
            why = f"it is one of {', '.join(COMPRESSORS)}"
            raise OptionError(f"dp_sync '{name}' cannot send '{value}'", why=why, hint=f"dp_sync='{name}:top_k:0.01'")
        return method
    if key == "graph":
        if value not in GRAPHS:
            raise OptionError(f"dp_sync '{name}' knows no graph '{value}'", why=f"there are {', '.join(GRAPHS)}",
                              hint=f"dp_sync='{name}:ring'")  # fmt: skip
        return value
    kind, fits, words = _NUMBERS[key]
    if key == "every" and METHODS[name].takes[key] is None:
        fits, words = (lambda every: every >= 1), "a number of optimizer steps from 1"
    number = _read(kind, value)
    if number is None or not fits(number):
        raise OptionError(f"dp_sync '{name}' with {key}={value}", why=f"it is {words}", hint=FORM)
    return number


def _read(kind: type, value: Any) -> Any:
    """A number from what a user gives; None where it is not one of this kind."""
    if isinstance(value, str):
        value = value.removesuffix("bit") if kind is int else value
        value = {"true": True, "false": False}.get(value.lower(), value)
        try:
            value = value if isinstance(value, bool) else float(value)
        except ValueError:
            return None
    if (kind is bool) != isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return None if kind is int and value != int(value) else kind(value)


EXACT = Method("all_reduce")
HOOK = Method("hook")
"""In the place of a method: what a hook of the user's does."""


@dataclass(frozen=True)
class DpSync:
    """A method for all parameters, and others for some: {pattern of names (`fnmatch`): method}; what matches first
    holds. `from_step`: gradients are summed exactly in so many first steps. `seed`: of what methods draw."""

    method: Method = EXACT
    only: tuple[tuple[str, Method], ...] = ()
    across: Literal["all", "node"] = "all"
    from_step: int = 0
    seed: int = 0

    def __str__(self) -> str:
        return ",".join([*(f"{pattern}={method}" for pattern, method in self.only),
                         f"*={self.method}" if self.only else str(self.method)])  # fmt: skip

    @staticmethod
    def parse(dp_sync: Any) -> DpSync:
        """From text, or a mapping as in a plan. Raises OptionError for what cannot be meant."""
        if dp_sync is None or isinstance(dp_sync, DpSync):
            return dp_sync or ALL_REDUCE
        if isinstance(dp_sync, str):
            rows = [part.partition("=") for part in re.split(r",(?=[^,]*=)", dp_sync)]
            if len(rows) == 1 and not rows[0][1]:
                return _complete(DpSync(Method.parse(dp_sync)))
            dp_sync = {"only": {name.strip(): method.strip() for name, _, method in rows}}
        if not isinstance(dp_sync, Mapping) or not dp_sync:
            raise OptionError(f"unknown dp_sync={dp_sync!r}", hint=FORM)
        reserved = {"across", "from_step", "seed", "only"}
        base = {key: value for key, value in dp_sync.items() if key not in reserved}
        only = dp_sync.get("only", {})
        if not isinstance(only, Mapping):
            raise OptionError(f"dp_sync only={only!r} is not methods by name", hint=FORM)
        named = [(str(name), Method.parse(method)) for name, method in only.items()]
        method = Method.parse(base) if base else next((parsed for name, parsed in named if name == "*"), EXACT)
        named = [(name, parsed) for name, parsed in named if name != "*"]
        from_step, seed = _read(int, dp_sync.get("from_step", 0)), _read(int, dp_sync.get("seed", 0))
        if from_step is None or from_step < 0 or seed is None:
            raise OptionError(
                "dp_sync from_step and seed are whole numbers", hint="{'strategy': ..., 'from_step': 100}"
            )
        across = dp_sync.get("across", "all")
        if across not in ("all", "node"):
            raise OptionError(
                f"dp_sync across={across!r} is unknown", hint="'all' data ranks, or 'node': between nodes"
            )
        return _complete(DpSync(method, tuple(named), across, from_step, seed))

    def as_data(self) -> dict[str, Any]:
        """As a plan has it, in the form that `parse` reads."""
        if self.is_default:
            return self.method.as_data()
        data = {**self.method.as_data(), "across": self.across, "from_step": self.from_step, "seed": self.seed}
        return data | ({"only": {name: str(method) for name, method in self.only}} if self.only else {})

    def of(self, name: str) -> Method:
        """The method for a parameter."""
        return next((method for pattern, method in self.only if fnmatchcase(name, pattern)), self.method)

    @property
    def is_default(self) -> bool:
        return self == ALL_REDUCE

    @property
    def changes_models(self) -> bool:
        """Whether every data rank has a model of its own."""
        return self.method.changes == "models"

    def axis(self, mesh: Mesh) -> str:
        """The axis whose ranks the method is for; "" where there is none. Raises OptionError where `across` asks for
        one that is not there."""
        rows = mesh.along("rows")
        if self.across == "node" and len(rows) < 2:
            raise OptionError(
                f"dp_sync across='node' on {mesh}", why="which ranks share a node is said by two axes of data",
                hint="mesh='dpr2,dp4': the method over dpr, exact sums over dp",
            )  # fmt: skip
        return rows[0] if rows else ""

    def check_names(self, names: Iterable[str]) -> None:
        """Raises OptionError for a pattern that is for none of the parameters."""
        known = list(names)
        for pattern, _ in self.only:
            if not any(fnmatchcase(name, pattern) for name in known):
                raise OptionError(f"dp_sync of '{pattern}' matches no parameter", why=f"they are {first_of(known)}",
                                  hint="names as in model.named_parameters()")  # fmt: skip


ALL_REDUCE = DpSync()
"""All gradients are summed as they are."""


def _complete(sync: DpSync) -> DpSync:
    """The same, checked as a whole. Raises OptionError where methods do not go together."""
    if any(method.changes == "models" for _, method in sync.only) or (sync.changes_models and sync.only):
        raise OptionError(f"dp_sync='{sync}' mixes models with gradients", why="a method of models is for all "
                          "parameters: every data rank has its own", hint=f"dp_sync='{sync.method}'")  # fmt: skip
    if sync.changes_models and sync.from_step:
        raise OptionError(f"dp_sync='{sync}' with from_step={sync.from_step}", why="replicas differ from the first "
                          "step on", hint="train the first steps with dp_sync='all_reduce'")  # fmt: skip
    return sync


def neighbours(graph: str, num_ranks: int) -> int:
    """How many ranks one exchanges with, where it is most.

    >>> [neighbours(graph, 8) for graph in GRAPHS]
    [2, 4, 3, 1, 7]
    """
    height = max(h for h in range(1, math.isqrt(num_ranks) + 1) if num_ranks % h == 0)
    counts = {
        "ring": 2, "grid": sum(min(2, side - 1) for side in (height, num_ranks // height)),
        "exp": math.ceil(math.log2(num_ranks)), "one_peer": 1,
    }  # fmt: skip
    return min(counts.get(graph, num_ranks - 1), num_ranks - 1)


def sent_elements(method: Method, numel: int) -> int:
    """k of a method that sends the k largest of so many elements: max(1, round(ratio numel)).

    >>> sent_elements(Method.parse("top_k:0.01"), 1000), sent_elements(Method.parse("top_k:0.01"), 4)
    (10, 1)
    """
    return min(numel, max(1, round(method.ratio * numel)))


def sent_bytes(method: Method, numel: int, itemsize: int) -> int:
    """The bytes of what a rank makes of a vector of so many elements to send it: values and their places in 32 bits,
    or a scale and so many bits an element.

    >>> sent_bytes(Method.parse("top_k:0.01"), 1000, 4), sent_bytes(Method.parse("qsgd:4bit"), 1000, 4)
    (80, 504)
    """
    if method.name == "double_squeeze":
        return sent_bytes(method.compressor, numel, itemsize)
    if method.name in ("top_k", "ef21", "ef21_sgdm", "neolithic"):
        rounds = method.rounds if method.name == "neolithic" else 1
        return rounds * sent_elements(method, numel) * (itemsize + 4)
    if method.name in ("sign", "qsgd"):
        bits = 1 if method.name == "sign" else method.bits
        return itemsize + -(-numel * bits // 8)
    return numel * itemsize
