"""The radix tree against a plain set of prefixes."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tiercache.tree import Tree, common_tokens

NAMESPACE = b"n" * 32


def tokens_of(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def insert(tree: Tree, tokens: np.ndarray, ids: list[int]) -> list[int]:
    """Inserts whole pages of `tokens`; returns the ids of its path."""
    tree.ensure_root(NAMESPACE, 0)
    tokens = tokens[: tokens.size // tree.page_tokens * tree.page_tokens]
    match = tree.match(NAMESPACE, 0, tokens)
    assert match is not None
    missing = tokens.size // tree.page_tokens - match.pages.size
    new = np.array(ids[:missing], np.int32)
    if missing:
        tree.extend(match, tokens[match.pages.size * tree.page_tokens :], new)
    return [*match.pages.tolist(), *new.tolist()]


def test_prompts_that_share_the_first_part_of_a_node_split_it_at_the_page_edge() -> None:
    tree = Tree(page_tokens=2)
    insert(tree, tokens_of(1, 2, 3, 4, 5, 6), [10, 11, 12])

    # the second page parts inside: the edge is before it
    assert insert(tree, tokens_of(1, 2, 3, 9, 5, 6), [20, 21]) == [10, 20, 21]

    for prompt, path in [((1, 2, 3, 4, 5, 6), [10, 11, 12]), ((1, 2, 3, 9, 5, 6), [10, 20, 21])]:
        match = tree.match(NAMESPACE, 0, tokens_of(*prompt))
        assert match is not None
        assert match.pages.tolist() == path
    assert tree.node_count == 3
    assert tree.check() == []


def test_a_match_changes_nothing() -> None:
    tree = Tree(page_tokens=2)
    insert(tree, tokens_of(1, 2, 3, 4), [10, 11])

    match = tree.match(NAMESPACE, 0, tokens_of(1, 2, 7, 8))

    assert match is not None
    assert match.pages.tolist() == [10]
    assert match.beyond
    assert tree.node_count == 1


def test_a_growing_sequence_stays_one_node() -> None:
    tree = Tree(page_tokens=2)
    sequence = np.arange(2000, dtype=np.int32)
    for stop in range(2, 2001, 2):
        insert(tree, sequence[:stop], [stop // 2])
    assert tree.node_count == 1
    assert tree.check() == []


def test_an_empty_root_is_forgotten() -> None:
    tree = Tree(page_tokens=1)
    insert(tree, tokens_of(1, 2), [10, 11])
    tree.remove_last(11)
    tree.remove_last(10)
    assert tree.roots == ()
    assert tree.match(NAMESPACE, 0, tokens_of(1, 2)) is None


@given(
    st.lists(st.integers(0, 3), max_size=50),
    st.lists(st.integers(0, 3), max_size=50),
    st.integers(0, 20_000),
)
def test_common_tokens_finds_the_first_difference(
    left: list[int], right: list[int], shared: int
) -> None:
    head = np.zeros(shared, np.int32)
    a, b = (np.concatenate((head, np.array(x, np.int32))) for x in (left, right))
    expected = shared
    for x, y in zip(left, right, strict=False):
        if x != y:
            break
        expected += 1
    assert common_tokens(a, b) == expected


@given(
    st.integers(1, 3),
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), max_size=12),
    st.data(),
)
def test_the_tree_matches_what_a_dict_of_prefixes_matches(
    page_tokens: int, prompts: list[list[int]], data: st.DataObject
) -> None:
    tree = Tree(page_tokens)
    model: dict[tuple[int, ...], int] = {}
    next_id = 0
    for prompt in prompts:
        pages = [
            tuple(prompt[: stop * page_tokens]) for stop in range(1, len(prompt) // page_tokens + 1)
        ]
        ids = list(range(next_id, next_id + len(pages)))
        next_id += len(pages)
        path = insert(tree, np.array(prompt, np.int32), ids)
        for prefix, page in zip(pages, path, strict=True):
            assert model.setdefault(prefix, page) == page
        assert tree.check() == []
    while model:
        leaves = [
            prefix
            for prefix in model
            if not any(other[: len(prefix)] == prefix for other in model if other != prefix)
        ]
        victim = data.draw(st.sampled_from(sorted(leaves)))
        tree.remove_last(model.pop(victim))
        assert tree.check() == []
        for prefix, page in model.items():
            match = tree.match(NAMESPACE, 0, np.array(prefix, np.int32))
            assert match is not None
            assert match.pages[-1] == page
    assert tree.node_count == 0
