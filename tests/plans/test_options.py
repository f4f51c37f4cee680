"""Options are said once, in `autopart.options`: the functions and the command line take what its table says."""

import inspect

import click
import pytest
import torch
from torch import nn

import autopart
from autopart.cli.main import main
from autopart.errors import OptionError
from autopart.options import (
    OPTIONS,
    Options,
    PlanOptions,
    RunOptions,
    SearchOptions,
    VerifyOptions,
    names_of,
    read_options,
)

TAKES = {
    autopart.parallelize: RunOptions,
    autopart.plan: PlanOptions,
    autopart.verify: VerifyOptions,
    autopart.search: SearchOptions,
}
COMMANDS = {
    "plan": autopart.plan,
    "explain": autopart.plan,
    "verify": autopart.verify,
    "run": autopart.parallelize,
    "search": autopart.search,
}
pytestmark = pytest.mark.whole  # what is left out could be the one that differs
OWN = {autopart.verify: {"rng", "optimizer"}, autopart.search: {"dp_sync"}}
"""What a function takes besides, with another default or form."""

each_function = pytest.mark.parametrize("function", TAKES, ids=lambda function: function.__name__)


def parameters(function):
    return inspect.signature(function).parameters


def keywords(function):
    return [name for name, one in parameters(function).items() if one.kind is one.KEYWORD_ONLY]


def called(function, **options):
    """A call of one of the functions for a small model."""
    mesh = {"parallelize": "tp1", "search": 1}.get(function.__name__, "tp2")
    return function(nn.Linear(4, 4), mesh, example_kwargs={"input": torch.ones(8, 4)}, **options)


def test_types_are_of_the_options_there_are():
    assert set(RunOptions.__annotations__) == set(OPTIONS)
    for name, given in RunOptions.__annotations__.items():
        kept = set(Options.__annotations__[name].split(" | "))
        assert kept | {"None"} <= set(given.__forward_arg__.split(" | ")), name


@each_function
def test_a_signature_has_the_options_with_their_defaults(function):
    names = names_of(TAKES[function])
    assert names == [name for name in parameters(function) if name in OPTIONS and name not in OWN.get(function, ())]
    assert all(parameters(function)[name].default == OPTIONS[name].default for name in names)
    assert all(one.kind is not one.VAR_KEYWORD for one in parameters(function).values())


@each_function
def test_a_docstring_lists_the_options(function):
    text = " ".join(inspect.getdoc(function).split())
    for name in names_of(TAKES[function]):
        assert " ".join(f"{name}: {OPTIONS[name].help}".split()) in text
    assert "**options" not in text and "Options`" not in text
    assert all(f"{name}: {OPTIONS[name].help}" not in text for name in set(OPTIONS) - set(names_of(TAKES[function])))


@each_function
def test_a_default_is_what_leaving_it_out_is(function):
    for name in names_of(TAKES[function]):
        assert (
            read_options(function, {name: None}) == read_options(function, {name: OPTIONS[name].default}) == Options()
        )


@each_function
def test_a_function_takes_its_options(function):
    assert called(function, **{name: OPTIONS[name].default for name in names_of(TAKES[function])})


@each_function
def test_a_function_refuses_what_it_does_not_take(function):
    own = keywords(function)
    for name in {*OPTIONS, "colour"} - set(own):
        with pytest.raises(OptionError) as raised:
            called(function, **{name: 1})
        what, *why, hint = str(raised.value).splitlines()
        assert what == f"unknown option {name}="
        known = f"  why    other functions take it, {function.__name__}() does not"
        assert why == ([known] if name in OPTIONS else [])
        assert sorted(hint.removeprefix("  try    one of ").split(", ")) == sorted(own)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_the_options_of_its_function(command):
    function = COMMANDS[command]
    options = {one.name: one for one in main.commands[command].params if isinstance(one, click.Option)}
    names = names_of(TAKES[function])
    needed = ["--devices", "2"] if command == "search" else []
    left_out = main.commands[command].make_context(command, needed).params
    assert set(OPTIONS) & set(options) == {*names, *OWN.get(function, ())}
    for name in names:
        flag = f"--{name.replace('_', '-')}"
        assert options[name].opts == [flag] and left_out[name] is None  # for the function's default
        assert options[name].secondary_opts == [f"--no-{flag[2:]}"] * (OPTIONS[name].form is bool)
        assert options[name].help == OPTIONS[name].help
        assert options[name].help.endswith(f"[default: {OPTIONS[name].unset or OPTIONS[name].default}]")
    for name in set(options) & set(keywords(function)) - set(names):
        assert left_out[name] in (None, False, parameters(function)[name].default), name  # False: a flag


def test_a_default_that_is_not_its_own_word_is_said():
    assert all(option.unset for option in OPTIONS.values() if option.default in (None, True, False))
    assert all(str(option.default) in option.unset for option in OPTIONS.values() if isinstance(option.default, str)
               and option.unset)  # fmt: skip


def test_an_option_is_checked_before_a_model_is_made():
    from click.testing import CliRunner

    for command in COMMANDS:
        chosen = ["--devices", "2"] if command == "search" else ["--mesh", "tp2"]
        result = CliRunner().invoke(main, [command, "--model", "no_such:model", *chosen, "--memory", "lots"])
        assert result.exit_code == 2 and result.stderr.startswith("memory='lots' is not a size"), result.output
