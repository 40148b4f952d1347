"""Places: keys of sites that another process has too."""

from __future__ import annotations

import pickle
import sys

from daf_hf.places import place_of


def test_a_place_is_the_same_for_the_same_code():
    source = "def forward(x):\n    return x\n"

    def key(path):
        code = compile(source, path, "exec")
        return ("layer.0", True, ("Gelu", code, 7), 2)

    one, other = place_of(key("/here/model.py")), place_of(key("/there/model.py"))
    assert one == other == pickle.loads(pickle.dumps(one)) == place_of(one)
    assert one != place_of(key("/here/other.py"))


def test_places_of_other_lines_differ():
    def places():
        first = sys._getframe()
        return place_of((first.f_code, first.f_lasti)), place_of((first.f_code, first.f_lasti))

    one, other = places()
    assert one != other and one[0] == other[0]
