"""The cases of `test_errors.py` about `weights=`: the call, and the exact text it must give."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import autopart

FOLDER = Path("folder")
FILE, INDEX = FOLDER / "model.safetensors", FOLDER / "model.safetensors.index.json"


class Layers(nn.Module):
    def __init__(self, count: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


class Positions(Layers):
    """It makes a buffer that is in no file."""

    def __init__(self) -> None:
        super().__init__(1)
        self.register_buffer("positions", torch.arange(4.0), persistent=False)
        self.table = torch.ones(4)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.positions * self.table)


class Tied(Layers):
    def __init__(self) -> None:
        super().__init__(2)
        self.layers[1].weight = self.layers[0].weight


class Unlike(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 3)


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def weights(given: Any, write: Callable[[], Any] = lambda: None, build: Callable[[], nn.Module] = Layers) -> Any:
    """A case: a model on meta with these weights, in a folder where `write` has put something."""

    def case() -> Any:
        with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
            FOLDER.mkdir()
            write()
            example = torch.ones(8, 4)
            return autopart.parallelize(on_meta(build), "tp1", example_args=(example,), weights=given)

    return case


def saved(model: nn.Module, **changed: Any) -> Callable[[], None]:
    """Writes a model's weights; `changed`: other tensors for some, with `_` for the dots, or None for none."""

    def write() -> None:
        state = {name.replace(".", "_"): (name, value) for name, value in model.state_dict().items()}
        kept = {name: changed.get(key, value) for key, (name, value) in state.items()}
        more = {name: value for name, value in changed.items() if name not in state}
        save_file({name: t.clone() for name, t in {**kept, **more}.items() if t is not None}, FILE)

    return write


def indexed(places: dict[str, str]) -> Callable[[], None]:
    def write() -> None:
        saved(Layers())()
        FILE.rename(FOLDER / "part1.safetensors")
        INDEX.write_text(json.dumps({"weight_map": places}))

    return write


def cut_off() -> None:
    saved(Layers())()
    FILE.write_bytes(FILE.read_bytes()[:-10])


def twice() -> None:
    saved(Layers())()
    FILE.rename(FOLDER / "one.safetensors")
    saved(Layers())()
    FILE.rename(FOLDER / "two.safetensors")


WEIGHT_CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "weights: a number": (weights(3),
        "OptionError: weights=3 is not a source of weights\n  why    it must be a folder of safetensors, "
        "'init', or a function that makes the model\n  try    weights='folder'"),
    "weights: nothing there": (weights("no/such/folder"),
        "CheckpointError: there is no checkpoint at no/such/folder\n  why    it is neither a folder nor a "
        "file\n  try    model.save_pretrained(folder), or safetensors.torch.save_file(model.state_dict(), "
        "'model.safetensors')"),
    "weights: empty folder": (weights(FOLDER),
        "CheckpointError: there are no safetensors files in folder\n  why    it is empty\n  try    "
        "model.save_pretrained(folder), or safetensors.torch.save_file(model.state_dict(), "
        "'model.safetensors')"),
    "weights: no safetensors": (weights(FOLDER, lambda: (FOLDER / "pytorch_model.bin").write_bytes(b"1")),
        "CheckpointError: there are no safetensors files in folder\n  why    it has 'pytorch_model.bin'\n  "
        "try    model.save_pretrained(folder), or safetensors.torch.save_file(model.state_dict(), "
        "'model.safetensors')"),
    "weights: not safetensors": (weights(FOLDER, lambda: FILE.write_bytes(b"hello")),
        "CheckpointError: folder/model.safetensors is not a complete safetensors file\n  why    Error while "
        "deserializing header: header too small\n  try    copy or save it again"),
    "weights: cut off": (weights(FILE, cut_off),
        "CheckpointError: folder/model.safetensors is not a complete safetensors file\n  why    Error while "
        "deserializing header: incomplete metadata, file not fully covered\n  try    copy or save it again"),
    "weights: index: no JSON": (weights(FOLDER, lambda: INDEX.write_text("{")),
        "CheckpointError: folder/model.safetensors.index.json is not JSON\n  "
        "why    Expecting property name enclosed in double quotes\n  where  line 1\n  try    "
        "model.save_pretrained(folder), or safetensors.torch.save_file(model.state_dict(), "
        "'model.safetensors')"),
    "weights: index: no file": (weights(FOLDER, indexed({"a": "part1.safetensors", "b": "part2.safetensors"})),
        "CheckpointError: folder/model.safetensors.index.json names files that do not exist: "
        "'part2.safetensors'\n  why    1 of its 2 files exist\n  try    copy the complete folder "
        "again"),
    "weights: index: no tensor": (weights(INDEX, indexed({"a": "part1.safetensors"})),
        "CheckpointError: the index at folder/model.safetensors.index.json names tensors that are "
        "missing: 'a'\n  why    according to the index they are in part1.safetensors\n  try    copy the complete "
        "folder again"),
    "weights: two files": (weights(FOLDER, twice),
        "CheckpointError: two files of folder have the tensor 'layers.0.bias'\n  why    it is unclear "
        "which one to read\n  try    the path of one file, or of a folder with one checkpoint"),
    "weights: missing": (weights(FOLDER, saved(Layers(1))),
        "CheckpointError: the checkpoint at folder does not fit Layers\n  why    it has no "
        "'layers.1.weight', 'layers.1.bias', 'layers.2.weight', 'layers.2.bias', 'layers.3.weight', "
        "'layers.3.bias', 'layers.4.weight', 'layers.4.bias'\n  try    a model of the config and class "
        "that were saved"),
    "weights: other names": (weights(FOLDER, saved(nn.Sequential(*Layers().layers))),
        "CheckpointError: the checkpoint at folder does not fit Layers\n  why    it has no "
        "'layers.0.weight', 'layers.0.bias', 'layers.1.weight', 'layers.1.bias', 'layers.2.weight', "
        "'layers.2.bias', 'layers.3.weight', 'layers.3.bias' and 2 more; it has '0.bias', '0.weight', "
        "'1.bias', '1.weight', '2.bias', '2.weight', '3.bias', '3.weight' and 2 more\n  try    a model of "
        "the config and class that were saved"),
    "weights: shapes": (weights(FOLDER, saved(Layers(), layers_0_weight=torch.ones(4, 5), layers_4_bias=None)),
        "CheckpointError: the checkpoint at folder does not fit Layers\n  why    it has no "
        "'layers.4.bias'\n         'layers.0.weight' is [4, 5], in the model [4, 4]\n  try    a model of "
        "the config and class that were saved"),
    "weights: types": (weights(FOLDER, saved(Layers(), layers_0_weight=torch.ones(4, 4).to(torch.float8_e4m3fn))),
        "CheckpointError: the checkpoint at folder does not fit Layers\n  why    'layers.0.weight' is "
        "torch.float8_e4m3fn, in the model f32\n  try    a model of the config and class that were saved"),
    "weights: tied": (weights(FOLDER, saved(Layers(2)), Tied),
        "CheckpointError: 'layers.0.weight' and 'layers.1.weight' are one parameter of Tied, and two in "
        "the checkpoint at folder\n  why    their values there differ\n  try    a model that does not tie "
        "them (tie_word_embeddings=False in its config)"),
    "weights: buffers": (weights(FOLDER, saved(Layers(1)), Positions),
        "CheckpointError: Positions has no values for 'positions', 'table'\n  why    it is on "
        "the meta device, and in no file\n  try    set it on the model: model.positions = a tensor with "
        "values"),
    "weights: init": (weights("init"),
        "CheckpointError: weights='init' cannot construct a Layers\n  why    it calls the model's "
        "class with the model's config, as in transformers, and this model has no config\n  try    "
        "weights=lambda: Layers(...), the call that creates the model"),
    "weights: another model": (weights(Unlike),
        "CheckpointError: the model that weights= makes does not fit Layers\n  why    it has no "
        "'layers.0.weight', 'layers.0.bias', 'layers.1.weight', 'layers.1.bias', 'layers.2.weight', "
        "'layers.2.bias', 'layers.3.weight', 'layers.3.bias' and 2 more; it has 'bias', 'weight'\n  try    "
        "a model of the config and class that were saved"),
}  # fmt: skip
