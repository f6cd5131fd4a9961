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


def test_pages_the_tree_has_never_heard_of_are_in_no_node() -> None:
    tree = Tree(page_tokens=2)
    insert(tree, tokens_of(1, 2, 3, 4), [10, 11])
    beyond = tree._node_of.size + 1  # what the tree remembers of pages ends before this id
    assert np.flatnonzero(tree.placed(np.arange(beyond, dtype=np.int32))).tolist() == [10, 11]
    assert [page for page in range(beyond) if tree.contains(page)] == [10, 11]


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


def test_buffers_are_given_back_when_most_of_them_is_unused() -> None:
    tree = Tree(page_tokens=1)
    path = np.array(insert(tree, np.arange(1000, dtype=np.int32), list(range(1000))), np.int32)
    before = tree.buffer_bytes
    insert(tree, np.array([*range(500), -1], np.int32), [1000])
    assert tree.buffer_bytes == before + 2 * 4, "a split leaves nothing unused behind"
    tree.remove_leaves(path[:499:-1])
    assert tree.node_count == 2, "the tail is gone"
    tree.remove_last(1000)
    tree.remove_leaves(path[499:100:-1])
    assert tree.page_count == 101
    assert tree.buffer_bytes <= 4 * 101 * 2 * 4
    assert tree.check() == []


@given(st.lists(st.integers(0, 29), max_size=12), st.integers(0, 30), st.integers(0, 31))
def test_a_prompt_that_was_split_many_times_is_found_as_if_it_never_was(
    parted_at: list[int], removed: int, parts_at: int
) -> None:
    """Of 30 pages the last `removed` go; a prompt that parts at page `parts_at` finds the rest."""
    tree, stored = Tree(page_tokens=2), np.arange(60, dtype=np.int32)
    insert(tree, stored, list(range(30)))
    for serial, at in enumerate(parted_at):
        other = np.concatenate((stored[: 2 * at], tokens_of(-serial - 1, 0)))
        insert(tree, other, [100 + serial])
    kept = 30 - tree.remove_leaves(np.arange(29, 29 - removed, -1, dtype=np.int32)).size
    assert tree.check() == []

    asked = stored.copy()
    asked[2 * parts_at + 1 :] = -99
    match = tree.match(NAMESPACE, 0, asked)

    found = min(parts_at, kept)
    if match is None:
        assert kept == 0
    else:
        assert match.pages.tolist() == list(range(found))
        assert match.node.first_depth + match.node_pages == found
        inside = match.node_pages < match.node.page_count
        assert match.beyond == (inside or bool(match.node.children))


def test_leaves_go_in_the_order_given_as_far_as_they_are_leaves() -> None:
    tree = Tree(page_tokens=1)
    insert(tree, tokens_of(1, 2, 3, 4), [10, 11, 12, 13])
    insert(tree, tokens_of(1, 2, 9), [14])

    removed = tree.remove_leaves(np.array([13, 12, 11, 10, 14, 11], np.int32))

    assert removed.tolist() == [13, 12, 14, 11], "11 had a child at its first turn"
    assert tree.page_count == 1
    assert tree.check() == []


@given(
    st.integers(1, 3),
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), max_size=8),
    st.lists(st.integers(0, 2), max_size=16),
)
def test_a_walk_that_goes_on_from_a_page_ends_where_the_whole_walk_ends(
    page_tokens: int, prompts: list[list[int]], query: list[int]
) -> None:
    tree = Tree(page_tokens)
    for serial, prompt in enumerate(prompts):
        insert(tree, np.array(prompt, np.int32), list(range(20 * serial, 20 * serial + 20)))
    tokens = np.array(query, np.int32)
    whole = tree.match(NAMESPACE, 0, tokens)
    for index, page in enumerate(whole.pages.tolist() if whole else []):
        assert whole is not None
        rest = tree.match_on(page, tokens[(index + 1) * page_tokens :])
        assert rest.pages.tolist() == whole.pages[index + 1 :].tolist()
        assert (rest.node, rest.node_pages) == (whole.node, whole.node_pages)
        assert rest.beyond == whole.beyond


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
        for prefix, page in model.items():
            parent = prefix[:-page_tokens]
            assert page in tree.children(model[parent]) if parent else True
            assert tuple(tree.page_at(page).tolist()) == prefix[-page_tokens:]
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
