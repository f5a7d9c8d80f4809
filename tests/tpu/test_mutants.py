"""The table of planted faults (`make mutants`) is of this tree. Oracle: the files, the tests and the kept record."""

import json
import re


def test_every_fault_is_where_the_table_has_it(root, monkeypatch):
    monkeypatch.syspath_prepend(root / "tests/tpu/mutants")
    import table

    mutants = table.every()
    for mutant in mutants:
        text = (root / mutant.file).read_text()
        assert mutant.planted(text) != text, mutant.name
        for test in mutant.tests:
            file, _, name = test.partition("::")
            assert re.search(rf"^def {name.partition('[')[0]}\(", (root / "tests/tpu" / file).read_text(), re.M), test
    record = json.loads((root / "examples/tpu/results/mutants.json").read_text())
    seen = [m for m in mutants if record[m.name]["caught_by"]]
    assert len(seen) >= 57 and all(m.survives for m in mutants if m not in seen)
