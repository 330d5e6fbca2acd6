"""The contract of stores, as the tests of each format begin it."""

import contextlib
import itertools
import random

import pytest

from stream_dataloader._engine.kept_fields import map_leaves
from stream_dataloader.testing import StoreContract
from stream_dataloader.testing._items import assert_same, copied, has_objects, items_of, written


class StoreTests(StoreContract):
    """`StoreContract` for the store that `make` returns, or a fixture `made`; `streams` are what it holds."""

    @pytest.fixture
    def made(self, tmp_path):
        return self.make(tmp_path)

    @pytest.fixture
    def expected(self):
        return self.streams

    @pytest.fixture
    def open_stream(self, made):
        yield made
        made.close()

    @pytest.fixture
    def sources(self, open_stream):
        return list(open_stream.sources)

    def test_one_stream_is_read_again_and_again_in_any_order(self, open_stream, sources):
        """Sought, read one by one and many at once, also back and behind its end, it gives what a new one gives."""
        rng = random.Random(1)
        for source in sources:
            items, place, done = items_of(open_stream(source)), 0, []
            ways = ["next", "into"] if items and not has_objects(items[0]) else ["next"]
            with contextlib.closing(open_stream(source)) as stream:
                if hasattr(stream, "seek_item"):  # shards of rows only go forward
                    ways = ["seek", *ways]
                for _ in range(20):
                    what, count = rng.choice(ways), rng.choice([1, 3, 7])
                    if what == "seek":
                        place, count, found = rng.randint(0, len(items)), 0, []
                        stream.seek_item(place)
                    elif what == "next":
                        found = [map_leaves(item, copied) for item in itertools.islice(stream, count)]
                    else:
                        found = written(stream, items[0], count, source)
                    done.append(f"{what} {place if what == 'seek' else count}")
                    assert_same(found, items[place : place + count], source, f"read after {', '.join(done)}")
                    place += len(found)
