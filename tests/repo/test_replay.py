"""What `make replay` compares: the same text each time, and another one for another program."""

import pytest
import replay


def written(folder):
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*.*")}


@pytest.mark.large
def test_a_model_is_written_alike_twice(tmp_path):
    number = replay.write_model("skip_mlp", str(tmp_path / "one"))
    replay.write_model("skip_mlp", str(tmp_path / "two"))
    files = written(tmp_path / "one")
    assert files == written(tmp_path / "two")
    assert number == len(list(replay.cases())) and len(files) > number
    programs = {name: text for name, text in files.items() if name.endswith(".program.txt")}
    assert len(set(programs.values())) > len(programs) / 2
    assert "stored layers.0.weight [32, 32] {tp:S(0)}" in programs["skip_mlp/tp2.program.txt"]
    assert "torch.ops.autopart.all_reduce" in programs["skip_mlp/tp2.program.txt"]


def test_every_case_is_of_some_model():
    names = [name for name, _, _ in replay.cases()]
    assert len(names) == len(set(names)) and len(replay.models()) >= 12 and len(replay.MESHES) >= 6
