"""All runs of the exchange protocol: none is wrong, and every mistake that it avoids is found.

A trace of a mistake that was found is printed with ``pytest -rP``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from protocol_model import Model
from protocol_search import explore
from protocol_state import Form

ONE, SHARED, TWO, GATHER = Form.ONE_KERNEL, Form.SHARED_PUSH, Form.TWO_KERNELS, Form.ALL_GATHER
FORMS = pytest.mark.parametrize("form", list(Form), ids=lambda form: form.name.lower())
#: With stores that land at once (``reduce=2``) the other forms differ in nothing.
EARLY_STORES = pytest.mark.parametrize("form", [ONE, GATHER], ids=["one_kernel", "all_gather"])

ONE_ROW = ((0,),)
#: Row 1 skips call 2, row 0 skips call 4: their epochs and parities part.
TWO_ROWS = ((0, 1), (0,), (0, 1), (1,), (0, 1))
NEVER, RANK_0 = ((),), ((), (0,))
ANY_OF_2 = ((), (0,), (1,), (0, 1))
SOME_OF_3 = ((), (1,), (0, 2))  # list slot 0 is rank 1's or rank 0's, slot 1 rank 2's


def assert_safe(model: Model) -> None:
    result = explore(model)
    print(f"{result.states} states")
    assert not result.violation, str(result)
    assert result.states > 200, "hardly a search"


@FORMS
def test_two_ranks(form: Form) -> None:
    """Five calls, so that epochs wrap and come back to the first one's tag; half by half, any rank saturated."""
    assert_safe(Model(2, ONE_ROW * 5, ANY_OF_2, form))


@FORMS
def test_two_ranks_two_rows(form: Form) -> None:
    assert_safe(Model(2, TWO_ROWS[:4], RANK_0, form, halves=1))


@EARLY_STORES
def test_two_ranks_two_rows_two_lists(form: Form) -> None:
    assert_safe(Model(2, TWO_ROWS, ((), (0, 1)), form, halves=1, reduce=2))


@FORMS
def test_three_ranks(form: Form) -> None:
    assert_safe(Model(3, ONE_ROW * 4, ((), (0, 2)), form, halves=1))


def test_three_ranks_more_patterns() -> None:
    assert_safe(Model(3, ONE_ROW * 5, SOME_OF_3, halves=1, reduce=2))


def test_three_ranks_half_by_half() -> None:
    assert_safe(Model(3, ONE_ROW * 2))


@EARLY_STORES
def test_three_ranks_two_rows(form: Form) -> None:
    assert_safe(Model(3, TWO_ROWS, ((), (0, 2)), form, halves=1, reduce=2))


@FORMS
def test_any_number_of_calls(form: Form) -> None:
    """Calls without end, numbered from the slowest rank's: a finite graph that holds every longer run."""
    assert_safe(Model(2, ONE_ROW, ((), (1,), (0, 1)), form, endless=True))


@EARLY_STORES
def test_any_number_of_calls_of_three_ranks(form: Form) -> None:
    assert_safe(Model(3, ONE_ROW, ((), (0, 2)), form, halves=1, endless=True, reduce=2))
    assert_safe(Model(3, ((0, 1), (0,)), NEVER, form, halves=1, endless=True, reduce=2))


def test_one_block_may_handle_its_rows_in_turn() -> None:
    assert_safe(Model(2, ((0, 1),) * 2, ((), (0,), (1,)), in_turn=True, halves=1))


@pytest.mark.parametrize("model", [Model(2, ONE_ROW * 3, ANY_OF_2, form) for form in Form], ids=lambda m: m.form.name)
def test_reduced_searches_agree_with_the_whole(model: Model) -> None:
    states = []
    for reduce in (2, 1, 0):
        result = explore(replace(model, reduce=reduce))
        assert not result.violation, str(result)
        states.append(result.states)
    assert states == sorted(states)


OLD = "it takes an old word or a zero"
LAST = "$"  # marks a step that has to be the last one
MISTAKES = {
    # name of the mistake: model, violation, the step that makes it
    "one parity": (
        Model(2, ONE_ROW * 2),
        "it overwrites the word of call 1",
        "word of call 2, rank 0, row 0, lands at rank 1$",
    ),
    "early epoch": (Model(2, ONE_ROW * 2), "no progress", "writes its epoch back, call 1 BEFORE all words were read"),
    "no wait": (
        Model(2, ONE_ROW * 2, form=TWO),
        "it takes word of call 2, rank",
        "writes its epoch back, call 1 BEFORE its push has ended",
    ),
    "own words at hand": (Model(2, ONE_ROW, form=SHARED), "no progress", "rank 0: a block sends half"),
    "one tag": (Model(2, ONE_ROW), OLD, "row 0: takes the words of rank$"),
    "list flag": (Model(2, ONE_ROW, RANK_0), OLD, "row 0: takes the list of rank 0$"),
    "old tags": (Model(2, ONE_ROW), OLD, "row 0: takes the words of rank$"),
    "row tags lists": (Model(2, ONE_ROW * 4, RANK_0), f"{OLD} for the word of call 4", "takes the list of rank 0$"),
    "early push": (Model(2, ONE_ROW * 2, form=TWO), "it overwrites", "call 2 BEFORE its merge of call 1 ended"),
    "early push, one kernel": (Model(2, ONE_ROW * 2), "it overwrites", "call 2 BEFORE its merge of call 1 ended"),
    "early push, own count": (Model(2, ONE_ROW * 3, form=TWO), "it overwrites", "call 3 BEFORE its merge of call 2"),
    "early push, all-gather": (
        Model(2, ONE_ROW * 2, RANK_0, GATHER),
        "it overwrites the word of call 1, rank 0",
        "begins round 1 of call 2 BEFORE its merge of call 1 ended",
    ),
    "call again": (Model(2, ONE_ROW * 2), "it overwrites the word of call 1", "call 1 raises AFTER its push"),
    "other order": (
        Model(2, ((0, 1),), ((), (0,), (1,)), in_turn=True),
        "waits in call 1 for the lists of row",
        "row 1: selects call 1",
    ),
    "push in turn": (
        Model(2, ((0, 1),), in_turn=True),
        "no progress",
        "word of call 1, rank 1, row 1, lands at rank 0",
    ),
}


@pytest.mark.parametrize("reduce", [1, 0], ids=["reduced", "whole"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found(mistake: str, reduce: int) -> None:
    model, violation, step = MISTAKES[mistake]
    result = explore(replace(model, mutant=mistake, reduce=reduce))
    print(f"{mistake}, all ranks in call 1:\n{result}")
    assert violation in result.violation, str(result)
    steps = result.trace[-1:] if step.endswith(LAST) else result.trace
    assert any(step.removesuffix(LAST) in name for name in steps), str(result)


def test_a_list_tagged_by_its_row_is_safe_until_the_epoch_wraps() -> None:
    """Why lists count for themselves: the mistake needs a wrap, 2**32 calls, so no test on real memory finds it."""
    model = Model(2, ONE_ROW * 5, RANK_0, mutant="row tags lists")
    assert_safe(replace(model, modulus=8))
    assert explore(model).violation


@pytest.mark.parametrize(
    "modulus, violation", [(2, OLD), (3, "it overwrites the word of call 2"), (5, "it overwrites")]
)
def test_four_is_the_smallest_modulus(modulus: int, violation: str) -> None:
    """With two, a slot's last tag comes again; with an odd number, two calls after another share a parity."""
    assert violation in explore(Model(2, ONE_ROW * 6, modulus=modulus)).violation
