"""Opening what a run is fed: sources have seeds of their own, and none of them another by accident."""

from raystride.pipelines.feed.opening import _seed


def test_a_sources_seed_follows_from_the_runs_and_its_name_alone_and_stays() -> None:
    """As sha256sum has it: a resumed run goes through its sources as it did."""
    assert [_seed(0, "web"), _seed(1, "web"), _seed(0, "code")] == [0x550ECDF065EDA3, 0xBAEDB2211FB298, 0x75AFE70CA15E2E]
