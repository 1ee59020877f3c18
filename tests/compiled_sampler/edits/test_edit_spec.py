"""What the edits declare fits together: parameters of requests, columns of a slot's row, tables, and who names them."""

import dataclasses
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from compiled_sampler import EditSizes, SamplingParams
from compiled_sampler.edits import EDIT_SPECS, PARAMETERS
from compiled_sampler.engine.requests.edit_slots import RowLayout
from tests.builders.edits import OF_EDIT, V

LAW = {"temperature", "top_k", "top_p", "min_p", "seed", "extra_args"}
"""Parameters of every request, and what brings edits of the user."""


def test_each_parameter_is_of_one_edit_or_of_the_law():
    declared = [name for spec in EDIT_SPECS for name in spec.parameters]
    assert Counter([*LAW, *declared]) == Counter(field.name for field in dataclasses.fields(SamplingParams))


def test_defaults_are_stored_as_they_are_and_need_no_edit():
    """The checks run, since a parameter is not the default itself."""
    params = SamplingParams(logit_bias={})
    assert params.edits == ()
    for name, parameter in PARAMETERS.items():
        default = getattr(SamplingParams(), name)
        assert parameter.check(name, default) == default == getattr(params, name)


@pytest.mark.parametrize("sizes", [EditSizes(), EditSizes(biases=1, stops=3, bad_words=5, bad_word_len=7, breakers=17)])
def test_no_word_of_a_row_belongs_to_two_columns(sizes):
    layout, owners = RowLayout(sizes, V), Counter[int]()
    for column, start in layout.starts.items():
        words = column.dtype.itemsize // 4
        assert start % (16 if layout.shapes[column] else words) == 0
        owners.update(range(start, start + words * int(np.prod(layout.shapes[column]))))
    assert set(owners.values()) == {1}
    assert max(owners) < layout.num_words


@pytest.mark.parametrize("name", OF_EDIT)
def test_a_row_differs_from_one_without_edits_in_the_columns_of_its_edits_alone(name):
    layout, params = RowLayout(EditSizes(), V), SamplingParams(temperature=0.7, **OF_EDIT[name])
    assert name in params.edits
    changed = layout.row_of(params, params.edits, 0, False) != layout.row_of(SamplingParams(), (), 0, False)
    for column, start in layout.starts.items():
        words = column.dtype.itemsize // 4 * int(np.prod(layout.shapes[column]))
        if not any(column in spec.columns.values() for spec in EDIT_SPECS if spec.name in params.edits):
            assert not changed[start : start + words].any()
    assert changed.any()


def test_a_greedy_request_has_no_filter_and_writes_none():
    layout, every = RowLayout(EditSizes(), V), {"typical_p": 0.5, "xtc_probability": 1.0, "min_k": True, "p_less": True}
    params = SamplingParams(temperature=0.0, top_n_sigma=1.0, **every)
    assert params.edits == ()
    assert np.array_equal(layout.row_of(params, params.edits, 0, False), layout.row_of(SamplingParams(), (), 0, False))


def test_the_page_for_users_names_every_parameter():
    page = (Path(__file__).parents[3] / "docs" / "edits.md").read_text()
    assert set(PARAMETERS) <= set(re.findall(r"\w+", page))
