"""The option `dp_sync=`: methods of data-parallel communication, for all parameters or by name.

```python
dp_sync = "all_reduce"  # the sum of all gradients: the default
dp_sync = "top_k:0.01"  # the largest hundredth of every gradient, with error feedback
dp_sync = "*norm*=all_reduce,*.bias=all_reduce,*=top_k:0.01"  # by name: the first match applies
dp_sync = {"strategy": "qsgd", "bits": 4, "from_step": 100, "seed": 1}  # exact for the first 100 steps
dp_sync = "gossip:ring"  # every rank has its own model, averaged with its neighbours
```

Some methods change *gradients*: they only change `.grad`, and model replicas stay bitwise identical. Others change
*models*: every data rank has different parameters, which the method averages after the optimizer step
(`pm.attach(optimizer)`).

The method runs over the mesh axis `dp`. If the mesh also has `dpr`, gradients are all-reduced exactly over `dp` (within
a node), and the method runs over `dpr` (between nodes). `across="node"` requires a mesh with `dpr`. With `zero=1`,
methods that change gradients get unsharded gradients, so they work as without ZeRO.
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
from autopart.extras.dp_sync import method_costs

if TYPE_CHECKING:
    from autopart.ir.decisions import Decisions
    from autopart.ir.mesh import Mesh
    from autopart.ir.program import Program
    from autopart.ir.run.sync_option import Exchange, MethodParameters
    from autopart.ir.trace import Trace

GRAPHS = ("ring", "grid", "exp", "one_peer", "complete")
"""Names of the communication graphs of gossip.

A rank exchanges with its neighbours on a ring ("ring") or a grid ("grid"), with all ranks whose distance is a power of
two ("exp"), with one of them per step ("one_peer": Ying et al. 2021, arXiv:2110.13363), or with all ranks ("complete").
"""

FORM = "dp_sync='top_k:0.01', or {'strategy': 'top_k', 'ratio': 0.01, 'only': {'*.bias': 'all_reduce'}}"


@dataclass(frozen=True)
class MethodSpec:
    """Specification of a `dp_sync` method: what it changes (gradients or models), and its parameters.

    `takes`: {parameter: default value}. None marks a required parameter.
    """

    changes: Literal["gradients", "models"]
    takes: Mapping[str, Any] = field(default_factory=dict)


METHODS: dict[str, MethodSpec] = {
    "all_reduce": MethodSpec("gradients"),
    "parameter_server": MethodSpec("gradients"),
    "qsgd": MethodSpec("gradients", {"bits": None}),
    "top_k": MethodSpec("gradients", {"ratio": None, "memory": True}),
    "sign": MethodSpec("gradients", {"memory": True}),
    "double_squeeze": MethodSpec("gradients", {"compressor": None}),
    "ef21": MethodSpec("gradients", {"ratio": None}),
    "ef21_sgdm": MethodSpec("gradients", {"ratio": None, "momentum": 0.1}),
    "neolithic": MethodSpec("gradients", {"ratio": None, "rounds": 2}),
    "powersgd": MethodSpec("gradients", {"rank": None}),
    "gossip": MethodSpec("models", {"graph": None, "every": 0}),
    "exact_diffusion": MethodSpec("models", {"graph": None}),
    "gradient_tracking": MethodSpec("models", {"graph": None}),
    "local": MethodSpec("models", {"every": None}),
    "diloco": MethodSpec("models", {"every": None, "outer_lr": 0.7, "outer_momentum": 0.9}),
}
"""All `dp_sync` methods.

PSGD: all_reduce, parameter_server. QSGD: Alistarh et al. 2017 (arXiv:1610.02132). top_k, sign: error feedback, MEM-SGD
(Stich et al. 2018, arXiv:1809.07599). DoubleSqueeze: Tang et al. 2019 (arXiv:1905.05957). EF21: Richtarik et al. 2021
(arXiv:2106.05203), with momentum Fatkhullin et al. 2023 (arXiv:2305.15155). NEOLITHIC: Huang et al. 2022
(arXiv:2206.03665). PowerSGD: Vogels et al. 2019 (arXiv:1905.13727). Gossip: decentralized SGD, Lian et al. 2017
(arXiv:1705.09056); with a global average every `every` steps, Chen et al. 2021 (arXiv:2105.09080). Exact diffusion:
Yuan et al. 2019 (arXiv:1702.05122). Gradient tracking: Nedic et al. 2017 (arXiv:1607.03218). Local SGD: Stich 2019
(arXiv:1805.09767). DiLoCo: Douillard et al. 2023 (arXiv:2311.08105).
"""

COMPRESSORS = ("top_k", "sign", "qsgd")
"""Compressors of `double_squeeze`."""

_NUMBERS: dict[str, tuple[type, Any, str]] = {
    "bits": (int, lambda bits: 2 <= bits <= 8, "a number of bits from 2 to 8, including the sign"),
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
    """A `dp_sync` method and the values of all its parameters, such as `top_k` with `{"ratio": 0.01}`.

    >>> str(Method.parse("neolithic:0.05,2")), Method.parse("double_squeeze:sign").compressor
    ('neolithic:0.05', Method(name='sign', numbers=(('memory', True),)))
    """

    name: str
    numbers: tuple[tuple[str, Any], ...] = ()

    def __getattr__(self, name: str) -> Any:
        try:
            return dict(object.__getattribute__(self, "numbers"))[name]
        except KeyError:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'") from None

    def __str__(self) -> str:
        defaults = METHODS[self.name].takes
        shown = [defaults[name] is None or number != defaults[name] for name, number in self.numbers]
        last = max((index for index, is_shown in enumerate(shown) if is_shown), default=-1)
        texts = [str(number).lower() for _, number in self.numbers[: last + 1]]
        return ":".join([self.name, *([",".join(texts)] if texts else [])])

    @property
    def changes(self) -> str:
        """The tensors that the method changes: `"gradients"` or `"models"`."""
        return "gradients" if self == HOOK else METHODS[self.name].changes

    def sent_bytes(self, numel: int, itemsize: int) -> int:
        return method_costs.sent_bytes(self, numel, itemsize)

    def factor_bytes(self, elements: float, itemsize: int, shape: tuple[int, ...]) -> float:
        return method_costs.factor_bytes(self, elements, itemsize, shape)

    def exchanges(self, of: MethodParameters, num_ranks: Any, several: int) -> list[Exchange]:
        return method_costs.exchanges(self, of, num_ranks, several)

    def passes(self, num_ranks: int) -> float:
        return method_costs.passes(self, num_ranks)

    def state_bytes(self, of: MethodParameters, num_ranks: int) -> float:
        return method_costs.state_bytes(self, of, num_ranks)

    @staticmethod
    def parse(method: Any) -> Method:
        """Parse a method: `"top_k:0.01"` or `{"strategy": "top_k", "ratio": 0.01}`. Raises OptionError."""
        if isinstance(method, Method):
            return method
        if isinstance(method, str):
            name, _, rest = method.strip().partition(":")
            numbers = _numbers_of(name, rest)
        elif isinstance(method, Mapping) and isinstance(method.get("strategy"), str):
            name, _, rest = str(method["strategy"]).partition(":")
            numbers = {**_numbers_of(name, rest), **{key: value for key, value in method.items() if key != "strategy"}}
        else:
            raise OptionError(f"dp_sync={method!r} is not a method", hint=FORM)
        defaults = _kind_of(name).takes
        for key in numbers:
            if key not in defaults:
                raise OptionError(
                    f"dp_sync '{name}' has no parameter '{key}'",
                    why=f"its parameters are {', '.join(defaults)}" if defaults else "it has no parameters", hint=FORM,
                )  # fmt: skip
        complete = {**defaults, **numbers}
        return Method(name, tuple((key, _checked(name, key, value)) for key, value in complete.items()))

    def as_data(self) -> dict[str, Any]:
        """Return the method as a mapping, which plans store and `parse` reads."""
        shown = {key: str(value) if isinstance(value, Method) else value for key, value in self.numbers}
        return {"strategy": self.name, **shown}


def _kind_of(name: str) -> MethodSpec:
    if name not in METHODS:
        raise OptionError(f"unknown dp_sync='{name}'", why=f"the methods are {', '.join(METHODS)}", hint=FORM)
    return METHODS[name]


def _numbers_of(name: str, text: str) -> dict[str, Any]:
    """Parse the text after the name of a method, `0.05,2`, to {parameter: value}.

    For `double_squeeze` the text names a compressor, such as `sign`.
    """
    parameters = list(_kind_of(name).takes)
    if not text:
        return {}
    if parameters[:1] == ["compressor"]:
        return {"compressor": text}
    values = text.split(",")
    if len(values) > len(parameters):
        why = f"'{name}' takes {', '.join(parameters) or 'nothing'}"
        raise OptionError(f"dp_sync='{name}:{text}' has too many parameters", why=why, hint=FORM)
    return dict(zip(parameters, values, strict=False))


def _checked(name: str, key: str, value: Any) -> Any:
    """Validate and convert one parameter of a `dp_sync` method."""
    if key == "compressor":
        if value is None or (method := Method.parse(value)).name not in COMPRESSORS:
            why = f"it is one of {', '.join(COMPRESSORS)}"
            raise OptionError(f"dp_sync '{name}' cannot send '{value}'", why=why, hint=f"dp_sync='{name}:top_k:0.01'")
        return method
    if key == "graph":
        if value not in GRAPHS:
            raise OptionError(
                f"dp_sync '{name}' has no graph '{value}'", why=f"the graphs are {', '.join(GRAPHS)}",
                hint=f"dp_sync='{name}:ring'",
            )  # fmt: skip
        return value
    type_, is_valid, requirement = _NUMBERS[key]
    if key == "every" and METHODS[name].takes[key] is None:
        is_valid, requirement = (lambda every: every >= 1), "a number of optimizer steps from 1"
    number = _read(type_, value)
    if number is None or not is_valid(number):
        raise OptionError(
            f"dp_sync '{name}': {key}={value} is not valid", why=f"{key} must be {requirement}", hint=FORM
        )
    return number


def _read(kind: type, value: Any) -> Any:
    """Convert a user's value to a number of this type; None if the value is not such a number."""
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
"""Placeholder for a communication hook that the user registers."""


@dataclass(frozen=True)
class DpSync:
    """The value of `dp_sync=`: one method for all parameters, and exceptions by parameter name.

    `only`: the exceptions, as (name pattern for `fnmatch`, method). The first matching pattern applies. `across`:
    "node" if the method must run only between nodes (over `dpr`). `from_step`: number of steps at the start in which
    gradients are all-reduced exactly. `seed`: seed of the methods' random numbers.
    """

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
        """Parse text, or a mapping as in a plan. Raises OptionError for invalid values."""
        if dp_sync is None or isinstance(dp_sync, DpSync):
            return dp_sync or DpSync()
        if isinstance(dp_sync, str):
            rows = [part.partition("=") for part in re.split(r",(?=[^,]*=)", dp_sync)]
            if len(rows) == 1 and not rows[0][1]:
                return _checked_combination(DpSync(Method.parse(dp_sync)))
            dp_sync = {"only": {name.strip(): method.strip() for name, _, method in rows}}
        if not isinstance(dp_sync, Mapping) or not dp_sync:
            raise OptionError(f"unknown dp_sync={dp_sync!r}", hint=FORM)
        reserved = {"across", "from_step", "seed", "only"}
        base = {key: value for key, value in dp_sync.items() if key not in reserved}
        only = dp_sync.get("only", {})
        if not isinstance(only, Mapping):
            raise OptionError(f"dp_sync only={only!r} is not a mapping of names to methods", hint=FORM)
        named = [(str(name), Method.parse(method)) for name, method in only.items()]
        method = Method.parse(base) if base else next((parsed for name, parsed in named if name == "*"), EXACT)
        named = [(name, parsed) for name, parsed in named if name != "*"]
        from_step, seed = _read(int, dp_sync.get("from_step", 0)), _read(int, dp_sync.get("seed", 0))
        if from_step is None or from_step < 0 or seed is None:
            raise OptionError("dp_sync from_step and seed must be integers", hint="{'strategy': ..., 'from_step': 100}")
        across = dp_sync.get("across", "all")
        if across not in ("all", "node"):
            raise OptionError(
                f"dp_sync across={across!r} is unknown",
                hint="across='all', or across='node' to run the method only between nodes",
            )
        return _checked_combination(DpSync(method, tuple(named), across, from_step, seed))

    def as_data(self) -> dict[str, Any]:
        """Return the option as a mapping, which plans store and `parse` reads."""
        if self.is_default:
            return self.method.as_data()
        data = {**self.method.as_data(), "across": self.across, "from_step": self.from_step, "seed": self.seed}
        return data | ({"only": {name: str(method) for name, method in self.only}} if self.only else {})

    def of(self, name: str) -> Method:
        """Return the `dp_sync` method for a parameter of the model."""
        return next((method for pattern, method in self.only if fnmatchcase(name, pattern)), self.method)

    @property
    def is_default(self) -> bool:
        return self == DpSync()

    @property
    def changes_models(self) -> bool:
        """True if the method averages models: data ranks then have different parameters."""
        return self.method.changes == "models"

    def axis(self, mesh: Mesh) -> str:
        """Return the mesh axis over which the method communicates; "" if there are no data ranks.

        Raises OptionError if `across` needs an axis that the mesh lacks.
        """
        rows = mesh.along("rows")
        if self.across == "node" and len(rows) < 2:
            raise OptionError(
                f"dp_sync across='node' is not possible on {mesh}",
                why="it needs two data axes: dpr between nodes, dp inside a node",
                hint="mesh='dpr2,dp4': the method over dpr, exact sums over dp",
            )
        return rows[0] if rows else ""

    def method_of(self, name: str) -> Method | None:
        """Return the `dp_sync` method for a parameter of the model; None if its gradient is all-reduced."""
        method = self.of(name)
        return None if method == EXACT else method

    def check_storage(self, trace: Trace, decisions: Decisions) -> None:
        """Raise OptionError for a pattern without a match, or for sharding that a method does not support."""
        from autopart.extras.dp_sync.sync_checks import check_storage  # imported late, because it imports torch

        self.check_names(trace.parameters)
        check_storage(self, trace, decisions)

    def check_program(self, program: Program) -> None:
        """Raise OptionError if a method needs the full gradient of a parameter, but no rank has it.

        With `zero=1`, a sharded parameter that is used in more than one layout is gathered at each use, and each use
        reduce-scatters its gradient.
        """
        from autopart.extras.dp_sync.sync_checks import check_full_gradients

        check_full_gradients(self, program)

    def check_names(self, names: Iterable[str]) -> None:
        """Raise OptionError for a pattern that matches no parameter."""
        parameters = list(names)
        for pattern, _ in self.only:
            if not any(fnmatchcase(name, pattern) for name in parameters):
                raise OptionError(
                    f"dp_sync of '{pattern}' matches no parameter", why=f"the parameters are {first_of(parameters)}",
                    hint="names as in model.named_parameters()",
                )  # fmt: skip


def _checked_combination(sync: DpSync) -> DpSync:
    """Return `sync`. Raise OptionError if its methods or options exclude each other."""
    if any(method.changes == "models" for _, method in sync.only) or (sync.changes_models and sync.only):
        raise OptionError(
            f"dp_sync='{sync}' combines a method that averages models with other methods",
            why="a method that averages models applies to all parameters: every data rank has its own model",
            hint=f"dp_sync='{sync.method}'",
        )
    if sync.changes_models and sync.from_step:
        raise OptionError(
            f"dp_sync='{sync}' cannot begin at from_step={sync.from_step}",
            why="if a method averages models, the replicas differ from the first step on",
            hint="train the first steps with dp_sync='all_reduce'",
        )
    return sync
