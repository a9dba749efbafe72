"""Picks the few of many replicas that a policy looks at.

With at most 16 replicas it picks all of them. With more it picks the replicas where the adapter has
its home, where this adapter, session or prompt prefix went recently, and some at random: a decision
costs the same with 1,000 replicas as with 16.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Sequence

from serve_app.messages import RoutingRequest
from serve_app.routing.lru import LruDict
from serve_app.routing.view import ReplicaView

ALL_UP_TO = 16  # replicas
_MAX_HOMES = 8  # homes of the adapter among the candidates
_MAX_PLACES = 4  # replicas remembered per adapter
_MAX_PREFIXES = 64  # prefixes remembered per prompt
_MAX_ADAPTERS = 32768
_MAX_SESSIONS = 65536
_MAX_DIGESTS = 262144


class CandidateSampler:
    def __init__(self, draw: random.Random, num_random: int) -> None:
        """`num_random`: candidates drawn at random for each request."""
        self._draw = draw
        self._num_random = num_random
        self.all: Sequence[ReplicaView] = ()
        self._by_id: dict[str, ReplicaView] = {}
        # The replicas that requests with an adapter, session or prefix digest went to.
        self._adapters: LruDict[str, tuple[str, ...]] = LruDict(_MAX_ADAPTERS)
        self._sessions: LruDict[bytes, str] = LruDict(_MAX_SESSIONS)
        self._prefixes: LruDict[int, str] = LruDict(_MAX_DIGESTS)

    def set_replicas(self, replicas: Sequence[ReplicaView]) -> bool:
        """Returns False, at little cost, if it is the same sequence as before."""
        if replicas is self.all and len(replicas) == len(self._by_id):
            return False
        self.all = replicas
        self._by_id = {replica.replica_id: replica for replica in replicas}
        return True

    def get(self, replica_id: str) -> ReplicaView | None:
        return self._by_id.get(replica_id)

    def candidates(self, request: RoutingRequest, homes: Sequence[str] = ()) -> list[ReplicaView]:
        """Returns at least one replica, unless there are none. `homes`: of the adapter."""
        if len(self.all) <= ALL_UP_TO:
            return list(self.all)
        if len(homes) > _MAX_HOMES:
            homes = self._draw.sample(homes, _MAX_HOMES)
        named = self._known((*homes, *self._recent(request)))
        found = {id(replica): replica for replica in named}
        for replica in self.sample(self._num_random):
            found[id(replica)] = replica
        return list(found.values())

    def sample(self, count: int) -> list[ReplicaView]:
        """Draws `count` replicas at random, or all of them if there are fewer."""
        replicas = self.all
        if count >= len(replicas):
            return self._draw.sample(replicas, len(replicas))
        places = range(len(replicas))
        return [replicas[place] for place in self._draw.sample(places, count)]

    def session_place(self, session: str | None) -> str | None:
        """Returns the replica that the session's last request went to."""
        return None if session is None else self._sessions.get(_session_key(session))

    def record(self, request: RoutingRequest, replica_id: str) -> None:
        """Remembers where the request went."""
        if request.session is not None:
            self._sessions.put(_session_key(request.session), replica_id)
        if len(self.all) <= ALL_UP_TO:
            return
        if request.adapter is not None:
            places = self._adapters.get(request.adapter) or ()
            if replica_id not in places:
                places = (replica_id, *places[: _MAX_PLACES - 1])
            self._adapters.put(request.adapter, places)
        for digest in request.prefixes[:_MAX_PREFIXES]:
            self._prefixes.put(digest, replica_id)

    def _recent(self, request: RoutingRequest) -> list[str]:
        """Returns the replicas to which the request's adapter and session went, and its two longest
        prefixes that went elsewhere."""
        adapter = request.adapter
        places = list(self._adapters.get(adapter) or ()) if adapter is not None else []
        if (place := self.session_place(request.session)) is not None:
            places.append(place)
        num_found = 0
        for digest in reversed(request.prefixes[:_MAX_PREFIXES]):
            found = self._prefixes.get(digest)
            if found is not None and found not in places:
                places.append(found)
                num_found += 1
                if num_found == 2:
                    break
        return places

    def _known(self, replica_ids: Iterable[str]) -> list[ReplicaView]:
        return [self._by_id[name] for name in replica_ids if name in self._by_id]


def _session_key(session: str) -> bytes:
    """Shortens a client's string of any length to 16 bytes: a full map occupies about 10 MB."""
    return hashlib.blake2b(session.encode(), digest_size=16).digest()
