"""What ranks tell each other before they share memory."""

import pytest
from rank_threads import ranks_of, together

from k3dsl import ConfigError, PeerError
from k3dsl.nvidia.exchange import LocalExchange, agree


def test_facts_are_compared_on_every_rank():
    a, b = ranks_of(2)
    same, other = {"heads": 12, "shapes": [[1, 1]]}, {"heads": 6, "shapes": [[1, 1]]}
    assert together(lambda: agree(a, "x", same), lambda: agree(b, "x", same)) == [None, None]
    errors = together(lambda: agree(a, "x", same), lambda: agree(b, "x", other))
    assert all(isinstance(e, ConfigError) and "heads differs: rank 0 has 12, rank 1 has 6" in str(e) for e in errors)
    assert "shapes" not in str(errors[0])


def test_a_rank_that_does_not_come_is_named():
    a, _ = ranks_of(2, seconds=0.2)
    with pytest.raises(PeerError, match=r"rank 0 waited 0.2 s in reset for rank 1") as caught:
        a.share("reset", {})
    assert (caught.value.rank, caught.value.peer, caught.value.region) == (0, 1, "reset")


def test_a_round_that_was_given_up_has_not_been():
    """One that comes late finds nobody in it, and when both come they meet."""
    a, b = ranks_of(2, seconds=0.2)
    for one in (b, a, b):
        with pytest.raises(PeerError, match="did not come"):
            agree(one, "x", {"heads": 12})
    b.seconds = a.seconds = 5.0
    assert together(lambda: agree(a, "x", {"heads": 12}), lambda: agree(b, "x", {"heads": 12})) == [None, None]


def test_a_rank_that_failed_says_so():
    a, b = ranks_of(2)
    errors = together(lambda: a.share("prepare_cache", {}), lambda: b.fail("prepare_cache", ValueError("no page")))
    assert isinstance(errors[0], ConfigError)
    assert "rank 1 failed: ValueError: no page" in str(errors[0])


def test_ranks_that_do_different_things():
    a, b = ranks_of(2)
    errors = together(lambda: a.share("reset", {}), lambda: b.share("prepare_cache", {}))
    assert all("all ranks must do the same" in str(e) for e in errors)


def test_ranks_of_one_process_see_those_before_them():
    rounds: dict = {}
    a, b = (LocalExchange(rounds, r) for r in range(2))
    agree(a, "x", {"heads": 12})
    with pytest.raises(ConfigError, match="heads differs"):
        agree(b, "x", {"heads": 6})
