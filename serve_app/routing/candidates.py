"""Which few of many replicas a policy looks at.

Up to 16 it looks at all. Beyond, at those where the adapter lives, where this adapter, session or
prompt prefix went of late, and at some drawn at random: a decision costs the same at 1,000 replicas
as at 16.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Sequence

from serve_app.messages import RoutingRequest
from serve_app.routing.lru import LruDict
from serve_app.routing.view import ReplicaView

ALL_LOOKED_AT = 16
_MAX_NAMED = 8  # of an adapter's homes and holders
_MAX_PLACES = 4  # remembered of an adapter
_MAX_PREFIXES = 64  # remembered of one prompt
_MAX_ADAPTERS = 32768
_MAX_SESSIONS = 65536
_MAX_DIGESTS = 262144


class CandidateSampler:
    def __init__(self, draw: random.Random, num_random: int) -> None:
        self._draw = draw
        self._num_random = num_random
        self._replicas: Sequence[ReplicaView] = ()
        self._by_id: dict[str, ReplicaView] = {}
        self._adapters: LruDict[str, tuple[str, ...]] = LruDict(_MAX_ADAPTERS)
        self._sessions: LruDict[bytes, str] = LruDict(_MAX_SESSIONS)
        self._prefixes: LruDict[int, str] = LruDict(_MAX_DIGESTS)

    def take(self, replicas: Sequence[ReplicaView]) -> bool:
        """Whether these are others than before. Cheap for the same sequence."""
        if replicas is self._replicas and len(replicas) == len(self._by_id):
            return False
        self._replicas = replicas
        self._by_id = {one.replica_id: one for one in replicas}
        return True

    @property
    def every(self) -> Sequence[ReplicaView]:
        return self._replicas

    @property
    def replica_ids(self) -> tuple[str, ...]:
        return tuple(self._by_id)

    def get(self, replica_id: str) -> ReplicaView | None:
        return self._by_id.get(replica_id)

    def look(self, ask: RoutingRequest, homes: Sequence[str] = ()) -> list[ReplicaView]:
        """Never empty, unless there are no replicas."""
        if len(self._replicas) <= ALL_LOOKED_AT:
            return list(self._replicas)
        if len(homes) > _MAX_NAMED:
            homes = self._draw.sample(homes, _MAX_NAMED)
        seen = {id(one): one for one in self._known((*homes, *self._remembered(ask)))}
        for one in self.some(self._num_random):
            seen[id(one)] = one
        return list(seen.values())

    def some(self, count: int) -> list[ReplicaView]:
        """Drawn at random."""
        replicas = self._replicas
        if count >= len(replicas):
            return self._draw.sample(replicas, len(replicas))
        places = range(len(replicas))
        return [replicas[place] for place in self._draw.sample(places, count)]

    def session_place(self, session: str | None) -> str | None:
        return None if session is None else self._sessions.get(_session_key(session))

    def went(self, ask: RoutingRequest, replica_id: str) -> None:
        """Remember it."""
        if ask.session is not None:
            self._sessions.put(_session_key(ask.session), replica_id)
        if len(self._replicas) <= ALL_LOOKED_AT:
            return
        if ask.adapter is not None:
            places = self._adapters.get(ask.adapter) or ()
            if replica_id not in places:
                places = (replica_id, *places[: _MAX_PLACES - 1])
            self._adapters.put(ask.adapter, places)
        for digest in ask.prefixes[:_MAX_PREFIXES]:
            self._prefixes.put(digest, replica_id)

    def _remembered(self, ask: RoutingRequest) -> list[str]:
        places = list(self._adapters.get(ask.adapter) or ()) if ask.adapter is not None else []
        if (place := self.session_place(ask.session)) is not None:
            places.append(place)
        num_found = 0
        for digest in reversed(ask.prefixes[:_MAX_PREFIXES]):
            found = self._prefixes.get(digest)
            if found is not None and found not in places:
                places.append(found)
                num_found += 1
                if num_found == 2:
                    break
        return places

    def _known(self, replica_ids: Iterable[str]) -> list[ReplicaView]:
        return [self._by_id[one] for one in replica_ids if one in self._by_id]


def _session_key(session: str) -> bytes:
    """16 bytes for a client's string of any length: a full map takes about 10 MB."""
    return hashlib.blake2b(session.encode(), digest_size=16).digest()
