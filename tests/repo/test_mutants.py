"""The planted faults fit the code as it is: `make mutants` would stop at one that does not."""

from pathlib import Path

from mutants import MUTANTS

ROOT = Path(__file__).resolve().parents[2]


def test_every_planted_fault_has_its_place():
    assert len(MUTANTS) >= 40
    times = {mutant: (ROOT / mutant.file).read_text().count(mutant.before) for mutant in MUTANTS}
    assert set(times.values()) == {1}, [mutant for mutant, number in times.items() if number != 1]
