"""Which of several closings of a round is followed. Pure, and the same for all who have read the same.

Peers with equal weights stay equal only while they learn from the same messages. A message that comes as a round's time
runs out is there for one and not yet for another, so each says in a closing, by digest, what it has heard, and all
follow the same one. A closing is its author's word and nothing more:

- Written early, it may leave out somebody. Nobody who was there early is left out by fewer than most of the voters.
- Written late, it is one voice among those that were there before.
- Written twice, it proves that its author said two things (:mod:`planaria.swarm.board.equivocation`), who then has no
  voice at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set

from planaria.swarm.board.difference import canonical
from planaria.swarm.board.word import digest_of

Heard = Mapping[str, str]
"""peer → SHA-256 of its message in a round"""


def text_of(heard: Heard) -> str:
    """The one text that says who was heard: what a receipt about a round has."""
    return canonical(dict(heard))


def followed(
    closings: Mapping[str, Heard], voters: Set[str], awaited: Set[str], quorum: int, early: Set[str]
) -> Heard | None:
    """What most of the ``voters`` say was heard; None if none of them says anything that counts.

    ``closings``: by author. What counts names ``quorum`` of those ``awaited``, and everybody who came ``early``, to the
    reader's own knowledge, unless more than half of the voters name the same. Of two that as many name, the one that
    names more peers is followed, then the one with the smaller digest.
    """
    votes = Counter(text_of(heard) for author, heard in closings.items() if author in voters)
    lists = {text_of(heard): heard for heard in closings.values()}
    counted = [
        text
        for text, count in votes.items()
        if len(lists[text].keys() & awaited) >= quorum
        and (awaited & early <= lists[text].keys() or 2 * count > len(voters))
    ]
    if not counted:
        return None
    return lists[min(counted, key=lambda text: (-votes[text], -len(lists[text]), digest_of(text)))]
