"""Every mutant of `tests/mutants.txt` has its place in the code as it is."""

import mutants


def test_each_mutant_is_found_once():
    planted = mutants.planted(mutants.ROOT, mutants.read())
    assert len(planted) == len(mutants.read()) > 100
