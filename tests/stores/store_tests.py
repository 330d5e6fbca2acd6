"""The contract of stores, as the tests of each format begin it."""

import pytest

from stream_dataloader.testing import StoreContract


class StoreTests(StoreContract):
    """`StoreContract` for the store that the fixture `made` returns; `expected` is a fixture of each class, too."""

    @pytest.fixture
    def open_stream(self, made):
        yield made
        made.close()

    @pytest.fixture
    def sources(self, open_stream):
        return list(open_stream.sources)
