from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import sites

from tapcheck.errors import SiteError
from tapcheck.sites import LAYER_POINTS, POINTS, Site, all_sites, parse_site, parse_sites


@given(st.builds(Site, st.sampled_from(LAYER_POINTS), st.integers(0, 10**8)) | sites)
def test_reading_a_printed_site_gives_it_back(site: Site) -> None:
    assert parse_site(str(site)) == site
    assert parse_site(site) == site


@given(st.text(max_size=12) | st.sampled_from(POINTS).flatmap(lambda p: st.text().map(p.__add__)))
def test_any_text_is_read_stably_or_refused(text: str) -> None:
    try:
        site = parse_site(text)
    except SiteError as error:
        assert repr(text) in str(error)  # noqa: PT017
    else:
        assert parse_site(str(site)) == site


def test_the_alias_is_the_point_it_stands_for() -> None:
    assert parse_site("residual_stream.3") == Site("resid_post", 3)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("resid_psot.0", "did you mean 'resid_post'"),
        ("resid_post", "needs a layer, such as 'resid_post.0'"),
        ("resid_post.-1", "index from 0, not '-1'"),
        ("resid_post.last", "index from 0, not 'last'"),
        ("resid_post.٣", "index from 0"),
        ("resid_post." + "9" * 5000, "index from 0"),
        ("final_norm.2", "final_norm has no layer"),
        ("", "is not a site"),
        ("resid_post.0.1", "is not a site"),
        (5, "is not a site"),
    ],
)
def test_a_bad_site_is_refused_with_the_way_out(text: str, says: str) -> None:
    with pytest.raises(SiteError, match=says):
        parse_site(text)


@given(st.permutations(all_sites(2)))
def test_sites_sort_in_execution_order(shuffled: list[Site]) -> None:
    assert [str(site) for site in sorted(shuffled)] == [
        "embed",
        *(f"{point}.{layer}" for layer in (0, 1) for point in LAYER_POINTS),
        "final_norm",
        "logits",
    ]


@given(st.lists(sites, min_size=1).flatmap(lambda few: st.permutations(few * 2)))
def test_sites_are_distinct_and_in_order_however_they_are_given(given_sites: list[Site]) -> None:
    parsed = parse_sites([str(site) for site in given_sites], 3)
    assert set(parsed) == set(given_sites)
    assert list(parsed) == sorted(set(parsed))


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        ([], "no site was named"),
        (["resid_post.4"], "the model has 4 layers, so the last is resid_post.3"),
        ("resid_post.0", "write .'resid_post.0'. for this one alone"),
    ],
)
def test_a_bad_list_of_sites_is_refused(texts: list[str] | str, says: str) -> None:
    with pytest.raises(SiteError, match=says):
        parse_sites(texts, 4)


def test_a_model_has_every_point_of_every_layer() -> None:
    assert len(set(all_sites(3))) == len(LAYER_POINTS) * 3 + 3
